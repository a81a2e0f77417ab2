"""GTP+'s merge of the tokens that cost least: three launches up to 256 image tokens, four above; two more by a probe.

  "j is more important than i"  is  (key_j, -j) > (key_i, -i), key = the bits of importance as an ordered integer;
  "j stays before i"            is  (cost_j, -j) > (cost_i, -i); the K first stay, their places are a cumulative sum;
  "the most similar receiver"   is  the largest cosine, then the largest key, then the smallest j.

Shapes: B batch, N = c + M tokens, c prefix tokens, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .parts import (
    at_least,
    merge_kernel,
    norm_flags,
    ordered,
    power_of_two,
    power_of_two_below,
    precision_of,
    split_kernel,
    sum_rows,
    warps_for,
)

ONE_PROGRAM = 256  # image tokens up to which one program selects and matches without spilling registers
# Sizes with which no kernel spills registers, products in float16 and in float32; tests compile them for GPUs.
COST = {
    True: {"ROWS": 32, "COLUMNS": 64, "CHANNELS": 32, "num_warps": 4},
    False: {"ROWS": 32, "COLUMNS": 32, "CHANNELS": 32, "num_warps": 4, "num_stages": 2},
}
SELECT = {
    True: {"SOME": 16, "GONE": 16, "CHANNELS": 16, "num_warps": 8},
    False: {"SOME": 16, "GONE": 16, "CHANNELS": 16, "num_warps": 8, "num_stages": 1},
}
RECEIVER = {
    True: {"GONE": 16, "COLUMNS": 128, "CHANNELS": 32, "num_warps": 4},
    False: {"GONE": 16, "COLUMNS": 64, "CHANNELS": 32, "num_warps": 4, "num_stages": 2},
}


@triton.jit
def cost_kernel(
    x, branch, importance, size, protected, cost, length, M, c, C, floor,
    HAS_SIZE: tl.constexpr, HAS_PROTECTED: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """cost [B, M] and length [B, M]; the M x M cosines live in registers only. Grid: (B cdiv(M, ROWS),)."""
    blocks = tl.cdiv(M, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    x += b * (c + M) * C
    branch += b * (c + M) * C
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    here = i < M
    given_i = tl.load(importance + b * M + i, mask=here, other=0.0)
    key_i = ordered(given_i)
    size_i = tl.load(size + b * M + i, mask=here, other=1.0) if HAS_SIZE else tl.full([ROWS], 1.0, tl.float32)
    nearest = tl.full([ROWS], float("inf"), tl.float32)
    square_i = tl.zeros([ROWS], tl.float32)
    for k0 in range(0, C, CHANNELS):  # lengths of the own rows, once
        k = k0 + tl.arange(0, CHANNELS)
        own = sum_rows(x, branch, c + i[:, None], k[None, :], C, here[:, None] & (k[None, :] < C))
        square_i += tl.sum(own * own, axis=1)
    length_i = at_least(tl.sqrt(square_i), 1e-12)
    tl.store(length + b * M + i, length_i, mask=here)
    factor = power_of_two_below(length_i)
    total = 0.0
    counted = 0.0
    for j0 in range(0, M, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        there = j < M
        dots = tl.zeros([ROWS, COLUMNS], tl.float32)
        square_j = tl.zeros([COLUMNS], tl.float32)
        for k0 in range(0, C, CHANNELS):
            k = k0 + tl.arange(0, CHANNELS)
            own = sum_rows(x, branch, c + i[:, None], k[None, :], C, here[:, None] & (k[None, :] < C))
            other = sum_rows(x, branch, c + j[:, None], k[None, :], C, there[:, None] & (k[None, :] < C))
            square_j += tl.sum(other * other, axis=1)
            if HALF:
                unit = (own / length_i[:, None]).to(tl.float16)
                dots += tl.dot(unit, tl.trans((other * factor).to(tl.float16)))
            else:
                dots += tl.dot(own, tl.trans(other), input_precision=PRECISION)
        length_j = at_least(tl.sqrt(square_j), 1e-12)
        cosine = dots / (length_j * factor)[None, :] if HALF else dots / length_i[:, None] / length_j[None, :]
        away = at_least(1.0 - cosine, 0.0)
        given_j = tl.load(importance + b * M + j, mask=there, other=0.0)
        key_j = ordered(given_j)
        size_j = tl.load(size + b * M + j, mask=there, other=1.0) if HAS_SIZE else tl.full([COLUMNS], 1.0, tl.float32)
        pair = size_i[:, None] * size_j[None, :] / (size_i[:, None] + size_j[None, :])
        apart = away * away * pair
        before = (key_j[None, :] > key_i[:, None]) | ((key_j[None, :] == key_i[:, None]) & (j[None, :] < i[:, None]))
        before = before & there[None, :] & (apart >= 0)  # False for NaN
        free = there
        if HAS_PROTECTED:
            free = there & (tl.load(protected + b * M + j, mask=there, other=1.0) <= 0)
            before = before & free[None, :]
        nearest = tl.minimum(nearest, tl.min(tl.where(before, apart, float("inf")), axis=1))
        total += tl.sum(tl.where(free, given_j, 0.0))
        counted += tl.sum(free.to(tl.float32))
    value = (given_i / (total / counted) + floor) * tl.sqrt(nearest)
    if HAS_PROTECTED:
        value = tl.where(tl.load(protected + b * M + i, mask=here, other=0.0) > 0, float("inf"), value)
    tl.store(cost + b * M + i, value, mask=here)


@triton.jit
def select_kernel(
    x, branch, importance, protected, cost, length, kept, gone, target, M, c, C, K, P,
    HAS_PROTECTED: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    ALL: tl.constexpr, SOME: tl.constexpr, GONE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Tokens that stay, that go, and where to, by one program per image. Grid: (B,). ALL: a power of two >= M."""
    b = tl.program_id(0).to(tl.int64)
    x += b * (c + M) * C
    branch += b * (c + M) * C
    m = tl.arange(0, ALL)
    here = m < M
    key = ordered(tl.load(cost + b * M + m, mask=here, other=0.0))
    rank = tl.zeros([ALL], tl.int32)
    for o0 in range(0, M, SOME):
        o = o0 + tl.arange(0, SOME)
        other = ordered(tl.load(cost + b * M + o, mask=o < M, other=0.0))
        first = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (o[None, :] < m[:, None]))
        rank += tl.sum((first & (o < M)[None, :]).to(tl.int32), axis=1)
    stays = here & (rank < K)
    goes = here & (rank >= K)
    slot = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    place = tl.cumsum(goes.to(tl.int32), axis=0) - 1
    tl.store(kept + b * K + slot, m.to(tl.int64), mask=stays)
    tl.store(gone + b * P + place, m.to(tl.int64), mask=goes)
    matters = ordered(tl.load(importance + b * M + m, mask=here, other=0.0))
    lengths = tl.load(length + b * M + m, mask=here, other=1.0)
    factor = power_of_two_below(lengths)
    receives = stays
    if HAS_PROTECTED:
        receives = receives & (tl.load(protected + b * M + m, mask=here, other=0.0) <= 0)
    for p0 in range(0, P, GONE):
        p = p0 + tl.arange(0, GONE)
        is_p = (place[None, :] == p[:, None]) & goes[None, :]
        token = tl.sum(tl.where(is_p, m[None, :], 0), axis=1)
        own_key = tl.sum(tl.where(is_p, matters[None, :], 0), axis=1)
        own_length = at_least(tl.sum(tl.where(is_p, lengths[None, :], 0.0), axis=1), 1e-12)
        dots = tl.zeros([GONE, ALL], tl.float32)
        for k0 in range(0, C, CHANNELS):
            k = k0 + tl.arange(0, CHANNELS)
            own = sum_rows(x, branch, c + token[:, None], k[None, :], C, (p < P)[:, None] & (k[None, :] < C))
            every = sum_rows(x, branch, c + m[:, None], k[None, :], C, here[:, None] & (k[None, :] < C))
            if HALF:
                unit = (own / own_length[:, None]).to(tl.float16)
                dots += tl.dot(unit, tl.trans((every * factor).to(tl.float16)))
            else:
                dots += tl.dot(own, tl.trans(every), input_precision=PRECISION)
        cosine = dots / (lengths * factor)[None, :] if HALF else dots / own_length[:, None] / lengths[None, :]
        before = (matters[None, :] > own_key[:, None]) | (
            (matters[None, :] == own_key[:, None]) & (m[None, :] < token[:, None])
        )
        cosine = tl.where(before & receives[None, :] & (cosine == cosine), cosine, -2.0)
        best = tl.max(cosine, axis=1)
        like = cosine == best[:, None]
        highest = tl.max(tl.where(like, matters[None, :], -2147483648), axis=1)
        like = like & (matters[None, :] == highest[:, None])
        chosen = tl.min(tl.where(like, m[None, :], ALL), axis=1)
        receiver = tl.sum(tl.where(m[None, :] == chosen[:, None], slot[None, :], 0), axis=1)
        receiver = tl.where(best > -1.5, receiver, 0)  # none only if there is NaN: then the first
        tl.store(target + b * P + p, receiver.to(tl.int64), mask=p < P)


