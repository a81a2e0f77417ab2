"""scores: accuracy, agreement and KL of models as a line of a results file, a table, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gtp_vit.inputs.data import DataSettings
from gtp_vit.measure.evaluate import UNREDUCED, Evaluation, Interval, Score
from gtp_vit.patch import host_of
from gtp_vit.show.results import Table


def score_row(
    title: str, model: nn.Module, settings: DataSettings, found: Evaluation, name: str, macs: int
) -> dict[str, Any]:
    """One line of a results file, timm's columns first, then ours: the score `name` of the model called `title`."""
    score = next(score for score in found.scores if score.name == name)
    inputs = host_of(model).inputs
    wanted = inputs.preparation or {}
    return {
        "model": title,
        "top1": round(score.top1.value, 4),
        "top1_err": round(100 - score.top1.value, 4),
        "top5": round(score.top5.value, 4),
        "top5_err": round(100 - score.top5.value, 4),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": settings.img_size or inputs.size[-1],
        "crop_pct": settings.crop_pct or wanted.get("crop_pct", ""),
        "interpolation": settings.interpolation or wanted.get("interpolation", ""),
        "method": "" if name == UNREDUCED else name,
        "gmacs": round(macs / 1e9, 6),
        "images": score.images,
        "unreadable": len(found.unreadable),
        "not_finite": score.not_finite,
        **with_bounds("agreement", score.agreement),
        **with_bounds("kl", score.kl),
        **with_bounds("top1_change", score.top1_change),
    }


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def score_table(found: Evaluation, macs: Mapping[str, int]) -> Table:
    """A row for each model; `macs` are by their names."""
    rows = []
    for score in found.scores:
        top1, top5, agreement = (f"{figure.value:.2f}" for figure in (score.top1, score.top5, score.agreement))
        change = change_text(score.top1_change)
        rows.append([score.name, f"{macs[score.name] / 1e9:.3f}", top1, top5, change, agreement, kl_text(score)])
    return ["model", "GMACs", "top-1 %", "top-5 %", "top-1 change", "agreement %", "KL to unreduced"], rows


def change_text(interval: Interval) -> str:
    return f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def kl_text(score: Score) -> str:
    if score.not_finite:
        return f"none: {score.not_finite} not finite"
    return f"{score.kl.value:.4f} [{score.kl.low:.4f}, {score.kl.high:.4f}]"


def explain_scores(found: Evaluation) -> str:
    """What the intervals mean, and what was not counted."""
    count = found.scores[0].images
    text = f"{count} images; brackets are paired 95 % intervals over images."
    if found.unreadable:
        text += f" {len(found.unreadable)} could not be read and are not counted, e.g. {found.unreadable[0]}"
    if found.not_finite():
        text += f" {'; '.join(found.not_finite())}: they count as wrong and as disagreement, and there is no KL."
    return text
