"""Section 3.2.3, token summarisation: what the removed tokens know moves along the graph.

Shapes: B batch, K kept tokens, P propagated tokens, D anything that is propagated: features, sizes, sources.
"""

from __future__ import annotations

import torch
from torch import Tensor


def propagate(kept: Tensor, weights: Tensor, propagated: Tensor, alpha: float) -> Tensor:
    """Eq. (10) and (12): X^s = X^k + alpha A^p X^p. [B, K, D], [B, K, P], [B, P, D] -> [B, K, D]."""
    return torch.baddbmm(kept, weights.to(kept.dtype), propagated, alpha=alpha)


def share_out(weights: Tensor) -> Tensor:
    """Section 3.2.3, an option of ours: each propagated token gives away exactly 1, or 0 if nobody receives it.

    Weights [B, K, P], scaled to sum to 1 over the receivers: sizes then add up to the number of patches.
    """
    total = weights.sum(dim=-2, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)
