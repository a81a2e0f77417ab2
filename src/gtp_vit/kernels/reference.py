"""Attention, the operator that all methods share, and its parts in pure torch; operators of a method are in its file.

Shapes: B batch, H heads, N tokens, D head dimension.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels import checks, native, triton_set, value_checks
from gtp_vit.kernels.arguments import AttentionInputs, AttentionResult
from gtp_vit.kernels.dispatch import Checks, Operator, Ops
from gtp_vit.kernels.lean import attention_lean, supports_lean
from gtp_vit.tensors import at_least_float32, full_precision, is_exporting


def attention_reference(inputs: AttentionInputs) -> AttentionResult:
    """softmax(q k^T * scale + log size) v of the first `queries` tokens, and statistics of the map."""
    q, k, v, size, scale, removed, queries, asked, heads, first = inputs
    diagonal, column_sums, class_row = asked
    if removed == 0 and not diagonal and not column_sums:
        out = fused_attention(q[:, :, :queries], k, v, scale, size)
        row = softmax(q[:, :, :1], k, scale, size) if class_row else q.new_empty(*q.shape[:2], 1, k.shape[2])
        return AttentionResult(out, statistics(row, asked, heads, first))
    probs = softmax(q, k, scale, size)
    probs = zero_below(probs.flatten(2), removed).view_as(probs)
    return AttentionResult(weighted_values(probs[:, :, :queries], v), statistics(probs, asked, heads, first))


def attention_on_accelerators(inputs: AttentionInputs) -> AttentionResult:
    """The same in few operators and without the map, wherever that is possible."""
    return attention_lean(inputs) if supports_lean(inputs) else attention_reference(inputs)


def zero_below(probs: Tensor, k: int) -> Tensor:
    """Zero what is below the k-th smallest entry along the last dimension; k = 0 changes nothing.

    So k - 1 entries go, fewer if several equal the threshold. NaN is below nothing: NaN images give NaN, as they do in
    the plain model.
    """
    if k < 1:
        return probs
    if is_exporting():  # engines have a topk
        threshold = probs.topk(probs.shape[-1] - k + 1, dim=-1).values[..., -1:]
    else:
        threshold = probs.detach().kthvalue(k, dim=-1, keepdim=True).values
    return probs * ~(probs < threshold)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, size: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Torch's own attention, [B, Q, H D]. On a CPU in float32 at least, as the native kernel computes it."""
    dtype = v.dtype
    with full_precision(q) if q.is_cpu else nullcontext():
        if q.is_cpu:
            q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=logit_bias(size, bias, q.dtype), scale=scale)
    return out.to(dtype).transpose(1, 2).flatten(2)


def weighted_values(probs: Tensor, v: Tensor) -> Tensor:
    """The output of attention, [B, Q, H D], in the values' dtype; summed up in the map's precision."""
    with full_precision(v):
        out = (probs @ v.to(probs.dtype)).to(v.dtype)
    return out.transpose(1, 2).flatten(2)


def statistics(probs: Tensor, statistic_mask: list[bool], heads: int, first: int) -> Tensor:
    """Diagonal, column sums and first row of an attention map, those asked for, in float32."""
    rows = []
    if statistic_mask[0]:
        rows.append(probs.diagonal(dim1=-2, dim2=-1).float())
    if statistic_mask[1]:
        rows.append(probs.sum(dim=-2, dtype=torch.float32))
    if statistic_mask[2]:
        rows.append(probs[:, :, 0].float())
    if heads:
        rows = [row.amax(dim=1) if heads == 1 else row.mean(dim=1) for row in rows]
    if rows:
        return torch.stack(rows)[..., first:]
    batch, num_heads, _, tokens = probs.shape
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    return probs.new_empty(0, *shape, dtype=torch.float32)


def logit_bias(size: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias of the logits, [B or 1, H or 1, Q or 1, N]: log sizes of the keys, and the model's own bias."""
    bias = None if bias is None else bias.to(dtype)
    if size is None:
        return bias
    log_size = size.log().to(dtype)[:, None, None, :]
    return log_size if bias is None else bias + log_size


def softmax(q: Tensor, k: Tensor, scale: float, size: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The attention map, in float32 at least: in half precision it has ties, and its threshold is coarse."""
    with full_precision(q):
        return logits(at_least_float32(q), at_least_float32(k), scale, size, bias).softmax(dim=-1)


def logits(q: Tensor, k: Tensor, scale: float, size: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The attention logits. Scaling q first keeps them in range in half precision, as the host models do."""
    more = logit_bias(size, bias, q.dtype)
    scores = (q * scale) @ k.transpose(-2, -1)
    return scores if more is None else scores + more


def _attention_flops(inputs: AttentionInputs) -> int:
    batch, heads, tokens, depth = inputs.k.shape
    queries, asked = inputs.queries, inputs.statistic_mask
    whole_map = inputs.removed or asked[0] or asked[1]
    again = int(asked[2] and not whole_map)  # the reference computes the class row once more
    return 2 * batch * heads * depth * tokens * ((inputs.q.shape[2] if whole_map else queries) + queries + again)


attention = Operator(
    "attention",
    AttentionInputs,
    AttentionResult,
    {
        Ops.TORCH: attention_reference,
        Ops.NATIVE: native.attention,
        Ops.TRITON: triton_set.attention,
        Ops.LEAN: attention_on_accelerators,
    },
    Checks(
        *(checks.check_attention, checks.supports_attention, value_checks.attention),
        supports_triton=triton_set.takes_attention,
    ),
    fake=native.attention_results,
    flops=_attention_flops,
)
