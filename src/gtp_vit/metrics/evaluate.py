"""evaluate: how far models are from the unreduced one on the same images, by the measure for their kind of output.

Every model sees every batch. A few numbers are kept for each image and model; intervals come from resampling images,
the same ones for both sides of a difference.

Shapes: I images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.data.items import Batch, Item
from gtp_vit.data.loader import batches
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import (
    UNREDUCED,
    Array,
    Arrays,
    Measure,
    Metric,
    Stored,
    check_reference_outputs,
    decode_array,
    encode_arrays,
)
from gtp_vit.metrics.output_cache import OutputCache
from gtp_vit.metrics.registry import select_measure
from gtp_vit.runs import distributed
from gtp_vit.runs.journal import Journal

RESAMPLES = 2000
MAX_VECTORS = 5000  # images whose embeddings are kept for their neighbours
ImagesDone = Callable[[int, int | None], None]  # images done, and their total if that is known


class EntryOfModel(TypedDict):
    """The stored values of a model on one batch."""

    arrays: dict[str, list[Stored]]  # of the measure, encoded
    seconds: float


class Entry(TypedDict):
    """A journal's entry of one batch."""

    index: list[int]  # places in the data set
    unreadable: dict[int, str]  # place -> name and problem; JSON makes texts of the places
    models: dict[str, EntryOfModel]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Score:
    """One model on all images. Shares are in percent, as timm prints them."""

    name: str
    images: int
    figures: dict[str, Interval]  # those of the measure that could be computed
    damage: Interval  # the figure by which models are ranked: how far it is from the unreduced one
    seconds: float  # in the model's forward passes
    not_finite: int  # images whose outputs are not finite (embeddings: or zero): wrong, and without damage

    def __getitem__(self, figure: str) -> Interval:
        return self.figures[figure]


@dataclass(frozen=True)
class Evaluation:
    """All models on the same images."""

    measure: Measure
    scores: tuple[Score, ...]
    unreadable: tuple[str, ...]
    per_image_values: dict[str, Arrays]  # model -> values of each image, by figure

    def not_finite(self) -> list[str]:
        """A sentence for each model with outputs that are not finite."""
        return [
            f"{score.name}: {score.not_finite} of {score.images} images have outputs that are {self.measure.undefined}"
            for score in self.scores
            if score.not_finite
        ]

    def figures(self) -> list[Metric]:
        """The figures that all models have, in the order of the measure."""
        return [figure for figure in self.measure.metrics if figure.name in self.scores[0].figures]

    def differences(self, names: Sequence[tuple[str, str, str]]) -> list[Interval]:
        """For each (one, other, figure): the first model's value, e.g. kl or agreement, minus the other's, paired."""
        rows = [self.per_image_values[one][f] - self.per_image_values[other][f] for one, other, f in names]
        return bootstrap(np.stack(rows), [self.measure.metric(figure).partial for _, _, figure in names])


def evaluate(
    models: Mapping[str, nn.Module],
    dataset: Dataset[Item],
    *,
    batch_size: int = 64,
    workers: int = 2,
    journal: Journal | None = None,
    cache: OutputCache | None = None,
    measure: str | Measure = "auto",
    progress: ImagesDone | None = None,
) -> Evaluation:
    """Run all models over all images once; in several processes each runs its share, and all get the whole result.

    Args:
        models: name -> model; the first is the unreduced one, called UNREDUCED. They are measured in eval mode.
        dataset: images; labels are needed for accuracy only.
        batch_size: images at a time.
        workers: processes that read images.
        journal: of this run; batches that are in it are not run again. Only the first process has one.
        cache: outputs of the unreduced model from earlier passes over the same images, used instead of running it.
        measure: how outputs are compared: auto, the name of a measure, or a measure (registry.py).
        progress: called after every batch.
    """
    assert next(iter(models)) == UNREDUCED
    chosen = check_measure(models, measure)
    entries: list[Entry] = distributed.broadcast(list(journal.entries) if journal is not None else [])
    total = len(dataset) if hasattr(dataset, "__len__") else None
    done = sum(len(entry["index"]) + len(entry["unreadable"]) for entry in entries)
    device = next(next(iter(models.values())).parameters()).device
    if progress is not None:
        progress(done, total)
    # Of very many images neighbours are compared among some, evenly spread: vectors of all would fill the memory.
    every = 1 if total is None else math.ceil(total / MAX_VECTORS)
    pin, share = device.type == "cuda", distributed.rank_and_world_size()
    own = batches(dataset, batch_size=batch_size, workers=workers, skip=done, pin=pin, rank_and_world_size=share)
    while True:
        # A round covers consecutive images whatever the number of processes, so any number of them can resume.
        batch = next(own, None)
        with eval_mode(*models.values()):
            run = None if batch is None else _run(models, batch, device, chosen, every, cache)
        finished = [entry for entry in distributed.all_gather(run) if entry is not None]
        if not finished:
            break
        entries.append(finished[0] if len(finished) == 1 else merge(finished))
        if journal is not None:
            journal.append(entries[-1])
        done += len(entries[-1]["index"]) + len(entries[-1]["unreadable"])
        if progress is not None:
            progress(done, total)
    return summarise(list(models), entries, chosen)


def check_measure(models: Mapping[str, nn.Module], name: str | Measure = "auto") -> Measure:
    """The measure for these models, the unreduced one first; raises SettingError if their outputs do not fit it."""
    first, *others = models.values()
    chosen = select_measure(first, name)
    for model in others:
        select_measure(model, chosen.name)
    return chosen


