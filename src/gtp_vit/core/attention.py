"""Softmax attention that hands back the statistics a method asks for, not the map.

The map is written to memory only where a method wants the map itself, or an edit of it that no kernel knows.

Shapes: B batch, H heads, N tokens (keys), Q queries, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from gtp_vit import kernels
from gtp_vit.kernels import Kernels, twins

STATISTICS = ("diagonal", "column_sums", "class_row", "map", "keys", "values")


class Edit(Protocol):
    """Changes the attention map after softmax, e.g. sparsification."""

    def __call__(self, probs: Tensor) -> Tensor: ...

    def threshold_rank(self, entries: int) -> int | None:
        """k, if all it does is to zero what is below the k-th smallest of a head's entries; else None."""


@dataclass(frozen=True)
class Ask:
    """What a reducer wants from the attention of one layer."""

    statistics: frozenset[str] = frozenset()  # a subset of STATISTICS
    edit: Edit | None = None
    before_edit: bool = False  # take the statistics from the map as it was before `edit`


class Stats(NamedTuple):
    """What attention saw. A field that was not asked for is None. Statistics are float32 whatever the model's dtype."""

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
    use: Kernels = "auto",
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
        use: which kernels.

    Returns:
        The output [B, Q, H D] and the statistics.
    """
    wanted = ask.statistics
    asked = [name in wanted for name in STATISTICS[:3]]
    queries = q.shape[2] if queries is None else queries
    rank = 0 if ask.edit is None else ask.edit.threshold_rank(q.shape[2] * k.shape[2])
    if rank is None or "map" in wanted or dropout > 0 or (ask.before_edit and rank != 0):
        out, seen, probs = _with_the_map(q, k, v, scale, ask, bias, dropout, queries, asked)
    else:
        native = kernels.choose(use, q, k, v, bias)
        out, *seen = kernels.attention(native, q, k, v, bias, scale, rank, queries, asked)
        probs = None
    diagonal, column_sums, class_row = (found if want else None for found, want in zip(seen, asked, strict=True))
    return out, Stats(
        diagonal=diagonal,
        column_sums=column_sums,
        class_row=class_row,
        map=probs if "map" in wanted else None,
        keys=k if "keys" in wanted else None,
        values=v if "values" in wanted else None,
    )


def _with_the_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    ask: Ask,
    bias: Tensor | None,
    dropout: float,
    queries: int,
    asked: list[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The general case: output, statistics and the map they were taken from."""
    probs = twins.softmax(q, k, scale, None if bias is None else bias[:, None, None, :])
    probs = F.dropout(probs, dropout, training=dropout > 0)
    edited = probs if ask.edit is None else ask.edit(probs)
    out = (edited[:, :, :queries] @ v).transpose(1, 2).flatten(2)
    seen = probs if ask.before_edit else edited
    return out, list(twins.statistics(seen, asked)), seen
