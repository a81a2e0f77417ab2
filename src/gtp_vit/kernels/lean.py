"""Attention in few torch operators, for accelerators, where every call is a launch: fused, and no map for statistics.

Every statistic follows from the logarithm of the sums of attention's softmax, L, which the fused kernel gives beside
its output. With the logits l_ij = scale q_i k_j + log s_j, where s_j is the size of key j:

    class row     exp(l_0j - L_0)
    diagonal      exp(l_jj - L_j)
    column sums   sum_i exp(l_ij - L_i) = s_j exp(M_j), where M_j is the logarithm of the sum over i of
                  exp(scale k_j q_i - L_i): that of a second fused attention, whose queries are the keys k, whose keys
                  are the queries q, and whose mask is -L

A mask in half precision rounds L. What it loses, r_i, goes in as the values of the second attention: their mean, which
is its output, is what M_j lacks, up to the variance of r.

Shapes: B batch, H heads, N tokens, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels.arguments import AttentionInputs, AttentionResult
from gtp_vit.tensors import at_least_float32, full_precision

WIDTH = 8  # of the values of the second attention, the least that its kernel takes
ALIGNMENT = 16  # entries: rows of a mask begin at a multiple of this


def supports_lean(inputs: AttentionInputs) -> bool:
    """Can all that is asked for be had without the map?"""
    diagonal, column_sums, _ = inputs.statistic_mask
    return inputs.removed == 0 and (not (diagonal or column_sums) or _has_logsumexp(inputs.q))


def _has_logsumexp(q: Tensor) -> bool:
    """Is there a fused kernel that takes a mask and gives the logarithm of its sums?"""
    half_or_float = (torch.float16, torch.bfloat16, torch.float32)
    return q.is_cuda and q.dtype in half_or_float and q.shape[-1] % WIDTH == 0


class WithLogsumexp(NamedTuple):
    """The result of a fused attention."""

    output: Tensor  # [B, H, N, D]
    logsumexp: Tensor  # [B, H, N] float32: the logarithm of the sums of its softmax


def attention_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> WithLogsumexp:
    """Torch's memory-efficient attention; `mask` [B, 1 or H, 1, N] is added to the logits."""
    batch, heads, tokens, _ = q.shape
    mask = None if mask is None else mask.expand(batch, heads, tokens, -1)
    with full_precision(q):
        result = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, scale=scale)
    return WithLogsumexp(result[0], result[1][..., :tokens])  # there are more on some devices


def attention_lean(inputs: AttentionInputs) -> AttentionResult:
    """The result of `attention_reference`, for arguments that `supports_lean` accepts."""
    q, k, v, size, scale, _, queries, asked, _, _ = inputs
    if asked[0] or asked[1]:
        return _with_statistics(inputs)
    log_size = mask = None
    if size is not None:
        log_size = size.log()[:, None, None]  # [B, 1, 1, N], for the mask and for the class row
        mask = _room_for(log_size, q.dtype).copy_(log_size)
    out = F.scaled_dot_product_attention(q[:, :, :queries], k, v, attn_mask=mask, scale=scale)
    rows = out.new_empty(0, *q.shape[:2], k.shape[2], dtype=torch.float32)
    if asked[2]:
        logits = _class_logits(q, k)
        logits = logits * scale if log_size is None else torch.add(log_size, logits, alpha=scale)
        rows = logits.softmax(dim=-1).squeeze(2).unsqueeze(0).float()
    return AttentionResult(_heads_joined(out), _of_heads(rows, inputs))


def _class_logits(q: Tensor, k: Tensor) -> Tensor:
    """The first token's product with all keys, before the scale, [B, H, 1, N], in float32 at least."""
    with full_precision(q):
        first = at_least_float32(q[:, :, :1])
        # Converted and put in order at once: a product would copy keys that are not contiguous once more.
        keys = k.to(first.dtype, memory_format=torch.contiguous_format)
        return first @ keys.transpose(-2, -1)


def _with_statistics(inputs: AttentionInputs) -> AttentionResult:
    q, k, v, size, scale, _, queries, asked, heads, _ = inputs
    mask = None
    if size is not None:
        sizes = size[:, None, None]
        mask = torch.log(sizes, out=_room_for(sizes, q.dtype))
    out, logsumexp = attention_with_logsumexp(q, k, v, mask, scale)
    lacking = []  # minus the logarithm of each statistic, without the sizes; [B, H, N]
    if asked[0]:
        lacking.append(torch.sub(logsumexp, (q.float() * k).sum(dim=-1), alpha=scale))
    if asked[1]:
        lacking.append(_minus_log_of_column_sums(q, k, logsumexp, scale))
    if asked[2]:
        lacking.append(torch.sub(logsumexp[..., :1], _class_logits(q, k)[:, :, 0], alpha=scale))
    logs = torch.stack(lacking)
    if heads == 1:  # the largest over the heads, before more is computed
        logs = logs.amin(dim=2, keepdim=True)
    rows = logs.neg().exp() if size is None else size[:, None].float() / logs.exp()
    return AttentionResult(_heads_joined(out[:, :, :queries]), _of_heads(rows, inputs))


def _minus_log_of_column_sums(q: Tensor, k: Tensor, logsumexp: Tensor, scale: float) -> Tensor:
    sums_of_rows = logsumexp.unsqueeze(2)
    minus = torch.mul(sums_of_rows, -1, out=_room_for(sums_of_rows, q.dtype))
    if q.dtype == torch.float32:
        return attention_with_logsumexp(k, q, q[..., :WIDTH], minus, scale).logsumexp.neg()
    # The values: what the mask should have been less, in each of the columns.
    wide = (logsumexp.unsqueeze(-1).expand(*logsumexp.shape, WIDTH), minus[:, :, 0].unsqueeze(-1))
    values = torch.add(*wide, out=q.new_empty(wide[0].shape))
    mean, sums = attention_with_logsumexp(k, q, values, minus, scale)
    return mean[..., 0] - sums


def _room_for(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty mask of this shape whose rows begin where the kernel may read several entries at once.

    What is computed into it needs no copy, which a mask in half precision and any that is not aligned would.
    """
    entries = mask.shape[-1]
    return mask.new_empty(*mask.shape[:-1], -(-entries // ALIGNMENT) * ALIGNMENT, dtype=dtype)[..., :entries]


def _heads_joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def _of_heads(rows: Tensor, inputs: AttentionInputs) -> Tensor:
    """Statistics [S, B, H, N] as they were asked for: aggregated over the heads, from the first token on."""
    if inputs.heads == 1:
        rows = rows.amax(dim=2) if rows.shape[2] > 1 else rows[:, :, 0]
    elif inputs.heads == 2:
        rows = rows.mean(dim=2)
    return rows[..., inputs.first :]
