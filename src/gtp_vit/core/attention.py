"""Softmax attention that hands back the statistics a method asks for, not the map.

The map is written to memory only where a statistic or an edit needs it; everything else runs on torch's fused
attention with the token sizes as a key bias.

Shapes: B batch, H heads, N tokens (keys), Q queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

STATISTICS = ("diagonal", "column_sums", "class_row", "map", "keys", "values")
_NEED_THE_MAP = frozenset({"diagonal", "column_sums", "map"})


@dataclass(frozen=True)
class Ask:
    """What a reducer wants from the attention of one layer."""

    statistics: frozenset[str] = frozenset()  # a subset of STATISTICS
    edit: Callable[[Tensor], Tensor] | None = None  # changes the map after softmax, e.g. sparsification
    before_edit: bool = False  # take the statistics from the map as it was before `edit`


class Stats(NamedTuple):
    """What attention saw. A field that was not asked for is None. Sums are float32 whatever the model's dtype."""

    diagonal: Tensor | None = None  # [B, H, N]     how much each token attends to itself
    column_sums: Tensor | None = None  # [B, H, N]     how much all tokens together attend to each token
    class_row: Tensor | None = None  # [B, H, N]     how much the first token attends to each token
    map: Tensor | None = None  # [B, H, N, N]
    keys: Tensor | None = None  # [B, H, N, D]
    values: Tensor | None = None  # [B, H, N, D]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    ask: Ask,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    queries: int | None = None,
) -> tuple[Tensor, Stats]:
    """Eq. (1), and Eq. (11) with a bias: softmax(q k^T * scale + bias) v, and the statistics of that map.

    Args:
        q: queries [B, H, Q, D]; all N of them wherever the map is edited or its statistics are asked for.
        k: keys [B, H, N, D].
        v: values [B, H, N, D].
        scale: factor of the logits.
        ask: which statistics to return and how to edit the map.
        bias: added to each key's logits, [B, N].
        dropout: probability of dropping an entry of the map (training).
        queries: return the output of the first `queries` tokens only.
    """
    wanted = ask.statistics
    key_bias = None if bias is None else bias[:, None, None, :]
    keys = k if "keys" in wanted else None
    values = v if "values" in wanted else None

    if ask.edit is None and not wanted & _NEED_THE_MAP:
        out = F.scaled_dot_product_attention(
            q[:, :, :queries], k, v, attn_mask=key_bias, dropout_p=dropout, scale=scale
        )
        row = _softmax(q[:, :, :1], k, scale, key_bias).squeeze(2) if "class_row" in wanted else None
        return out, Stats(class_row=row, keys=keys, values=values)

    probs = F.dropout(_softmax(q, k, scale, key_bias), dropout, training=dropout > 0)
    edited = probs if ask.edit is None else ask.edit(probs)
    out = edited[:, :, :queries] @ v
    seen = probs if ask.before_edit else edited
    return out, Stats(
        diagonal=seen.diagonal(dim1=-2, dim2=-1).float() if "diagonal" in wanted else None,
        column_sums=seen.float().sum(dim=-2) if "column_sums" in wanted else None,
        class_row=seen[:, :, 0].float() if "class_row" in wanted else None,
        map=seen if "map" in wanted else None,
        keys=keys,
        values=values,
    )


def _softmax(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None) -> Tensor:
    """Scaling q first keeps the logits in range in half precision, and is what the host models do."""
    logits = (q * scale) @ k.transpose(-2, -1)
    if key_bias is not None:
        logits = logits + key_bias
    return logits.softmax(dim=-1)
