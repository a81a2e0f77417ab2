"""Measures the cells of a table on our models; a figure that is missing says why."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.costs import Costs, bisect
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.loop import run
from gtp_vit.core.reducer import Method
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import GTPError
from gtp_vit.methods import METHODS
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.identity import Identity
from gtp_vit.methods.tome import ToMe
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.models.factory import create_model
from gtp_vit.patching import host_of, patch, tower_of
from gtp_vit.profiling.macs import CONVENTIONS, ConventionName
from gtp_vit.runs.journal import Journal
from reproduction import complexity
from reproduction.experiments import Cell

NO_IMAGES = "missing: no images (--data-dir)"
NO_CHECKPOINT = "missing: needs a finetuned checkpoint"
ABSENT = "the method is not in this package"


class Failed(str):
    """A text that says why there is no figure although weights and images were given."""


@dataclass(frozen=True)
class Reproduced:
    """One cell with our values; a text instead of a number says what is missing."""

    cell: Cell
    gmacs: float | str
    top1: float | str

    @property
    def gmacs_deviation(self) -> float | None:
        if self.cell.gmacs is None or isinstance(self.gmacs, str):
            return None
        return self.gmacs / self.cell.gmacs - 1

    @property
    def top1_deviation(self) -> float | None:
        if self.cell.top1 is None or isinstance(self.top1, str):
            return None
        return self.top1 - self.cell.top1


@dataclass(frozen=True)
class Inputs:
    """Where weights and images come from, and how they are read."""

    weights: Path | None = None  # a folder; the name of each file begins with a model's
    pretrained: bool = False  # download the weights
    images_for: Callable[[nn.Module], Any] | None = None  # the data set, prepared for a model
    batch_size: int = 64
    workers: int = 0
    # The journal of a model, given its name, methods, patched models and data set.
    journal_for: Callable[[str, list[str], dict[str, nn.Module], Any], Journal | None] = lambda *_: None


def find_weights(folder: Path | None, model: str) -> Path | None:
    """The file of a model's weights in a folder: its name begins with the model's."""
    if folder is None:
        return None
    base = model.split(".", 1)[0]
    files = sorted(path for path in folder.glob(f"{base}*") if path.suffix in (".safetensors", ".pth", ".tar", ".pt"))
    return files[0] if files else None


def reproduce(
    cells: Iterable[Cell], inputs: Inputs, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Reproduced], list[str]]:
    """Our values of all cells, and the images that could not be read.

    GMACs come from sizes alone; accuracy is measured where there are weights and images, one model after the other.
    """
    cells = [_at_its_cost(cell) for cell in cells]
    accuracy: dict[Cell, float | str] = {}
    unreadable: dict[str, None] = {}
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        accuracy |= {cell: why for cell in own if (why := _why_not(cell))}
        measurable = [cell for cell in own if cell not in accuracy]
        if measurable:
            measured, problems = _accuracies(model, measurable, inputs)
            accuracy |= measured
            unreadable |= dict.fromkeys(problems)
        if progress is not None:
            progress(len(accuracy), len(cells))
    return [Reproduced(cell, _gmacs(cell), accuracy[cell]) for cell in cells], list(unreadable)


def _accuracies(name: str, cells: Sequence[Cell], inputs: Inputs) -> tuple[Mapping[Cell, float | str], Sequence[str]]:
    """Top-1 of each cell of one model, or why there is none; and the images that could not be read."""
    if inputs.images_for is None:
        return dict.fromkeys(cells, NO_IMAGES), ()
    file = find_weights(inputs.weights, name)
    if file is None and not inputs.pretrained:
        return dict.fromkeys(cells, f"missing: no weights of {name} (--weights-dir or --pretrained)"), ()
    try:
        model = create_model(name.split(".", 1)[0] if file else name, pretrained=file is None, checkpoint=file)
        dataset = inputs.images_for(model)
    except GTPError as error:
        return dict.fromkeys(cells, Failed(f"missing: {error}")), ()
    models: dict[str, nn.Module] = {UNREDUCED: model}
    for index, cell in enumerate(cells):
        if cell.method is not None:
            models[str(index)] = patch(model, cell.method, quiet=True)
    journal = inputs.journal_for(name, [str(cell.method) for cell in cells], models, dataset)
    evaluation = evaluate(models, dataset, batch_size=inputs.batch_size, workers=inputs.workers, journal=journal)
    scores = {score.name: score for score in evaluation.scores}
    top1: dict[Cell, float | str] = {}
    for index, cell in enumerate(cells):
        score = scores[UNREDUCED if cell.method is None else str(index)]
        bad = Failed(f"{score.not_finite} of {score.images} images have outputs that are not finite")
        top1[cell] = bad if score.not_finite else score["top1"].value
    return top1, evaluation.unreadable


def _why_not(cell: Cell) -> str:
    """Why its accuracy cannot be measured here, whatever weights and images there are; empty if it can."""
    if cell.absent:
        return f"missing: {ABSENT}"
    return NO_CHECKPOINT if cell.finetuned else f"missing: {cell.lacks}" if cell.lacks else ""


def _at_its_cost(cell: Cell) -> Cell:
    """A cell whose settings are not printed, with those whose cost is nearest to the printed one, own work counted."""
    if cell.at_cost is None:
        return cell
    assert cell.gmacs is not None
    kind, target = METHODS[cell.at_cost], cell.gmacs * 1e9
    costs = _costs(cell.model, cell.pixels, cell.counts)
    vit = costs.vit

    def away(method: Method) -> float:
        return _macs(costs, method) - target

    low, high = bisect(lambda strength: away(kind.at_strength(vit, strength)) <= 0, 0.0, 1.0, steps=14)
    nearest = min((kind.at_strength(vit, low), kind.at_strength(vit, high)), key=lambda method: abs(away(method)))
    return dataclasses.replace(cell, method=nearest)


@functools.cache
def _costs(name: str, pixels: int | None, convention: ConventionName) -> Costs:
    """What the parts of a model cost, from its sizes alone."""
    model = create_model(name.split(".", 1)[0], img_size=pixels, meta=True)
    return host_of(model).costs(None, CONVENTIONS[convention])


def _macs(costs: Costs, method: Method) -> int:
    """MACs with the whole last block and the method's own work."""
    reducer = method.build(costs.vit)
    return costs.macs(reducer, reducer.steps(costs.grid), shorten_last_block=False).total


