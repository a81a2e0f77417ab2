"""Numbers that are no scores of classes: a regression, or a model with one output.

The error is relative to the mean size of the unreduced model's outputs: relative to each output by itself, one near
zero would outweigh all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gtp_vit.core.backbone import Output
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Arrays, Bound, Measure, Metric, finite_rows, refuse_shape, to_array


@dataclass(frozen=True)
class Regression(Measure):
    """For models that return one or several numbers for each image."""

    name: ClassVar[str] = "regression"
    help: ClassVar[str] = "relative error"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("error_p95", "relative error, 95 %", quantile=("error", 0.95), interval=False, brief=False),
        Metric("error", "relative error"),
    )
    damage: ClassVar[str] = "error"
    objective: ClassVar[str] = "difference"
    summary: ClassVar[tuple[str, ...]] = ("error",)
    bounds: ClassVar[tuple[Bound, ...]] = (Bound("max_error", "at most this relative error", metric="error"),)
    explanation: ClassVar[str] = "Relative error: differences to the unreduced model by the mean size of its outputs."

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        return output is not None and output.kind == "classes" and output.width == 1

    def check(self, name: str, output: object, images: int) -> Tensor:
        if isinstance(output, Tensor) and len(output) == images and output.ndim <= 2:
            return output.reshape(images, -1)
        raise refuse_shape(name, output, images, "a regression has numbers for each image: [images, numbers]")

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        difference = (output.double() - base.double()).norm(dim=1)
        return {
            "difference": to_array(torch.where(finite_rows(base, output), difference, math.nan)),
            "length": to_array(base.double().norm(dim=1)),
        }

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        mean = float(stored[UNREDUCED]["length"].mean())
        if mean == 0:
            raise GTPError("the unreduced model's outputs are all zero: an error relative to them means nothing")
        return {name: {"error": own["difference"] / mean} for name, own in stored.items()}
