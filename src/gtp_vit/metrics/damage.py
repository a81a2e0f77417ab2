"""Damage: how far a reduced model's outputs are from the unreduced one's on some images, as a search sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtp_vit.metrics.base import UNREDUCED, Array, Arrays, Measure, joined, no_labels

FOUND = "found"


@dataclass(frozen=True)
class Damage:
    """What a measure keeps of each image, of the unreduced model and of a reduced one."""

    measure: Measure
    base: Arrays
    found: Arrays

    @classmethod
    def between(cls, measure: Measure, base: Tensor, found: Tensor) -> Damage:
        """The damage of the outputs `found`, where those of the unreduced model are `base`."""
        return cls(measure, kept(measure, base, base), kept(measure, base, found))

    @classmethod
    def together(cls, parts: Sequence[Damage]) -> Damage:
        """The damage on the images of several parts."""
        return cls(parts[0].measure, joined([part.base for part in parts]), joined([part.found for part in parts]))

    @property
    def values(self) -> Array:
        """What a search minimises, image by image."""
        return self.found[self.measure.searched]

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def not_finite(self) -> int:
        """Images whose outputs are not finite."""
        return int(np.isnan(self.values).sum())

    def figures(self, first: int = 0) -> dict[str, float]:
        """All figures of the measure, of the images from the `first` on; neighbours are sought among all."""
        found = self.measure.per_image({UNREDUCED: self.base, FOUND: self.found})[FOUND]
        return {name: float(values[first:].mean()) for name, values in found.items()}

    def summary(self, first: int = 0) -> dict[str, float]:
        """The figures that a recipe has, rounded."""
        found = self.figures(first)
        return {
            name: round(found[name], 2 if self.measure.figure(name).decimals == 2 else 6)
            for name in self.measure.summary
        }


def kept(measure: Measure, base: Tensor, found: Tensor) -> Arrays:
    """What a measure keeps of images without labels."""
    images = len(base)
    whole = torch.ones(images, dtype=torch.bool, device=base.device)
    return measure.kept(base, found, no_labels(images).to(base.device), whole)
