"""evaluate: accuracy of models on the same images, and how far each is from the unreduced one, with paired intervals.

Every model sees every batch. A few numbers are kept for each image and model; intervals come from resampling images,
the same ones for both sides of a difference.

Shapes: I images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gtp_vit.core.backbone import main_output
from gtp_vit.errors import GTPError
from gtp_vit.inputs.data import Batch, Item, batches
from gtp_vit.measure.class_output import check_class_output, check_logits
from gtp_vit.measure.eval_mode import eval_mode
from gtp_vit.measure.kept import Kept
from gtp_vit.runs import distributed
from gtp_vit.runs.journal import Journal

UNREDUCED = "unreduced"
RESAMPLES = 2000
ImagesDone = Callable[[int, int | None], None]  # images done, and their total if that is known
Array = np.ndarray[Any, np.dtype[Any]]


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
    top1: Interval
    top5: Interval
    agreement: Interval  # images with the same first class as the unreduced model
    kl: Interval  # KL(unreduced || this), in nats
    top1_change: Interval  # against the unreduced model on the same images
    seconds: float  # in the model's forward passes
    not_finite: int  # images with outputs that are not finite; they count as wrong and have no KL


@dataclass(frozen=True)
class Evaluation:
    """All models on the same images."""

    scores: tuple[Score, ...]
    unreadable: tuple[str, ...]
    per_image: dict[str, dict[str, Array]]  # model -> rank, first, kl; each [I]

    def not_finite(self) -> list[str]:
        """A sentence for each model with outputs that are not finite."""
        return [
            f"{score.name}: {score.not_finite} of {score.images} images have outputs that are not finite"
            for score in self.scores
            if score.not_finite
        ]

    def differences(self, wanted: Sequence[tuple[str, str, str]]) -> list[Interval]:
        """For each (one, other, figure): the first model's kl, top1 or agreement minus the other's, paired."""
        figures = ((_figure(self.per_image, one, f), _figure(self.per_image, other, f)) for one, other, f in wanted)
        return bootstrap(np.stack([own - others for own, others in figures]))


def evaluate(
    models: Mapping[str, nn.Module],
    dataset: Dataset[Item],
    *,
    batch_size: int = 64,
    workers: int = 2,
    journal: Journal | None = None,
    kept: Kept | None = None,
    progress: ImagesDone | None = None,
) -> Evaluation:
    """Run all models over all images once; in several processes each runs its share, and all get the whole result.

    Args:
        models: name -> model; the first is the unreduced one, called UNREDUCED. They are measured in eval mode.
        dataset: labelled images.
        batch_size: images at a time.
        workers: processes that read images.
        journal: of this run; batches that are in it are not run again. Only the first process has one.
        kept: outputs of the unreduced model from earlier passes over the same images, used instead of running it.
        progress: called after every batch.
    """
    assert next(iter(models)) == UNREDUCED
    for model in models.values():
        check_class_output(model)
    entries: list[Any] = distributed.from_first(list(journal.entries) if journal is not None else [])
    total = len(dataset) if hasattr(dataset, "__len__") else None
    done = sum(len(entry["index"]) + len(entry["unreadable"]) for entry in entries)
    device = next(next(iter(models.values())).parameters()).device
    if progress is not None:
        progress(done, total)
    pin, share = device.type == "cuda", distributed.share()
    own = batches(dataset, batch_size=batch_size, workers=workers, skip=done, pin=pin, share=share)
    while True:
        # A round covers consecutive images whatever the number of processes, so any number of them can resume.
        batch = next(own, None)
        with eval_mode(*models.values()):
            run = None if batch is None else _run(models, batch, device, kept)
        found = distributed.gather(run)
        finished = [entry for entry in found if entry is not None]
        if not finished:
            break
        entries.append(finished[0] if len(finished) == 1 else merge(finished))
        if journal is not None:
            journal.append(entries[-1])
        done += len(entries[-1]["index"]) + len(entries[-1]["unreadable"])
        if progress is not None:
            progress(done, total)
    return summarise(list(models), entries)


def merge(entries: list[Any]) -> dict[str, Any]:
    """The entries of several processes for one round as one entry, in the order of the data set."""
    places = [place for entry in entries for place in entry["index"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    models: dict[str, Any] = {}
    for name, first in entries[0]["models"].items():
        own = [entry["models"][name] for entry in entries]
        models[name] = {"seconds": sum(one["seconds"] for one in own)}
        for key in first.keys() - {"seconds"}:
            values = [value for one in own for value in one[key]]
            models[name][key] = [values[position] for position in order]
    unreadable = {place: text for entry in entries for place, text in entry["unreadable"].items()}
    return {"index": sorted(places), "unreadable": dict(sorted(unreadable.items())), "models": models}


@torch.inference_mode()
def _run(
    models: Mapping[str, nn.Module], batch: Batch, device: torch.device, kept: Kept | None = None
) -> dict[str, Any]:
    """The figures of one batch, as JSON."""
    found: dict[str, Any] = {"index": batch.place.tolist(), "unreadable": batch.unreadable, "models": {}}
    base: Tensor | None = None
    images, labels = batch.images.to(device), batch.labels.to(device)
    weight = next(next(iter(models.values())).parameters())
    for name, model in models.items():
        if len(images) == 0:
            found["models"][name] = {"rank": [], "first": [], "kl": [], "seconds": 0.0}
            continue
        begin = time.perf_counter()
        ready = images.to(weight.dtype)
        outputs = model(ready) if base is not None or kept is None else kept(batch, ready)
        logits = check_logits(name, main_output(outputs, "classes"), len(images)).float()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        finite = logits.isfinite().all(dim=1)
        if base is None:
            _check_labels(labels, logits.shape[1])
            _check_base(finite, batch.place)
            base = logits
        found["models"][name] = {
            "rank": torch.where(finite, _rank(logits, labels), logits.shape[1]).tolist(),
            "first": torch.where(finite, logits.argmax(dim=1), -1).tolist(),  # -1 = no class
            "kl": [None if math.isnan(value) else round(value, 9) for value in kl_per_image(base, logits).tolist()],
            "seconds": seconds,
        }
    return found


def _check_base(finite: Tensor, place: Tensor) -> None:
    if not bool(finite.all()):
        wrong = place[~finite.cpu()].tolist()
        raise GTPError(
            f"the unreduced model's outputs are not finite on {len(wrong)} of {len(finite)} images (the first is image "
            f"{wrong[0]}): there is nothing to compare with; check its weights, or use float32"
        )


def _check_labels(labels: Tensor, classes: int) -> None:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        raise GTPError(
            f"an image has label {lowest}, which means no label, and accuracy needs one; give a split that has "
            "labels, e.g. --split validation"
        )
    if highest >= classes:
        raise GTPError(f"an image has label {highest}, but the model has {classes} classes; give data with its classes")


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank of the label's class, from 0, [B]; of equal scores the first comes first, as in topk."""
    own = logits.gather(1, labels.unsqueeze(1))
    before = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    return ((logits > own) | ((logits == own) & before)).sum(dim=1)


