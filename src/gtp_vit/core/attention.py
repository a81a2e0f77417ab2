"""Softmax attention that returns the statistics a method asks for, not the map.

The map is written to memory only where a method wants the map itself, or an edit of it that no kernel knows.

Shapes: B batch, H heads, N tokens (keys), Q queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit import kernels
from gtp_vit.kernels import Ops, reference
from gtp_vit.tensors import at_least_float32, full_precision

Heads = Literal["each", "max", "mean"]
HEADS = get_args(Heads)
EPSILON = 1e-6  # of a masked softmax


class Edit(Protocol):
    """Changes the attention map after softmax, e.g. sparsification."""

    def __call__(self, probs: Tensor) -> Tensor: ...

    def threshold_rank(self, entries: int) -> int | None:
        """k, if the edit only zeroes what is below the k-th smallest of a head's entries; else None."""


class Adjustments(NamedTuple):
    """A method's changes to a layer's attention; without any it is the model's own."""

    key_weights: Tensor | None = None  # [B, N]: their log is added to the logits, e.g. of sizes; 0 = ignored
    edit: Edit | None = None
    mask: Tensor | None = None  # [B, 1 or N, N]: 1 = the row's token may attend to the column's, 0 = it is masked


PLAIN = Adjustments()


class QKV(NamedTuple):
    """Inputs of a block's attention. B batch, H heads, Q queries, N tokens, D head dimension."""

    q: Tensor  # [B, H, Q, D]; all N queries wherever the map is edited or its statistics are asked for
    k: Tensor  # [B, H, N, D]
    v: Tensor  # [B, H, N, D]
    scale: float  # factor of the logits
    dropout: float = 0.0  # probability of dropping an entry of the map (training)
    bias: Tensor | None = None  # [B or 1, H, Q, N]: added to the logits, e.g. relative positions
    method_keys: Tensor | None = None  # [B, H, N, D]: the keys that methods read, if not those that attention does


class AttentionStats(NamedTuple):
    """Statistics of one attention call, in float32 whatever the model's dtype; None where not asked for.

    They are [B, H, M], or [B, M] if aggregated over the heads: M image tokens, the prefix tokens are left out.
    """

    diagonal: Tensor | None = None  # how much each token attends to itself
    column_sums: Tensor | None = None  # how much all tokens together attend to each token
    class_row: Tensor | None = None  # how much the first token attends to each token
    map: Tensor | None = None  # [B, H, N, N], prefix tokens included


def attend(
    qkv: QKV,
    adjustments: Adjustments = PLAIN,
    statistics: Collection[str] = (),
    *,
    heads: Heads = "each",
    before_edit: bool = False,
    queries: int | None = None,
    first: int = 0,
    ops: Ops = Ops.TORCH,
) -> tuple[Tensor, AttentionStats]:
    """softmax(q k^T * scale + bias + log weights) v, and statistics of that map.

    Args:
        qkv: queries, keys and values.
        adjustments: how the map is changed.
        statistics: names of fields of `AttentionStats`: those to return.
        heads: statistics of each head, or aggregated over the heads.
        before_edit: take them from the map as it was before the edit.
        queries: return the output of the first `queries` tokens only.
        first: statistics leave out the tokens before this one.
        ops: the operators to use where they can do what is asked.

    Returns:
        The output [B, Q, H D] and the statistics.
    """
    q, k, v, scale, dropout, bias, _ = qkv
    weights, edit, mask = adjustments
    requested = ["diagonal" in statistics, "column_sums" in statistics, "class_row" in statistics]
    aggregate = HEADS.index(heads)
    queries = q.shape[2] if queries is None else queries
    rank = 0 if edit is None else edit.threshold_rank(q.shape[2] * k.shape[2])
    probs = None
    whole = mask is not None or "map" in statistics or dropout > 0 or (before_edit and rank != 0)
    if rank is None or whole or (bias is not None and (rank != 0 or requested[0] or requested[1])):
        probs = attention_map(qkv, adjustments, precise=edit is not None or bool(statistics))
        edited = probs if edit is None else edit(probs)
        out = (edited[:, :, :queries].to(v.dtype) @ v).transpose(1, 2).flatten(2)
        probs = probs if before_edit else edited
        recorded = reference.statistics(probs, requested, aggregate, first)
    elif bias is not None:  # native kernels have none
        out = reference.fused_attention(q[:, :, :queries], k, v, scale, weights, bias[:, :, :queries])
        row = _class_row(qkv, weights) if requested[2] else out.new_empty(*q.shape[:2], 1, k.shape[2])
        recorded = reference.statistics(row, requested, aggregate, first)
    else:
        inputs = kernels.AttentionInputs(q, k, v, weights, scale, rank, queries, requested, aggregate, first)
        out, recorded = kernels.attention(ops, inputs)
    diagonal, column_sums, _ = requested  # `recorded` holds the requested statistics, in this order
    return out, AttentionStats(
        diagonal=recorded[0] if diagonal else None,
        column_sums=recorded[int(diagonal)] if column_sums else None,
        class_row=recorded[-1] if requested[2] else None,
        map=probs if "map" in statistics else None,
    )


