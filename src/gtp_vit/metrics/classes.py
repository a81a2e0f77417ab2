"""Class scores: accuracy, agreement with the unreduced model, and KL divergence to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gtp_vit.core.backbone import Output
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Arrays, Bound, Measure, Metric, finite_rows, refuse_shape, to_array

CLASS_SCORES_NEEDED = "agreement, KL and accuracy need one score for each class"


@dataclass(frozen=True)
class Classification(Measure):
    """For models with a score for each of several classes."""

    name: ClassVar[str] = "classes"
    help: ClassVar[str] = "KL and agreement"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("top1", "top-1 %", 2, interval=False, timm=True),
        Metric("top5", "top-5 %", 2, interval=False, brief=False, timm=True),
        Metric("top1_change", "top-1 change", 2, change="top1"),
        Metric("agreement", "agreement %", 2, interval=False),
        Metric("kl", "KL to unreduced"),
    )
    damage: ClassVar[str] = "kl"
    objective: ClassVar[str] = "kl"
    summary: ClassVar[tuple[str, ...]] = ("kl", "agreement")
    headline: ClassVar[str] = "top1"
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("max_kl", "at most this KL divergence to the unreduced model", metric="kl"),
        Bound(
            "min_agreement",
            "the unreduced model's first class on at least this percentage of images",
            metric="agreement",
            at_least=True,
        ),
    )
    needs_labels: ClassVar[bool] = True
    demo_sections: ClassVar[frozenset[str]] = frozenset({"classes"})
    explanation: ClassVar[str] = "KL: how far the class probabilities are from the unreduced model's."

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        return output is None or (output.kind == "classes" and output.width > 1)

    @classmethod
    def unsupported_reason(cls, output: Output) -> str | None:
        kind, width = output
        if kind == "tokens":
            return (
                f"the model has an output for every token, {width} numbers each; {CLASS_SCORES_NEEDED}: create it with "
                "pooling, e.g. global_pool='token'"
            )
        if kind == "features":
            return (
                f"the model has no classifier: its output is {width} features; {CLASS_SCORES_NEEDED}: create it with "
                "num_classes and weights that have them"
            )
        if kind == "embedding":
            return (
                f"the model's output is an embedding of {width} numbers, to be compared with those of texts; "
                f"{CLASS_SCORES_NEEDED}: give weights that were finetuned on classes (timm has them as ..._ft_in1k)"
            )
        if width == 1:
            return (
                f"the model has one output, whose softmax is always 1; {CLASS_SCORES_NEEDED}: give two or more classes"
            )
        return None

    def check(self, name: str, output: object, images: int) -> Tensor:
        if isinstance(output, Tensor) and output.ndim == 2 and len(output) == images and output.shape[1] > 1:
            return output
        raise refuse_shape(name, output, images, f"{CLASS_SCORES_NEEDED}: [images, classes], two classes or more")

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

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        finite = finite_rows(base, output)
        labels = labels.clamp(min=0)  # a search has none, and reads no rank
        return {
            "rank": torch.where(finite, _rank(output, labels), output.shape[1]).numpy(force=True),
            "first": torch.where(finite, output.argmax(dim=1), -1).numpy(force=True),  # -1 = no class
            "kl": to_array(kl_per_image(base, output)),
        }

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        first = stored[UNREDUCED]["first"]
        return {
            name: {
                "top1": 100.0 * (own["rank"] < 1),
                "top5": 100.0 * (own["rank"] < 5),
                "agreement": 100.0 * (own["first"] == first),
                "kl": own["kl"].astype(np.float64),
            }
            for name, own in stored.items()
        }

    def direction(self, output: Tensor, noise: Tensor) -> Tensor:
        """By the Fisher information diag(p) - p p^T of the softmax: the KL divergence to second order."""
        p = output.softmax(dim=-1)
        root = p.sqrt() * noise
        return root - p * root.sum(dim=-1, keepdim=True)


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
