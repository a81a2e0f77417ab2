"""Some tokens leave, and each of those that stay takes a part of them.

Shapes: B batch, c prefix tokens, M image tokens, K kept, P gone, D anything that is merged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.tensors import behind_prefix, full_precision, select_rows


def weighted_merge(
    values: Tensor,
    prefix: int,
    kept: Tensor,
    gone: Tensor,
    weights: Tensor,
    retain: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Each kept token becomes retain * itself + alpha * weights @ the tokens that go. -> [B, c + K, D].

    Args:
        values: features or sizes of all tokens, [B, c + M, D].
        prefix: number of tokens at the start that stay as they are.
        kept: image tokens that stay, [B, K].
        gone: image tokens that go, [B, P].
        weights: what each kept token takes of each of them, [B, K, P].
        retain: what each kept token keeps of itself, [B, K]; None = all.
        alpha: factor of what is taken.
    """
    # Rows of zeros for the prefix tokens are cheaper than cutting the sequence in two and joining it again.
    weights = F.pad(weights, (0, 0, prefix, 0))
    own = select_rows(values, behind_prefix(kept, prefix))
    if retain is not None:
        own = own * F.pad(retain, (prefix, 0), value=1.0).unsqueeze(-1).to(own.dtype)
    taken = select_rows(values, gone + prefix)
    with full_precision(own):
        return torch.baddbmm(own, weights.to(own.dtype), taken.to(own.dtype), alpha=alpha)
