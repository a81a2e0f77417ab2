"""scores: the figures of models as a line of a results file, a table, and a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from gtp_vit.data.open import DataSettings
from gtp_vit.errors import counted
from gtp_vit.metrics.base import UNREDUCED, Figure
from gtp_vit.metrics.evaluate import Evaluation, Interval, Score
from gtp_vit.patching import host_of
from gtp_vit.report.results import Table

TIMM = ("top1", "top5")  # figures that timm has columns for


def score_row(
    title: str, model: nn.Module, settings: DataSettings, found: Evaluation, name: str, macs: int
) -> dict[str, Any]:
    """One line of a results file, timm's columns first, then ours: the score `name` of the model called `title`."""
    score = next(score for score in found.scores if score.name == name)
    inputs = host_of(model).inputs
    wanted = inputs.preparation or {}
    return {
        "model": title,
        **_timm_columns(score),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": settings.img_size or inputs.size[-1],
        "crop_pct": settings.crop_pct or wanted.get("crop_pct", ""),
        "interpolation": settings.interpolation or wanted.get("interpolation", ""),
        "orientation": "as stored" if settings.ignore_exif else "as EXIF says",
        "method": "" if name == UNREDUCED else name,
        "gmacs": round(macs / 1e9, 6),
        "images": score.images,
        "unreadable": len(found.unreadable),
        "not_finite": score.not_finite,
        "measure": found.measure.name,
        **{key: value for f in found.figures() if f.name not in TIMM for key, value in _bounded(score, f.name)},
    }


def _timm_columns(score: Score) -> dict[str, float]:
    """Accuracies as timm names them, for models with classes."""
    return {
        key: value
        for name in TIMM
        if name in score.figures
        for key, value in ((name, round(score[name].value, 4)), (f"{name}_err", round(100 - score[name].value, 4)))
    }


def _bounded(score: Score, figure: str) -> Iterable[tuple[str, float]]:
    return with_bounds(figure, score[figure]).items()


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def score_table(found: Evaluation, macs: Mapping[str, int]) -> Table:
    """A row for each model; `macs` are by their names."""
    figures = found.figures()
    rows = [
        [score.name, f"{macs[score.name] / 1e9:.3f}", *(figure_text(score, figure) for figure in figures)]
        for score in found.scores
    ]
    return ["model", "GMACs", *(figure.title for figure in figures)], rows


def figure_text(score: Score, figure: Figure) -> str:
    """A figure of a model as people read it."""
    interval, form = score[figure.name], f"{'+' if figure.change else ''}.{figure.decimals}f"
    if math.isnan(interval.value):
        return f"none: {score.not_finite} not finite"
    value, low, high = (format(number, form) for number in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]" if figure.interval else value


def explain_scores(found: Evaluation) -> str:
    """What the intervals mean, and what was not counted."""
    count = found.scores[0].images
    text = (
        f"{counted(count, 'image', 'images')}; brackets are paired 95 % intervals over images. {found.measure.meaning}"
    )
    text += _explain_neighbours(found)
    if found.unreadable:
        text += f" {len(found.unreadable)} could not be read and are not counted, e.g. {found.unreadable[0]}"
    if found.not_finite():
        title = found.measure.figure(found.measure.damage).title
        text += f" {'; '.join(found.not_finite())}: they count as wrong and as disagreement, and have no {title}."
    return text


def _explain_neighbours(found: Evaluation) -> str:
    """Among how many images neighbours were sought, and what labels were used for."""
    own = found.per_image[UNREDUCED]
    if "neighbours" not in own:
        return ""
    count = int((~np.isnan(own["neighbours"])).sum())
    k = getattr(found.measure, "k", 0)
    text = f" Same neighbours: of each image's {k} nearest among {count}, how many are those of the unreduced model."
    if "knn" in own:
        return f"{text} k-NN: how often its neighbours' labels name an image's own; the model has no classifier."
    return f"{text} No k-NN accuracy: images have no labels, or all the same one, or no two the same."
