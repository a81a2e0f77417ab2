"""Section 3.2.3, token summarisation: removed tokens are propagated along the graph.

Shapes: B batch, N tokens, c prefix tokens, K kept tokens, P propagated tokens, D anything that is propagated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.tensors import behind_prefix, full_precision, select_rows


def propagate(kept: Tensor, weights: Tensor, propagated: Tensor, alpha: float) -> Tensor:
    """Eq. (10) and (12): X^s = X^k + alpha A^p X^p. [B, K, D], [B, K, P], [B, P, D] -> [B, K, D]."""
    with full_precision(kept):
        return torch.baddbmm(kept, weights.to(kept.dtype), propagated.to(kept.dtype), alpha=alpha)


def summarise(
    values: Tensor, prefix: int, kept: Tensor, gone: Tensor, weights: Tensor, alpha: float, retain: Tensor | None = None
) -> Tensor:
    """Section 3.2.3: Eq. (10) or (12) for a whole sequence, whose prefix tokens stay as they are.

    Args:
        values: features, sizes or sources of all tokens, [B, c + M, D].
        prefix: number of tokens at the start that stay as they are.
        kept: image tokens that stay, [B, K].
        gone: image tokens that are propagated, [B, P].
        weights: what each kept token takes from each propagated one, [B, K, P].
        alpha: how strongly.
        retain: what each kept token keeps of itself, [B, K], for methods that average; None = all, as in GTP.
    """
    # Rows of zeros for the prefix tokens are cheaper than cutting the sequence in two and joining it again.
    weights = F.pad(weights, (0, 0, prefix, 0))
    own = select_rows(values, behind_prefix(kept, prefix))
    if retain is not None:
        own = own * F.pad(retain, (prefix, 0), value=1.0).unsqueeze(-1).to(own.dtype)
    return propagate(own, weights, select_rows(values, gone + prefix), alpha)


def share_out(weights: Tensor) -> Tensor:
    """Section 3.2.3, an option of ours: each propagated token gives away exactly 1, or 0 if it has no receiver.

    Weights [B, K, P], scaled to sum to 1 over the receivers: sizes then add up to the number of patches.
    """
    total = weights.sum(dim=-2, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)