def kl_per_image(base: Tensor, logits: Tensor) -> Tensor:
    """KL(base || logits) of each image, [B]; NaN where one of them is not finite."""
    finite = (base.isfinite() & logits.isfinite()).all(dim=1)
    base, logits = base.double().log_softmax(dim=1), logits.double().log_softmax(dim=1)
    return torch.where(finite, (base.exp() * (base - logits)).sum(dim=1), math.nan)


def summarise(names: list[str], entries: list[Any]) -> Evaluation:
    """Figures and intervals from the finished batches."""
    indices = [index for entry in entries for index in entry["index"]]
    if not indices:
        raise GTPError("not one image could be read")
    if len(set(indices)) != len(indices):
        raise GTPError("an image was counted twice; delete the journal and run again")
    per_image = {
        name: {
            key: np.array([value for entry in entries for value in entry["models"][name][key]], dtype=kind)
            for key, kind in (("rank", int), ("first", int), ("kl", float))  # None in a journal becomes NaN
        }
        for name in names
    }
    unreadable = tuple(text for entry in entries for text in entry["unreadable"].values())
    figures = ("top1", "top5", "agreement", "kl")
    every = [_figure(per_image, name, figure) for name in names for figure in figures]
    top1 = every[:: len(figures)]
    intervals = bootstrap(np.stack([*every, *(own - top1[0] for own in top1)]))
    scores = []
    for index, name in enumerate(names):
        own = dict(zip(figures, intervals[index * len(figures) :], strict=False))
        seconds = sum(entry["models"][name]["seconds"] for entry in entries)
        change = intervals[len(every) + index]
        not_finite = int(np.isnan(per_image[name]["kl"]).sum())
        scores.append(Score(name, len(indices), **own, top1_change=change, seconds=seconds, not_finite=not_finite))
    return Evaluation(tuple(scores), unreadable, per_image)


def _figure(per_image: dict[str, dict[str, Array]], name: str, figure: str) -> Array:
    """A figure of one model, image by image."""
    own = per_image[name]
    if figure == "kl":
        return own["kl"]
    if figure == "agreement":
        return 100.0 * (own["first"] == per_image[UNREDUCED]["first"])
    return 100.0 * (own["rank"] < {"top1": 1, "top5": 5}[figure])


def bootstrap(values: Array) -> list[Interval]:
    """The mean of each row of [figures, I] and its 95 % interval, by resampling images.

    All are on the same resamples, which depend on the number of images alone.
    """
    means, count = values.mean(axis=1), values.shape[1]
    if count < 2:
        return [Interval(float(mean), math.nan, math.nan) for mean in means]
    generator = np.random.default_rng(0)
    at_once = max(1, 2_000_000 // count)  # resamples, to bound the memory
    resampled = []
    for begin in range(0, RESAMPLES, at_once):
        # How often each image was drawn; the product then has the means of all figures.
        draws = [generator.integers(0, count, count) for _ in range(min(at_once, RESAMPLES - begin))]
        times = np.stack([np.bincount(draw, minlength=count) for draw in draws])
        resampled.append(times @ values.T / count)
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975], axis=0)
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]
