"""Class scores: accuracy, agreement with the unreduced model, and KL divergence to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Arrays, Figure, Measure, finite_rows, refuse_shape, values

NEEDED = "agreement, KL and accuracy need one score for each class"


@dataclass(frozen=True)
class Classes(Measure):
    """For models with a score for each of several classes."""

    name: ClassVar[str] = "classes"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("top1", "top-1 %", 2, interval=False),
        Figure("top5", "top-5 %", 2, interval=False, brief=False),
        Figure("top1_change", "top-1 change", 2, change="top1"),
        Figure("agreement", "agreement %", 2, interval=False),
        Figure("kl", "KL to unreduced"),
    )
    damage: ClassVar[str] = "kl"
    searched: ClassVar[str] = "kl"
    summary: ClassVar[tuple[str, ...]] = ("kl", "agreement")
    targets: ClassVar[dict[str, str]] = {"max_kl": "kl", "min_agreement": "agreement"}
    meaning: ClassVar[str] = "KL: how far the class probabilities are from the unreduced model's."

    def check(self, name: str, found: Any, images: int) -> Tensor:
        if isinstance(found, Tensor) and found.ndim == 2 and len(found) == images and found.shape[1] > 1:
            return found
        raise refuse_shape(name, found, images, f"{NEEDED}: [images, classes], two classes or more")

    def check_labels(self, labels: Tensor, width: int) -> None:
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0:
            raise GTPError(
                f"an image has label {lowest}, which means no label, and accuracy needs one; give a split that has "
                "labels, e.g. --split validation"
            )
        if highest >= width:
            raise GTPError(
                f"an image has label {highest}, but the model has {width} classes; give data with its classes"
            )

    def kept(self, base: Tensor, found: Tensor, labels: Tensor, whole: Tensor) -> Arrays:
        finite = finite_rows(base, found)
        labels = labels.clamp(min=0)  # a search has none, and reads no rank
        return {
            "rank": torch.where(finite, _rank(found, labels), found.shape[1]).numpy(force=True),
            "first": torch.where(finite, found.argmax(dim=1), -1).numpy(force=True),  # -1 = no class
            "kl": values(kl_per_image(base, found)),
        }

    def per_image(self, kept: Mapping[str, Arrays]) -> dict[str, Arrays]:
        first = kept[UNREDUCED]["first"]
        return {
            name: {
                "top1": 100.0 * (own["rank"] < 1),
                "top5": 100.0 * (own["rank"] < 5),
                "agreement": 100.0 * (own["first"] == first),
                "kl": own["kl"].astype(np.float64),
            }
            for name, own in kept.items()
        }


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Rank of the label's class, from 0, [B]; of equal scores the first comes first, as in topk."""
    own = logits.gather(1, labels.unsqueeze(1))
    before = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    return ((logits > own) | ((logits == own) & before)).sum(dim=1)


def kl_per_image(base: Tensor, logits: Tensor) -> Tensor:
    """KL(base || logits) of each image, [B]; NaN where one of them is not finite."""
    finite = finite_rows(base, logits)
    base, logits = base.double().log_softmax(dim=1), logits.double().log_softmax(dim=1)
    return torch.where(finite, (base.exp() * (base - logits)).sum(dim=1), math.nan)
