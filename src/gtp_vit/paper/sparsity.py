"""Section 3.2.4, attention map sparsification: keep the largest share of the attention map."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sparsify:
    """The settings of `keep_largest` as an edit of the attention map."""

    theta: float
    per_row: bool = False
    renormalise: bool = False

    def __call__(self, probs: Tensor) -> Tensor:
        return keep_largest(probs, self.theta, per_row=self.per_row, renormalise=self.renormalise)


def keep_largest(probs: Tensor, theta: float, *, per_row: bool = False, renormalise: bool = False) -> Tensor:
    """Section 3.2.4: zero all but the largest theta N^2 entries of each head's map. [B, H, N, N] -> the same.

    As released: k = int(N^2 (1 - theta)), entries below the k-th smallest become 0, so N^2 - k + 1 stay, and more if
    several equal the threshold. Rows are not scaled to sum to 1 again, unless `renormalise`. With `per_row` each row
    has a threshold of its own.
    """
    entries = probs if per_row else probs.flatten(-2)
    k = int(entries.shape[-1] * (1 - theta))
    if k < 1:  # theta so near 1 that nothing is to be removed
        return probs
    threshold = entries.detach().kthvalue(k, dim=-1, keepdim=True).values
    if not per_row:
        threshold = threshold.unsqueeze(-1)
    # NaN compares false with everything: `~(<)` keeps it, so that NaN images give NaN, as they do in the plain model.
    kept = probs * ~(probs < threshold)
    if renormalise:
        kept = kept / kept.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
    return kept