def merge(entries: list[Entry]) -> Entry:
    """The entries of several processes for one round as one entry, in the order of the data set."""
    unreadable = {place: text for entry in entries for place, text in entry["unreadable"].items()}
    entries = [entry for entry in entries if entry["index"]]
    if not entries:
        return {"index": [], "unreadable": dict(sorted(unreadable.items())), "models": {}}
    places = [place for entry in entries for place in entry["index"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    models: dict[str, EntryOfModel] = {}
    for name, first in entries[0]["models"].items():
        own = [entry["models"][name] for entry in entries]
        arrays = {}
        for key in first["arrays"]:
            values = [value for one in own for value in one["arrays"][key]]
            arrays[key] = [values[position] for position in order]
        models[name] = {"arrays": arrays, "seconds": sum(one["seconds"] for one in own)}
    return {"index": sorted(places), "unreadable": dict(sorted(unreadable.items())), "models": models}


@torch.inference_mode()
def _run(
    models: Mapping[str, nn.Module],
    batch: Batch,
    device: torch.device,
    measure: Measure,
    keep_every: int,
    cache: OutputCache | None = None,
) -> Entry:
    """The stored values of one batch, as JSON. Large arrays are stored of every n-th image."""
    entry: Entry = {"index": batch.indices.tolist(), "unreadable": batch.unreadable, "models": {}}
    if len(batch.images) == 0:
        return entry
    base: Tensor | None = None
    images, labels = batch.images.to(device), batch.labels.to(device)
    whole = (batch.indices % keep_every == 0).to(device)
    weight = next(next(iter(models.values())).parameters())
    for name, model in models.items():
        begin = time.perf_counter()
        ready = images.to(weight.dtype)
        outputs = measure.outputs(name, model, ready) if base is not None or cache is None else cache(batch, ready)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if base is None:
            measure.check_labels(labels, outputs.shape[1])
            check_reference_outputs(outputs, batch.indices.tolist(), images)
            base = outputs
        arrays = encode_arrays(measure.compare(base, outputs, labels, whole))
        entry["models"][name] = {"arrays": arrays, "seconds": seconds}
    return entry


def summarise(names: list[str], entries: list[Entry], measure: Measure) -> Evaluation:
    """Figures and intervals from the finished batches."""
    indices = [index for entry in entries for index in entry["index"]]
    if not indices:
        raise GTPError("no image could be read")
    if len(set(indices)) != len(indices):
        raise GTPError("an image was counted twice; delete the journal and run again")
    unreadable = tuple(text for entry in entries for text in entry["unreadable"].values())
    entries = [entry for entry in entries if entry["index"]]
    stored = {
        name: {
            key: decode_array([value for entry in entries for value in entry["models"][name]["arrays"][key]])
            for key in entries[0]["models"][name]["arrays"]
        }
        for name in names
    }
    per_image = measure.per_image_values(stored)
    for name in names:  # differences to the unreduced model are figures of each image, too
        for figure in measure.metrics:
            if figure.change in per_image[name]:
                per_image[name][figure.name] = per_image[name][figure.change] - per_image[UNREDUCED][figure.change]
    figures = [figure for figure in measure.metrics if figure.name in per_image[UNREDUCED]]
    rows = np.stack([per_image[name][figure.name] for name in names for figure in figures])
    intervals = iter(bootstrap(rows, [figure.partial for _ in names for figure in figures]))
    scores = []
    for name in names:
        own = {figure.name: next(intervals) for figure in figures}
        own |= {f.name: _quantile(per_image[name][f.quantile[0]], f.quantile[1]) for f in measure.metrics if f.quantile}
        seconds = sum(entry["models"][name]["seconds"] for entry in entries)
        not_finite = int(np.isnan(per_image[name][measure.damage]).sum())
        scores.append(Score(name, len(indices), own, own[measure.damage], seconds, not_finite))
    return Evaluation(measure, tuple(scores), unreadable, per_image)


def _quantile(values: Array, fraction: float) -> Interval:
    """A quantile over images and its 95 % interval, from the ranks that a binomial distribution gives."""
    if np.isnan(values).any():
        return Interval(math.nan, math.nan, math.nan)
    count, ordered = len(values), np.sort(values)
    spread = 1.96 * math.sqrt(count * fraction * (1 - fraction))
    low, high = (min(max(round(count * fraction + side * spread), 0), count - 1) for side in (-1, 1))
    return Interval(float(np.quantile(values, fraction)), float(ordered[low]), float(ordered[high]))


def bootstrap(values: Array, partial: Sequence[bool] = ()) -> list[Interval]:
    """The mean of each row of [figures, I] and its 95 % interval, by resampling images.

    All are on the same resamples, which depend on the number of images alone. `partial`: in which rows NaN means that
    an image has no value; in others it makes the mean NaN.
    """
    count = values.shape[1]
    some = np.array(partial or [False] * len(values))[:, None] & np.isnan(values)
    known, values = (~some).astype(float), np.where(some, 0.0, values)
    means = values.sum(axis=1) / known.sum(axis=1)
    if count < 2:
        return [Interval(float(mean), math.nan, math.nan) for mean in means]
    generator = np.random.default_rng(0)
    at_once = max(1, 2_000_000 // count)  # resamples, to bound the memory
    resampled = []
    for begin in range(0, RESAMPLES, at_once):
        # How often each image was drawn; the product then has the means of all figures.
        draws = [generator.integers(0, count, count) for _ in range(min(at_once, RESAMPLES - begin))]
        times = np.stack([np.bincount(draw, minlength=count) for draw in draws])
        resampled.append(times @ values.T / (times @ known.T if some.any() else count))
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975], axis=0)
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]
