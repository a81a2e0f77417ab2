"""The LayerNorm that an operator computes along with its own work."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class NormParams(NamedTuple):
    """A LayerNorm as three arguments of an operator; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0

    @classmethod
    def of(cls, norm: nn.LayerNorm | None) -> NormParams:
        return cls() if norm is None else cls(norm.weight, norm.bias, norm.eps)

    def apply(self, x: Tensor) -> Tensor:
        """x after the norm; empty if there is none."""
        if self.weight is None:
            return x.new_empty(0)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
