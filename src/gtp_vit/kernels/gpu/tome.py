"""ToMe's matching of tokens at even and odd places by their keys, in three launches, and its merge in one.

Shapes: B batch, H heads, N = c + M tokens, c prefix tokens, M image tokens, F and S of them in the first and the second
half, r merged pairs, D head dimension, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .parts import at_least, merge_kernel, norm_flags, ordered, power_of_two, precision_of, warps_for


@triton.jit
def unit_keys_kernel(
    keys, unit, H, M, D, kb, kh, kn, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Mean of the keys over the heads, scaled to length 1, [B, M, D]. Grid: (B cdiv(M, ROWS),)."""
    blocks = tl.cdiv(M, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DEPTH)
    mask = (i < M)[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    for h in range(H):
        at = keys + b * kb + h * kh + i[:, None] * kn + d[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    total = total / H
    length = at_least(tl.sqrt(tl.sum(total * total, axis=1)), 1e-12)
    unit_key = total / length[:, None]
    tl.store(unit + b * M * D + i[:, None] * D + d[None, :], unit_key.to(unit.dtype.element_ty), mask=mask)


@triton.jit
def partner_kernel(
    unit, best, partner, M, D, first, second, F, S,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """For each token of the first half the most similar one of the second, the first of equal ones; NaN is the most
    similar. Grid: (B cdiv(F, ROWS),). first, second: the place of each half's first token."""
    blocks = tl.cdiv(F, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    unit += b * M * D
    highest = tl.full([ROWS], -2147483648, tl.int32)
    nearest = tl.zeros([ROWS], tl.int32)
    for j0 in range(0, S, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        dots = tl.zeros([ROWS, COLUMNS], tl.float32)
        for d0 in range(0, D, DEPTH):
            d = d0 + tl.arange(0, DEPTH)
            at_rows = unit + (first + 2 * i[:, None]) * D + d[None, :]
            own = tl.load(at_rows, mask=(i < F)[:, None] & (d < D)[None, :], other=0.0)
            at_columns = unit + (second + 2 * j[:, None]) * D + d[None, :]
            other = tl.load(at_columns, mask=(j < S)[:, None] & (d < D)[None, :], other=0.0)
            dots += tl.dot(own, tl.trans(other), input_precision=PRECISION)
        key = tl.where((j < S)[None, :], ordered(dots), -2147483648)
        here_highest = tl.max(key, axis=1)
        here_nearest = tl.min(tl.where(key == here_highest[:, None], j[None, :], 2147483647), axis=1)
        better = here_highest > highest
        nearest = tl.where(better, here_nearest, nearest)
        highest = tl.where(better, here_highest, highest)
    tl.store(best + b * F + i, highest, mask=i < F)
    tl.store(partner + b * F + i, nearest, mask=i < F)


@triton.jit
def pairs_kernel(
    best, partner, kept, gone, target, first, second, F, S, R,
    KEEP_ORDER: tl.constexpr, ALL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The R most similar pairs; of equal ones the earlier. Grid: (B,). ALL: a power of two >= F and S."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, ALL)
    here = m < F
    key = tl.load(best + b * F + m, mask=here, other=0)
    rank = tl.zeros([ALL], tl.int32)
    for o0 in range(0, F, SOME):
        o = o0 + tl.arange(0, SOME)
        other = tl.load(best + b * F + o, mask=o < F, other=0)
        before = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (o[None, :] < m[:, None]))
        rank += tl.sum((before & (o < F)[None, :]).to(tl.int32), axis=1)
    goes = here & (rank < R)
    stays = here & (rank >= R)
    left = F - R
    K = left + S
    place = (tl.cumsum(stays.to(tl.int32), axis=0) - 1) if KEEP_ORDER else rank - R
    token = (first + 2 * m).to(tl.int64)
    tl.store(kept + b * K + place, token, mask=stays)
    tl.store(kept + b * K + left + m, (second + 2 * m).to(tl.int64), mask=m < S)
    tl.store(gone + b * R + rank, token, mask=goes)
    chosen = tl.load(partner + b * F + m, mask=here, other=0)
    tl.store(target + b * R + rank, (chosen + left).to(tl.int64), mask=goes)


@triton_op("gtp_vit_gpu::match_pairs", mutates_args={})
def match_pairs(
    keys: Tensor, prefix: int, removed: int, keep_order: bool, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The `removed` most similar pairs of tokens at even and odd places of the sequence, by the mean of their keys.

    Args:
        keys: of the image tokens, [B, H, M, D].
        prefix: tokens before them, which shift even and odd.
        removed: pairs to merge.
        keep_order: do tokens of the first half that stay keep their order? Else the most similar come first.
        exact: products in the precision of float32 also for half precision.

    Returns:
        Which stay [B, K] and go [B, r], and where to, as places among those that stay, [B, r].
    """
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    batch, heads, count, depth = keys.shape
    first, second = prefix % 2, 1 - prefix % 2
    firsts, seconds = (count - first + 1) // 2, (count - second + 1) // 2
    precision = precision_of(keys, exact)
    unit = keys.new_empty(batch, count, depth, dtype=torch.float16 if precision["HALF"] else torch.float32)
    best, partner = (keys.new_empty(batch, firsts, dtype=torch.int32) for _ in range(2))
    kept = keys.new_empty(batch, count - removed, dtype=torch.int64)
    gone, target = (keys.new_empty(batch, removed, dtype=torch.int64) for _ in range(2))
    wrap_triton(unit_keys_kernel)[(batch * triton.cdiv(count, 16),)](
        keys, unit, heads, count, depth, *keys.stride()[:3], ROWS=16, DEPTH=power_of_two(depth), num_warps=4
    )
    wrap_triton(partner_kernel)[(batch * triton.cdiv(firsts, 32),)](
        unit, best, partner, count, depth, first, second, firsts, seconds,
        PRECISION=precision["PRECISION"], ROWS=32, COLUMNS=64, DEPTH=32, num_warps=4,
    )  # fmt: skip
    every = power_of_two(max(firsts, seconds))
    wrap_triton(pairs_kernel)[(batch,)](
        best, partner, kept, gone, target, first, second, firsts, seconds, removed,
        KEEP_ORDER=keep_order, ALL=every, SOME=16 if every <= 1024 else 4, num_warps=8,
    )  # fmt: skip
    return kept, gone, target


@triton_op("gtp_vit_gpu::merge_pairs", mutates_args={})
def merge_pairs(
    x: Tensor,
    branch: Tensor,
    size: Tensor | None,
    kept: Tensor,
    gone: Tensor,
    target: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that go are averaged into their targets, by size.

    Args:
        x: features [B, N, C].
        branch: the attention branch, to be added to them.
        size: how many patches each image token stands for, [B, M] float32; None = one each.
        kept, gone, target: from `match_pairs`.
        norm_weight, norm_bias, epsilon: the LayerNorm that follows; without a weight there is none.

    Returns:
        Features [B, N - r, C], the same after the LayerNorm, sizes [B, K].
    """
    (batch, tokens, channels), left, removed = x.shape, kept.shape[1], gone.shape[1]
    count = left + removed
    x, branch, kept, gone, target = (tensor.contiguous() for tensor in (x, branch, kept, gone, target))
    new_size = x.new_empty(batch, left, dtype=torch.float32)
    sizes = new_size if size is None else size.contiguous()
    x_out = x.new_empty(batch, tokens - removed, channels)
    normed = x.new_empty((0,) if norm_weight is None else x_out.shape)
    wrap_triton(merge_kernel)[(batch * (tokens - removed),)](
        x, branch, sizes, sizes, sizes, kept, gone, target, x if norm_weight is None else norm_weight,
        x if norm_bias is None else norm_bias, x_out, normed, new_size,
        count, tokens - count, channels, left, removed, epsilon,
        HAS_SIZE=size is not None, HAS_WEIGHT=False, KEEP_NORM=False, CHANNELS=power_of_two(channels),
        GONE=min(256, power_of_two(removed)), num_warps=warps_for(channels), **norm_flags(norm_weight, norm_bias),
    )  # fmt: skip
    return x_out, normed, new_size