@triton.jit
def receiver_kernel(
    x, branch, importance, protected, length, gone, slots, target, M, c, C, P,
    HAS_PROTECTED: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    GONE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Where those that go, go to, for any number of tokens; slots from split_kernel. Grid: (B cdiv(P, GONE),)."""
    blocks = tl.cdiv(P, GONE)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    x += b * (c + M) * C
    branch += b * (c + M) * C
    p = (tl.program_id(0) % blocks) * GONE + tl.arange(0, GONE)
    goes = p < P
    token = tl.load(gone + b * P + p, mask=goes, other=0).to(tl.int32)
    own_key = ordered(tl.load(importance + b * M + token, mask=goes, other=0.0))
    own_length = tl.load(length + b * M + token, mask=goes, other=1.0)
    factor = power_of_two_below(own_length)
    best = tl.full([GONE], -2.0, tl.float32)
    highest = tl.full([GONE], -2147483648, tl.int32)
    receiver = tl.zeros([GONE], tl.int32)
    for j0 in range(0, M, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        there = j < M
        dots = tl.zeros([GONE, COLUMNS], tl.float32)
        for k0 in range(0, C, CHANNELS):
            k = k0 + tl.arange(0, CHANNELS)
            own = sum_rows(x, branch, c + token[:, None], k[None, :], C, goes[:, None] & (k[None, :] < C))
            every = sum_rows(x, branch, c + j[:, None], k[None, :], C, there[:, None] & (k[None, :] < C))
            if HALF:
                unit = (own / own_length[:, None]).to(tl.float16)
                dots += tl.dot(unit, tl.trans((every * factor).to(tl.float16)))
            else:
                dots += tl.dot(own, tl.trans(every), input_precision=PRECISION)
        lengths = tl.load(length + b * M + j, mask=there, other=1.0)
        cosine = dots / (lengths * factor)[None, :] if HALF else dots / own_length[:, None] / lengths[None, :]
        slot = tl.load(slots + b * M + j, mask=there, other=-1)
        receives = slot >= 0
        if HAS_PROTECTED:
            receives = receives & (tl.load(protected + b * M + j, mask=there, other=0.0) <= 0)
        matters = ordered(tl.load(importance + b * M + j, mask=there, other=0.0))
        before = (matters[None, :] > own_key[:, None]) | (
            (matters[None, :] == own_key[:, None]) & (j[None, :] < token[:, None])
        )
        cosine = tl.where(before & receives[None, :] & (cosine == cosine), cosine, -2.0)
        here_best = tl.max(cosine, axis=1)
        like = cosine == here_best[:, None]
        here_highest = tl.max(tl.where(like, matters[None, :], -2147483648), axis=1)
        like = like & (matters[None, :] == here_highest[:, None])
        chosen = tl.min(tl.where(like, j[None, :], 2147483647), axis=1)
        here_receiver = tl.sum(tl.where(j[None, :] == chosen[:, None], slot[None, :], 0), axis=1)
        # columns come in ascending order, so of equal ones the earlier block has the smaller j
        better = (here_best > best) | ((here_best == best) & (here_highest > highest))
        receiver = tl.where(better, here_receiver, receiver)
        highest = tl.where(better, here_highest, highest)
        best = tl.where(better, here_best, best)
    receiver = tl.where(best > -1.5, receiver, 0)  # none only if there is NaN: then the first
    tl.store(target + b * P + p, receiver.to(tl.int64), mask=goes)


@triton.jit
def predict_kernel(x, branch, probe, predicted, M, c, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The probe's product with every unit vector, [B, M]. Grid: (B cdiv(M, ROWS),)."""
    blocks = tl.cdiv(M, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    x += b * (c + M) * C
    branch += b * (c + M) * C
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    here = i < M
    square = tl.zeros([ROWS], tl.float32)
    dots = tl.zeros([ROWS], tl.float32)
    for k0 in range(0, C, CHANNELS):
        k = k0 + tl.arange(0, CHANNELS)
        own = sum_rows(x, branch, c + i[:, None], k[None, :], C, here[:, None] & (k[None, :] < C))
        square += tl.sum(own * own, axis=1)
        dots += tl.sum(own * tl.load(probe + k, mask=k < C, other=0.0)[None, :], axis=1)
    tl.store(predicted + b * M + i, dots / at_least(tl.sqrt(square), 1e-12), mask=here)


@triton.jit
def importance_kernel(
    predicted, size, protected, importance, weight, M, weight_floor, weight_power,
    HAS_PROTECTED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Importance, and the weight of the averages, from the probe's output. Grid: (B,)."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, ALL)
    here = m < M
    value = tl.load(predicted + b * M + m, mask=here, other=0.0)
    sizes = tl.load(size + b * M + m, mask=here, other=0.0)
    mean = tl.sum(value) / M
    values = tl.where(here, tl.exp(0.5 * (value - mean)) * tl.sqrt(sizes), 0.0)
    tl.store(importance + b * M + m, values, mask=here)
    counted = here
    if HAS_PROTECTED:
        counted = counted & (tl.load(protected + b * M + m, mask=here, other=1.0) <= 0)
    average = tl.sum(tl.where(counted, values, 0.0)) / tl.sum(counted.to(tl.float32))
    weights = sizes * tl.exp(weight_power * tl.log(values / average + weight_floor))
    tl.store(weight + b * M + m, weights, mask=here)


@triton_op("gtp_vit_gpu::merge_by_cost", mutates_args={})
def merge_by_cost(
    x: Tensor,
    branch: Tensor,
    importance: Tensor,
    size: Tensor | None,
    weight: Tensor | None,
    protected: Tensor | None,
    removed: int,
    importance_floor: float,
    preserve_norm: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The `removed` image tokens that cost least go into their most similar more important ones that stay.

    Args:
        x: features [B, N, C].
        branch: the attention branch, to be added to them.
        importance: of the image tokens, which come last, [B, M] float32.
        size: how many patches each stands for, [B, M] float32; None = one each.
        weight: by what features are averaged, [B, M] float32; None = by size.
        protected: 1 for image tokens that neither leave nor receive, [B, M] float32.
        removed: how many leave, at least 1 and less than M.
        importance_floor: importance of a token without attention, in units of the mean one.
        preserve_norm: bring merged tokens to the largest of the norms involved.
        norm_weight, norm_bias, epsilon: the LayerNorm that follows; without a weight there is none.
        exact: products in the precision of float32 also for half precision.

    Returns:
        Features [B, N - P, C], the same after the LayerNorm, sizes [B, K], which stay [B, K] and go [B, P], and where
        to, as places among those that stay, [B, P].
    """
    (batch, tokens, channels), count = x.shape, importance.shape[1]
    prefix, left = tokens - count, count - removed
    x, branch, importance = x.contiguous(), branch.contiguous(), importance.contiguous()
    absent = importance  # a pointer that is not used: Inductor has none for None
    sizes = absent if size is None else size.contiguous()
    weights = absent if weight is None else weight.contiguous()
    stuck = absent if protected is None else protected.contiguous()
    gamma = x if norm_weight is None else norm_weight
    beta = x if norm_bias is None else norm_bias
    cost, length = torch.empty_like(importance), torch.empty_like(importance)
    new_size = importance.new_empty(batch, left)
    kept, gone, target = (x.new_empty(batch, many, dtype=torch.int64) for many in (left, removed, removed))
    x_out = x.new_empty(batch, tokens - removed, channels)
    normed = x.new_empty((0,) if norm_weight is None else x_out.shape)
    precision = {"HAS_PROTECTED": protected is not None, **precision_of(x, exact)}
    half = bool(precision["HALF"])
    wrap_triton(cost_kernel)[(batch * triton.cdiv(count, COST[half]["ROWS"]),)](
        x, branch, importance, sizes, stuck, cost, length, count, prefix, channels, importance_floor,
        HAS_SIZE=size is not None, **precision, **COST[half],
    )  # fmt: skip
    if count <= ONE_PROGRAM:
        wrap_triton(select_kernel)[(batch,)](
            x, branch, importance, stuck, cost, length, kept, gone, target, count, prefix, channels, left, removed,
            ALL=power_of_two(count), **precision, **SELECT[half],
        )  # fmt: skip
    else:
        slots = x.new_empty(batch, count, dtype=torch.int32)
        wrap_triton(split_kernel)[(batch,)](
            cost, kept, gone, slots, count, left, removed, ALL=power_of_two(count), SOME=4, num_warps=8
        )
        wrap_triton(receiver_kernel)[(batch * triton.cdiv(removed, RECEIVER[half]["GONE"]),)](
            x, branch, importance, stuck, length, gone, slots, target, count, prefix, channels, removed,
            **precision, **RECEIVER[half],
        )  # fmt: skip
    wrap_triton(merge_kernel)[(batch * (prefix + left),)](
        x, branch, weights, sizes, length, kept, gone, target, gamma, beta, x_out, normed, new_size,
        count, prefix, channels, left, removed, epsilon,
        HAS_SIZE=size is not None, HAS_WEIGHT=weight is not None, KEEP_NORM=preserve_norm,
        CHANNELS=power_of_two(channels), GONE=min(256, power_of_two(removed)), num_warps=warps_for(channels),
        **norm_flags(norm_weight, norm_bias),
    )  # fmt: skip
    return x_out, normed, new_size, kept, gone, target


@triton_op("gtp_vit_gpu::importance_by_probe", mutates_args={})
def importance_by_probe(
    x: Tensor,
    branch: Tensor,
    probe: Tensor,
    size: Tensor,
    protected: Tensor | None,
    weight_floor: float,
    weight_power: float,
) -> tuple[Tensor, Tensor]:
    """A probe's [C] prediction of each image token's importance, and the weight of its features, both [B, M]."""
    (batch, tokens, channels), count = x.shape, size.shape[1]
    x, branch, size = x.contiguous(), branch.contiguous(), size.contiguous()
    stuck = size if protected is None else protected.contiguous()
    predicted, importance, weight = torch.empty_like(size), torch.empty_like(size), torch.empty_like(size)
    wrap_triton(predict_kernel)[(batch * triton.cdiv(count, 32),)](
        x, branch, probe.contiguous(), predicted, count, tokens - count, channels, ROWS=32, CHANNELS=64, num_warps=4
    )
    wrap_triton(importance_kernel)[(batch,)](
        predicted, size, stuck, importance, weight, count, weight_floor, weight_power,
        HAS_PROTECTED=protected is not None, ALL=power_of_two(count), num_warps=4 if count <= 1024 else 8,
    )  # fmt: skip
    return importance, weight