def attention_map(qkv: QKV, adjustments: Adjustments, *, precise: bool = True) -> Tensor:
    """The map before any edit, [B, H, N, N]: in float32 or better if `precise`, else in the model's precision."""
    q, k, _, scale, dropout, bias, _ = qkv
    weights, _, mask = adjustments
    with full_precision(q) if precise else nullcontext():
        if precise:
            q, k = at_least_float32(q), at_least_float32(k)
        logits = reference.logits(q, k, scale, weights, bias)
        probs = logits.softmax(dim=-1) if mask is None else masked_softmax(logits, mask.unsqueeze(1))
    return F.dropout(probs, dropout, training=dropout > 0)


def class_row(qkv: QKV, weights: Tensor | None, *, heads: Heads, first: int) -> Tensor:
    """The statistic `class_row` alone, without an output."""
    row = _class_row(qkv, weights)
    return reference.statistics(row, [False, False, True], HEADS.index(heads), first)[0]


def _class_row(qkv: QKV, weights: Tensor | None) -> Tensor:
    """The first token's row of the map, [B, H, 1, N]."""
    q, k, _, scale, _, bias, _ = qkv
    return reference.softmax(q[:, :, :1], k, scale, weights, None if bias is None else bias[:, :, :1])


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax that masks tokens without removing them: (e m + eps / N) / (sum e m + eps), e = exp(logit - row maximum).

    The small terms make a row without any allowed entry a mean over all, not a division by zero. DynamicViT
    and Tri-Level are trained with it.

    Args:
        logits: [B, H, N, N].
        mask: 1 = the row's token may attend to the column's, 0 = it is masked; [B, 1, 1 or N, N].
    """
    if torch.is_grad_enabled() and (logits.requires_grad or mask.requires_grad):
        probs: Tensor = _WithGradient.apply(logits, mask)
        return probs
    return _parts(logits, mask)[0].to(logits.dtype)


def _parts(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, e, and sum e m + eps, in full precision."""
    weights = (logits - logits.amax(dim=-1, keepdim=True)).to(torch.float32).exp()
    allowed = weights * mask
    total = allowed.sum(dim=-1, keepdim=True) + EPSILON
    return (allowed + EPSILON / allowed.shape[-1]) / total, weights, total


class _WithGradient(torch.autograd.Function):
    """A fused backward pass: autograd's own takes most of the time of DynamicViT's training.

    The row maximum is treated as a constant. It would cancel but for EPSILON, so where the maximum is masked the
    gradient is off by about EPSILON over the sum of the allowed e; a row in which nothing is allowed gets none.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor) -> Tensor:
        probs, weights, total = _parts(logits, mask)
        ctx.save_for_backward(mask, probs, weights, total)
        return probs.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        mask, probs, weights, total = ctx.saved_tensors
        gradient = gradients[0].float()
        mean = (gradient * probs).sum(dim=-1, keepdim=True)
        change = (gradient - mean).mul_(1 / total).mul_(weights)  # of e m, times e
        of_mask = change.sum_to_size(mask.shape) if ctx.needs_input_grad[1] else None
        return change.mul_(mask).to(gradients[0].dtype), of_mask
