"""Damage: how far a reduced model's outputs are from the unreduced one's on some images, as a search sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtp_vit.metrics.base import UNREDUCED, Array, Arrays, Measure, concatenate_arrays, no_labels

REDUCED = "reduced"


@dataclass(frozen=True)
class Damage:
    """A measure's stored values of each image, of the unreduced model and of a reduced one."""

    measure: Measure
    base: Arrays
    reduced: Arrays

    @classmethod
    def between(cls, measure: Measure, base: Tensor, outputs: Tensor) -> Damage:
        """The damage of `outputs`, where those of the unreduced model are `base`."""
        return cls(measure, compare_unlabelled(measure, base, base), compare_unlabelled(measure, base, outputs))

    @classmethod
    def concatenate(cls, parts: Sequence[Damage]) -> Damage:
        """The damage on the images of several parts."""
        return cls(
            parts[0].measure,
            concatenate_arrays([part.base for part in parts]),
            concatenate_arrays([part.reduced for part in parts]),
        )

    @property
    def values(self) -> Array:
        """The figure that a search minimises, image by image."""
        return self.reduced[self.measure.objective]

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def not_finite(self) -> int:
        """Images whose outputs are not finite."""
        return int(np.isnan(self.values).sum())

    def figures(self, first: int = 0) -> dict[str, float]:
        """All figures of the measure, of the images from the `first` on; neighbours are sought among all."""
        per_image = self.measure.per_image_values({UNREDUCED: self.base, REDUCED: self.reduced})[REDUCED]
        return {name: float(values[first:].mean()) for name, values in per_image.items()}

    def summary(self, first: int = 0) -> dict[str, float]:
        """The figures that a recipe has, rounded."""
        figures = self.figures(first)
        return {
            name: round(figures[name], 2 if self.measure.metric(name).decimals == 2 else 6)
            for name in self.measure.summary
        }


def compare_unlabelled(measure: Measure, base: Tensor, outputs: Tensor) -> Arrays:
    """A measure's stored values of images without labels."""
    images = len(base)
    whole = torch.ones(images, dtype=torch.bool, device=base.device)
    return measure.compare(base, outputs, no_labels(images).to(base.device), whole)
