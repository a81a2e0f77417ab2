"""Common parts of the kernels: an order without ties, rows with their residual, the LayerNorm that follows.

What decides between equal values is a comparison of pairs, so no kernel sorts and none needs atomics: every output
has one writer and every sum one order, and results are the same in every run.

Shapes: B batch, N = c + M tokens, c prefix tokens, M image tokens, K kept, P removed, C channels.
"""

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


@triton.jit
def ordered(values):
    """Integers in the order of the floats: NaN is the largest, as in torch.sort, and -0 equals 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def sum_rows(x, branch, row, channel, C, mask):
    """Rows of x + branch in float32."""
    at = row * C + channel
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return a + tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def at_least(values, low):
    """The larger of both; NaN stays NaN."""
    return tl.where(values < low, low, values)


@triton.jit
def power_of_two_below(lengths):
    """A factor that brings rows of about these lengths into the range of float16, and rounds nothing."""
    largest = tl.max(tl.where((lengths == lengths) & (lengths < 1e30), lengths, 0.0))
    return tl.exp2(-tl.ceil(tl.log2(tl.where(largest > 1e-30, largest, 1.0))))


@triton.jit
def store_row(row, x_out, normed_out, norm_weight, norm_bias, at, k, mask, C, epsilon, HAS_NORM: tl.constexpr,
              HAS_BIAS: tl.constexpr):  # fmt: skip
    """A row of the result, rounded once, and the same after the LayerNorm."""
    rounded = row.to(x_out.dtype.element_ty)
    tl.store(x_out + at + k, rounded, mask=mask)
    if HAS_NORM:
        value = rounded.to(tl.float32)
        mean = tl.sum(tl.where(mask, value, 0.0)) / C
        centred = tl.where(mask, value - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / C + epsilon)
        value = centred * scale * tl.load(norm_weight + k, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(norm_bias + k, mask=mask, other=0.0).to(tl.float32)
        tl.store(normed_out + at + k, value.to(normed_out.dtype.element_ty), mask=mask)


@triton.jit
def split_kernel(
    values, kept, gone, slots, M, K, P, ALL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The K tokens with the largest values and the P others, each in raster order; of equal ones the earlier stays.

    slots [B, M]: the place of a token that stays, -1 for one that goes. Grid: (B,).
    """
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, ALL)
    here = m < M
    key = ordered(tl.load(values + b * M + m, mask=here, other=0.0))
    rank = tl.zeros([ALL], tl.int32)
    for o0 in range(0, M, SOME):
        o = o0 + tl.arange(0, SOME)
        other = ordered(tl.load(values + b * M + o, mask=o < M, other=0.0))
        first = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (o[None, :] < m[:, None]))
        rank += tl.sum((first & (o < M)[None, :]).to(tl.int32), axis=1)
    stays = here & (rank < K)
    goes = here & (rank >= K)
    slot = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    place = tl.cumsum(goes.to(tl.int32), axis=0) - 1
    tl.store(kept + b * K + slot, m.to(tl.int64), mask=stays)
    tl.store(gone + b * P + place, m.to(tl.int64), mask=goes)
    tl.store(slots + b * M + m, tl.where(stays, slot, -1), mask=here)


@triton.jit
def merge_kernel(
    x, branch, weight, size, length, kept, gone, target, norm_weight, norm_bias, x_out, normed_out, size_out,
    M, c, C, K, P, epsilon,
    HAS_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, KEEP_NORM: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr, GONE: tl.constexpr,
):  # fmt: skip
    """Residual, weighted mean, norm restored, LayerNorm, for one row of the result. Grid: (B (c + K),)."""
    rows = c + K
    b = (tl.program_id(0) // rows).to(tl.int64)
    r = tl.program_id(0) % rows
    x += b * (c + M) * C
    branch += b * (c + M) * C
    k = tl.arange(0, CHANNELS)
    mask = k < C
    slot = r - c
    is_image = slot >= 0
    own_token = tl.load(kept + b * K + slot, mask=is_image, other=0)
    merged = sum_rows(x, branch, tl.where(is_image, c + own_token, r), k, C, mask)
    if is_image:
        own_size = tl.load(size + b * M + own_token) if HAS_SIZE else 1.0
        own = tl.load(weight + b * M + own_token) if HAS_WEIGHT else own_size
        together = own_size
        both = own
        longest = tl.load(length + b * M + own_token) if KEEP_NORM else 0.0
        for p0 in range(0, P, GONE):
            p = p0 + tl.arange(0, GONE)
            comes = tl.load(target + b * P + p, mask=p < P, other=-1) == slot
            token = tl.load(gone + b * P + p, mask=comes, other=0)
            sizes = tl.load(size + b * M + token, mask=comes, other=0.0) if HAS_SIZE else tl.where(comes, 1.0, 0.0)
            given = tl.load(weight + b * M + token, mask=comes, other=0.0) if HAS_WEIGHT else sizes
            together += tl.sum(sizes)
            both += tl.sum(given)
            if KEEP_NORM:
                longest = tl.maximum(longest, tl.max(tl.load(length + b * M + token, mask=comes, other=0.0)))
        tl.store(size_out + b * K + slot, together)
        merged = merged * (own / both)
        for p0 in range(0, P, GONE):
            p = p0 + tl.arange(0, GONE)
            comes = tl.load(target + b * P + p, mask=p < P, other=-1) == slot
            token = tl.load(gone + b * P + p, mask=comes, other=0)
            sizes = tl.load(size + b * M + token, mask=comes, other=0.0) if HAS_SIZE else tl.where(comes, 1.0, 0.0)
            given = tl.load(weight + b * M + token, mask=comes, other=0.0) if HAS_WEIGHT else sizes
            count = tl.sum(comes.to(tl.int32))
            done = -1
            for _ in range(count):  # in ascending order of p: few, and the same sum in every run
                done = tl.min(tl.where(comes & (p > done), p, 2147483647))
                which = p == done
                other = tl.sum(tl.where(which, token, 0))
                share = tl.sum(tl.where(which, given, 0.0)) / both
                merged += sum_rows(x, branch, c + other, k, C, mask) * share
        if KEEP_NORM:
            norm = tl.sqrt(tl.sum(tl.where(mask, merged * merged, 0.0)))
            merged = tl.where(both > own, merged * (longest / at_least(norm, 1e-12)), merged)
    at = (b * rows + r) * C
    store_row(merged, x_out, normed_out, norm_weight, norm_bias, at, k, mask, C, epsilon, HAS_NORM, HAS_BIAS)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least this and at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def warps_for(channels: int) -> int:
    """Warps of a program that holds a whole row."""
    return 4 if channels <= 1024 else 8 if channels <= 2048 else 16


def precision_of(x: torch.Tensor, exact: bool) -> dict[str, object]:
    """Products of unit vectors: in float16 for half precision, where bfloat16 would change ten times as many tokens."""
    return {"HALF": x.dtype != torch.float32 and not exact, "PRECISION": "tf32x3"}


def norm_flags(norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None) -> dict[str, bool]:
    return {"HAS_NORM": norm_weight is not None, "HAS_BIAS": norm_bias is not None}
