"""Section 3.2.4, attention map sparsification: keep the largest share of the attention map."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_vit.kernels.reference import zero_below


@dataclass(frozen=True)
class Sparsify:
    """The settings of `keep_largest` as an edit of the attention map."""

    theta: float
    per_row: bool = False
    renormalise: bool = False

    def __call__(self, probs: Tensor) -> Tensor:
        return keep_largest(probs, self.theta, per_row=self.per_row, renormalise=self.renormalise)

    def threshold_rank(self, entries: int) -> int | None:
        """k, if all this does is to zero what is below the k-th smallest of a map's entries; else None."""
        return None if self.per_row or self.renormalise else threshold_rank(entries, self.theta)


def threshold_rank(entries: int, theta: float) -> int:
    """Section 3.2.4, as released: k = int(N^2 (1 - theta)); 0 if theta is so near 1 that nothing is to be removed."""
    return int(entries * (1 - theta))


def keep_largest(probs: Tensor, theta: float, *, per_row: bool = False, renormalise: bool = False) -> Tensor:
    """Section 3.2.4: zero all but the largest theta N^2 entries of each head's map. [B, H, N, N] -> the same.

    Rows are not scaled to sum to 1 again, unless `renormalise`. With `per_row` each row has a threshold of its own.
    """
    entries = probs if per_row else probs.flatten(-2)
    kept = zero_below(entries, threshold_rank(entries.shape[-1], theta)).view_as(probs)
    if renormalise:
        kept = kept / kept.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
    return kept
