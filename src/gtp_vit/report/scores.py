"""scores: the figures of models as a line of a results file, a table, and a sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gtp_vit.errors import plural
from gtp_vit.metrics.base import UNREDUCED, Metric
from gtp_vit.metrics.evaluate import Evaluation, Interval, Score
from gtp_vit.report.results import Table


@dataclass(frozen=True)
class ModelColumns:
    """The columns of a results file about a model and its image preprocessing."""

    model: str  # its name
    param_count: float  # in millions
    img_size: int
    crop_pct: float | str
    interpolation: str
    orientation: str


def score_row(model: ModelColumns, evaluation: Evaluation, name: str, macs: int) -> dict[str, object]:
    """One line of a results file, timm's columns first, then ours: the score `name`."""
    score = next(score for score in evaluation.scores if score.name == name)
    described = dataclasses.asdict(model)
    return {
        "model": described.pop("model"),
        **_timm_columns(evaluation, score),
        **described,
        "method": "" if name == UNREDUCED else name,
        "gmacs": round(macs / 1e9, 6),
        "images": score.images,
        "unreadable": len(evaluation.unreadable),
        "not_finite": score.not_finite,
        "measure": evaluation.measure.name,
        **{key: value for f in evaluation.figures() if not f.timm for key, value in _bounded(score, f.name)},
    }


def _timm_columns(evaluation: Evaluation, score: Score) -> dict[str, float]:
    """Accuracies as timm names them, for models with classes."""
    return {
        key: value
        for name in (figure.name for figure in evaluation.figures() if figure.timm)
        for key, value in ((name, round(score[name].value, 4)), (f"{name}_err", round(100 - score[name].value, 4)))
    }


def _bounded(score: Score, figure: str) -> Iterable[tuple[str, float]]:
    return with_bounds(figure, score[figure]).items()


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def score_table(evaluation: Evaluation, macs: Mapping[str, int]) -> Table:
    """A row for each model; `macs` are by their names."""
    figures = evaluation.figures()
    rows = [
        [score.name, f"{macs[score.name] / 1e9:.3f}", *(figure_text(score, figure) for figure in figures)]
        for score in evaluation.scores
    ]
    return ["model", "GMACs", *(figure.title for figure in figures)], rows


def figure_text(score: Score, figure: Metric) -> str:
    """A figure of a model as people read it."""
    interval, form = score[figure.name], f"{'+' if figure.change else ''}.{figure.decimals}f"
    if math.isnan(interval.value):
        return f"none: {score.not_finite} not finite"
    value, low, high = (format(number, form) for number in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]" if figure.interval else value


def explain_scores(evaluation: Evaluation) -> str:
    """A note on the intervals, and on what was not counted."""
    count = evaluation.scores[0].images
    text = (
        f"{plural(count, 'image', 'images')}; brackets are paired 95 % intervals over images. "
        f"{evaluation.measure.explain(evaluation.per_image_values[UNREDUCED])}"
    )
    if evaluation.unreadable:
        text += f" {len(evaluation.unreadable)} could not be read and are not counted, e.g. {evaluation.unreadable[0]}"
    if evaluation.not_finite():
        title = evaluation.measure.metric(evaluation.measure.damage).title
        text += f" {'; '.join(evaluation.not_finite())}: they count as wrong and as disagreement, and have no {title}."
    return text
