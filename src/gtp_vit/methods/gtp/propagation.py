"""Section 3.2.3, token summarisation: removed tokens are propagated along the graph.

The sum itself is `weighted_merge` (core/weighted_merge.py), which other methods share.

Shapes: B batch, N tokens, c prefix tokens, K kept tokens, P propagated tokens, D anything that is propagated.
"""

from __future__ import annotations

from torch import Tensor

from gtp_vit.core.weighted_merge import weighted_merge


def summarise(values: Tensor, prefix: int, kept: Tensor, gone: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Eq. (10) and (12): X^s = X^k + alpha A^p X^p for a whole sequence, whose prefix tokens stay as they are.

    Args:
        values: features or sizes of all tokens, [B, c + M, D].
        prefix: number of tokens at the start that stay as they are.
        kept: image tokens that stay, [B, K].
        gone: image tokens that are propagated, [B, P].
        weights: A^p, what each kept token takes from each propagated one, [B, K, P].
        alpha: how strongly.
    """
    return weighted_merge(values, prefix, kept, gone, weights, alpha=alpha)
