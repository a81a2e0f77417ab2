"""All that a new measure is: one file like this one, and one line in MEASURES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gtp_vit.core.backbone import Output
from gtp_vit.metrics.base import Arrays, Bound, Measure, Metric, finite_rows, refuse_shape, to_array


@dataclass(frozen=True)
class ToyMeasure(Measure):
    """For models whose first outputs are all that is read."""

    name: ClassVar[str] = "toy"
    help: ClassVar[str] = "the first outputs alone"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("near", "near %", 1),
        Metric("gap", "toy gap", 3),
    )
    damage: ClassVar[str] = "gap"
    objective: ClassVar[str] = "gap"
    summary: ClassVar[tuple[str, ...]] = ("gap",)
    headline: ClassVar[str] = "near"
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("max_gap", "at most this gap", metric="gap"),
        Bound("min_near", "at least this percentage of images nearly unchanged", metric="near", at_least=True),
    )
    demo_sections: ClassVar[frozenset[str]] = frozenset({"classes"})
    explanation: ClassVar[str] = "Toy gap: how far the first outputs are from the unreduced model's."

    first: int = field(default=2, metadata={"help": "how many outputs are read"})

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        return output is not None and output.kind == "classes" and output.width == 10

    @classmethod
    def unsupported_reason(cls, output: Output) -> str | None:
        return None if output.width == 10 else f"the model has {output.width} outputs, and the toy reads one of ten"

    def settings(self) -> dict[str, Any]:
        return {"measure": self.name, "first": self.first}

    def check(self, name: str, output: Any, images: int) -> Tensor:
        if isinstance(output, Tensor) and output.shape == (images, 10):
            return output
        raise refuse_shape(name, output, images, "the toy reads ten outputs: [images, 10]")

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        gap = (output - base)[:, : self.first].abs().mean(dim=1)
        return {"gap": to_array(torch.where(finite_rows(base, output), gap, torch.nan))}

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        return {name: {"near": 100.0 * (own["gap"] < 0.1), "gap": own["gap"]} for name, own in stored.items()}

    def direction(self, output: Tensor, noise: Tensor) -> Tensor:
        """Only the first outputs matter."""
        read = torch.arange(output.shape[-1], device=output.device) < self.first
        return noise * read