def _gmacs(cell: Cell) -> float | str:
    """GMACs as they are counted where they are printed, with the whole last block."""
    if cell.absent:
        return ABSENT
    try:
        return _macs(_costs(cell.model, cell.pixels, cell.counts), cell.method or Identity()) / 1e9
    except GTPError:
        return "depends on the images"


def complexity_table() -> list[tuple[str, float, float, float]]:
    """Backbone, and extra MMACs of GTP, of ToMe as the paper sums them, and of ToMe on the keys that it compares."""
    rows = []
    for name, tokens, channels, heads, head_dim in (("DeiT-S", 197, 384, 6, 64), ("DeiT-B", 197, 768, 12, 64)):
        gtp = complexity.gtp(tokens, 8, channels, 12, heads) / 1e6
        tome = complexity.tome(tokens, 8, channels, 12) / 1e6
        really = complexity.tome(tokens, 8, head_dim, 12) / 1e6
        rows.append((name, gtp, tome, really))
    return rows


def oversmoothing(model: nn.Module, images: Tensor, number: int) -> dict[str, list[float]]:
    """Mean cosine similarity of the image tokens after each layer, unreduced and with GTP and ToMe."""
    found = {}
    for method in (Identity(), GTP(propagate=number), ToMe(r=number)):
        seen: list[Tokens] = []
        with torch.no_grad(), eval_mode(model):
            run(tower_of(patch(model, method)), images, observe=seen.append)
        found[str(method)] = [_mean_similarity(tokens.image) for tokens in seen[1:]]
        wrong = [layer for layer, value in enumerate(found[str(method)]) if not math.isfinite(value)]
        if wrong:
            raise GTPError(
                f"tokens are not finite after layer {wrong[0]} with {method}; there is no similarity to show: look at "
                "the weights and images"
            )
    return found


def _mean_similarity(x: Tensor) -> float:
    """Mean cosine similarity over all pairs of different tokens."""
    unit = F.normalize(x.float(), dim=-1)
    count = x.shape[1]
    total = unit.sum(dim=1).square().sum(dim=1) - count
    return float((total / (count * (count - 1))).mean())
