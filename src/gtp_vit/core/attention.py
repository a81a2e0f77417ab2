"""Softmax attention that returns the statistics a method asks for, not the map.

The map is written to memory only where a method wants the map itself, or an edit of it that no kernel knows.

Shapes: B batch, H heads, N tokens (keys), Q queries, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from gtp_vit import kernels
from gtp_vit.core.masking import masked_softmax
from gtp_vit.kernels import Ops, reference
from gtp_vit.tensors import at_least_float32, full_precision

HEADS = ("each", "max", "mean")
STATISTICS = ("diagonal", "column_sums", "class_row", "map", "keys", "values")
NOT_OF_THE_MAP = frozenset({"keys", "values"})


class Edit(Protocol):
    """Changes the attention map after softmax, e.g. sparsification."""

    def __call__(self, probs: Tensor) -> Tensor: ...

    def threshold_rank(self, entries: int) -> int | None:
        """k, if the edit only zeroes what is below the k-th smallest of a head's entries; else None."""


@dataclass(frozen=True)
class Ask:
    """What a reducer wants from the attention of one layer."""

    statistics: frozenset[str] = frozenset()  # a subset of STATISTICS
    edit: Edit | None = None
    before_edit: bool = False  # take the statistics from the map as it was before `edit`
    heads: Literal["each", "max", "mean"] = "each"  # statistics of each head, or aggregated over the heads
    mask: Tensor | None = None  # [B, 1 or N, N]: 1 = the row's token may attend to the column's, 0 = it is masked
    choose: bool = False  # call `Reducer.choose` before the output is computed, and compute it for kept tokens only
    look: bool = False  # call `Reducer.look` with the map before values are computed, and compute them for what it left


class Projections(NamedTuple):
    """Inputs of a block's attention. B batch, H heads, Q queries, N tokens, D head dimension."""

    q: Tensor  # [B, H, Q, D]; all N queries wherever the map is edited or its statistics are asked for
    k: Tensor  # [B, H, N, D]
    v: Tensor  # [B, H, N, D]
    scale: float  # factor of the logits
    dropout: float = 0.0  # probability of dropping an entry of the map (training)
    bias: Tensor | None = None  # [B or 1, H, Q, N]: added to the logits, e.g. relative positions
    metric: Tensor | None = None  # [B, H, N, D]: the keys that methods read, if not those that attention does


class Stats(NamedTuple):
    """Statistics of one attention call, in float32 whatever the model's dtype; None where not asked for.

    They are [B, H, M], or [B, M] if aggregated over the heads: M image tokens, the prefix tokens are left out.
    """

    diagonal: Tensor | None = None  # how much each token attends to itself
    column_sums: Tensor | None = None  # how much all tokens together attend to each token
    class_row: Tensor | None = None  # how much the first token attends to each token
    map: Tensor | None = None  # [B, H, N, N], prefix tokens included
    keys: Tensor | None = None  # [B, H, M, D]
    values: Tensor | None = None  # [B, H, M, D]


def attend(
    projections: Projections,
    *,
    ask: Ask,
    size: Tensor | None = None,
    queries: int | None = None,
    first: int = 0,
    ops: Ops = Ops.TORCH,
) -> tuple[Tensor, Stats]:
    """Eq. (1), and Eq. (11) with sizes: softmax(q k^T * scale + bias + log s) v, and the statistics of that map.

    Args:
        projections: queries, keys and values.
        ask: which statistics to return and how to change the map.
        size: weight of each key, [B, N], e.g. the patches it stands for; 0 = ignored; None = all alike.
        queries: return the output of the first `queries` tokens only.
        first: statistics leave out the tokens before this one.
        ops: the operators to use where they can do what is asked.

    Returns:
        The output [B, Q, H D] and the statistics.
    """
    q, k, v, scale, dropout, bias, _ = projections
    wanted = ask.statistics
    asked = ["diagonal" in wanted, "column_sums" in wanted, "class_row" in wanted]
    heads = HEADS.index(ask.heads)
    queries = q.shape[2] if queries is None else queries
    rank = 0 if ask.edit is None else ask.edit.threshold_rank(q.shape[2] * k.shape[2])
    probs = None
    whole = rank is None or ask.mask is not None or "map" in wanted or dropout > 0 or (ask.before_edit and rank != 0)
    if whole or (bias is not None and (rank != 0 or asked[0] or asked[1])):
        probs = F.dropout(_map(projections, ask, size), dropout, training=dropout > 0)
        edited = probs if ask.edit is None else ask.edit(probs)
        out = (edited[:, :, :queries].to(v.dtype) @ v).transpose(1, 2).flatten(2)
        probs = probs if ask.before_edit else edited
        found = reference.statistics(probs, asked, heads, first)
    elif bias is not None:  # native kernels have none
        out = reference.fused(q[:, :, :queries], k, v, scale, size, bias[:, :, :queries])
        row = _class_row(projections, size) if asked[2] else out.new_empty(*q.shape[:2], 1, k.shape[2])
        found = reference.statistics(row, asked, heads, first)
    else:
        out, found = kernels.attention(ops, q, k, v, size, scale, rank, queries, asked, heads, first)
    diagonal, column_sums, class_row = asked  # `found` holds the statistics asked for, in this order
    return out, Stats(
        diagonal=found[0] if diagonal else None,
        column_sums=found[int(diagonal)] if column_sums else None,
        class_row=found[-1] if class_row else None,
        map=probs if "map" in wanted else None,
        keys=_keys(projections)[:, :, first:] if "keys" in wanted else None,
        values=v[:, :, first:] if "values" in wanted else None,
    )


def attention_map(projections: Projections, size: Tensor | None) -> Tensor:
    """The whole map [B, H, N, N], in float32 or better; arguments as for `attend`."""
    probs = _map(projections, Ask(frozenset({"map"})), size)
    return F.dropout(probs, projections.dropout, training=projections.dropout > 0)


def _map(projections: Projections, ask: Ask, size: Tensor | None) -> Tensor:
    """The whole map: in float32 or better where a method reads or edits it, else in the model's precision."""
    q, k, _, scale, _, bias, _ = projections
    if ask.edit is None and ask.statistics <= NOT_OF_THE_MAP:
        return _softmax(reference.logits(q, k, scale, size, bias), ask.mask)
    with full_precision(q):
        return _softmax(reference.logits(at_least_float32(q), at_least_float32(k), scale, size, bias), ask.mask)


def _softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits.softmax(dim=-1) if mask is None else masked_softmax(logits, mask.unsqueeze(1))


def _class_row(projections: Projections, size: Tensor | None) -> Tensor:
    """The first token's row of the map, [B, H, 1, N]."""
    q, k, _, scale, _, bias, _ = projections
    return reference.softmax(q[:, :, :1], k, scale, size, None if bias is None else bias[:, :, :1])


def _keys(projections: Projections) -> Tensor:
    return projections.k if projections.metric is None else projections.metric


def first_look(projections: Projections, ask: Ask, size: Tensor | None, first: int) -> Stats:
    """The statistics `Reducer.choose` gets, before the output is computed: class row, keys and values."""
    heads = HEADS.index(ask.heads)
    class_row = reference.statistics(_class_row(projections, size), [False, False, True], heads, first)[0]
    return Stats(class_row=class_row, keys=_keys(projections)[:, :, first:], values=projections.v[:, :, first:])
