"""Statistics of an attention map that is never written: its diagonal, column sums and first row, from the logsumexp.

With l_ij = scale q_i k_j + log s_j and L_i the logsumexp of a row: class row exp(l_0j - L_0), diagonal exp(l_ii - L_i),
column sums sum_i exp(l_ij - L_i). Two launches for any number of tokens; the class row alone takes one up to 256.

Shapes: B batch, H heads, N tokens, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .parts import INTERPRETED, power_of_two

ONE_PROGRAM = 256  # tokens up to which one program has the whole class row
# Sizes with which no kernel spills registers, for q and k in half precision or not; tests compile them for GPUs.
LOGSUMEXP = {"ROWS": 32, "COLUMNS": 64, "DEPTH": 32, "num_warps": 4}
STATISTICS = {
    True: {"ROWS": 32, "COLUMNS": 32, "DEPTH": 32, "num_warps": 4},
    False: {"ROWS": 32, "COLUMNS": 32, "DEPTH": 16, "num_warps": 4},
}


@triton.jit
def class_row_kernel(
    q, k, size, out, H, N, first, scale, qb, qh, kb, kh, kn, D,
    HAS_SIZE: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The first token's row, aggregated over the heads (1 largest, 2 mean), [B, N - first]. Grid: (B,)."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, ALL)
    here = n < N
    total = tl.zeros([ALL], tl.float32)
    log_size = tl.log(tl.load(size + b * N + n, mask=here, other=1.0)) if HAS_SIZE else tl.zeros([ALL], tl.float32)
    for h in range(H):
        logit = log_size
        for d0 in range(0, D, DEPTH):
            d = d0 + tl.arange(0, DEPTH)
            row = tl.load(q + b * qb + h * qh + d, mask=d < D, other=0.0).to(tl.float32) * scale
            mask = here[:, None] & (d < D)[None, :]
            keys = tl.load(k + b * kb + h * kh + n[:, None] * kn + d[None, :], mask=mask, other=0.0)
            logit += tl.sum(keys.to(tl.float32) * row[None, :], axis=1)
        logit = tl.where(here, logit, float("-inf"))
        power = tl.exp(logit - tl.max(logit))
        row = power / tl.sum(power)
        if HEADS == 1:
            total = tl.where(row > total, row, tl.where(row == row, total, row))  # NaN stays NaN
        else:
            total += row / H
    tl.store(out + b * (N - first) + n - first, total, mask=here & (n >= first))


@triton.jit
def _tile(q, k, i, j, Q, N, D, qn, kn, scale, PRECISION: tl.constexpr, WIDEN: tl.constexpr, DEPTH: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """scale q_i k_j."""
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for d0 in range(0, D, DEPTH):
        d = d0 + tl.arange(0, DEPTH)
        rows = tl.load(q + i[:, None] * qn + d[None, :], mask=(i < Q)[:, None] & (d < D)[None, :], other=0.0)
        keys = tl.load(k + j[:, None] * kn + d[None, :], mask=(j < N)[:, None] & (d < D)[None, :], other=0.0)
        if WIDEN:
            rows, keys = rows.to(tl.float32), keys.to(tl.float32)
        scores += tl.dot(rows, tl.trans(keys), input_precision=PRECISION)
    return scores * scale


@triton.jit
def logsumexp_kernel(
    q, k, size, lse, H, Q, N, scale, qb, qh, qn, kb, kh, kn, D,
    HAS_SIZE: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The logsumexp of each row of logits, [B, H, Q]. Grid: (B H cdiv(Q, ROWS),)."""
    blocks = tl.cdiv(Q, ROWS)
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j0 in range(0, N, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        there = j < N
        logit = _tile(q + b * qb + h * qh, k + b * kb + h * kh, i, j, Q, N, D, qn, kn, scale,
                      PRECISION, WIDEN, DEPTH, ROWS, COLUMNS)  # fmt: skip
        if HAS_SIZE:
            logit += tl.log(tl.load(size + b * N + j, mask=there, other=1.0))[None, :]
        logit = tl.where(there[None, :], logit, float("-inf"))
        now = tl.maximum(largest, tl.max(logit, axis=1))
        shift = tl.where(now == float("-inf"), 0.0, now)  # nothing yet but keys of size 0
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(logit - shift[:, None]), axis=1)
        largest = now
    tl.store(lse + (b * H + h) * Q + i, largest + tl.log(total), mask=i < Q)


@triton.jit
def statistics_kernel(
    q, k, size, lse, diagonal, sums, row, H, Q, N, first, scale, qb, qh, qn, kb, kh, kn, D,
    HAS_SIZE: tl.constexpr, DIAGONAL: tl.constexpr, SUMS: tl.constexpr, ROW: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The statistics asked for, of each head (HEADS 0), their largest (1) or their mean (2).

    Grid: (B cdiv(N, COLUMNS),), of each head (B H cdiv(N, COLUMNS),).
    """
    blocks = tl.cdiv(N, COLUMNS)
    part = tl.program_id(0) // blocks
    j = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    there = j < N
    if HEADS == 0:
        b = (part // H).to(tl.int64)
        begin = part % H
        end = begin + 1
    else:
        b = part.to(tl.int64)
        begin = 0
        end = H
    log_size = tl.log(tl.load(size + b * N + j, mask=there, other=1.0)) if HAS_SIZE else tl.zeros([COLUMNS], tl.float32)
    of_diagonal = tl.zeros([COLUMNS], tl.float32)
    of_sums = tl.zeros([COLUMNS], tl.float32)
    of_row = tl.zeros([COLUMNS], tl.float32)
    for h in range(begin, end):
        queries = q + b * qb + h * qh
        keys = k + b * kb + h * kh
        whole = lse + (b * H + h) * Q
        if DIAGONAL:
            logit = log_size
            for d0 in range(0, D, DEPTH):
                d = d0 + tl.arange(0, DEPTH)
                mask = there[:, None] & (d < D)[None, :]
                own = tl.load(queries + j[:, None] * qn + d[None, :], mask=mask, other=0.0).to(tl.float32) * scale
                logit += tl.sum(own * tl.load(keys + j[:, None] * kn + d[None, :], mask=mask, other=0.0), axis=1)
            probability = tl.exp(logit - tl.load(whole + j, mask=there, other=0.0))
            if HEADS == 1:
                of_diagonal = tl.where(
                    probability > of_diagonal,
                    probability,
                    tl.where(probability == probability, of_diagonal, probability),
                )
            else:
                of_diagonal += probability
        if ROW:
            logit = log_size
            for d0 in range(0, D, DEPTH):
                d = d0 + tl.arange(0, DEPTH)
                mask = there[:, None] & (d < D)[None, :]
                own = tl.load(queries + d, mask=d < D, other=0.0).to(tl.float32) * scale
                other = tl.load(keys + j[:, None] * kn + d[None, :], mask=mask, other=0.0).to(tl.float32)
                logit += tl.sum(own[None, :] * other, axis=1)
            probability = tl.exp(logit - tl.load(whole))
            if HEADS == 1:
                of_row = tl.where(
                    probability > of_row, probability, tl.where(probability == probability, of_row, probability)
                )
            else:
                of_row += probability
        if SUMS:
            probability = tl.zeros([COLUMNS], tl.float32)
            for i0 in range(0, Q, ROWS):
                i = i0 + tl.arange(0, ROWS)
                tile = _tile(queries, keys, i, j, Q, N, D, qn, kn, scale, PRECISION, WIDEN, DEPTH, ROWS, COLUMNS)
                tile += log_size[None, :] - tl.load(whole + i, mask=i < Q, other=0.0)[:, None]
                probability += tl.sum(tl.where((i < Q)[:, None], tl.exp(tile), 0.0), axis=0)
            if HEADS == 1:
                of_sums = tl.where(
                    probability > of_sums, probability, tl.where(probability == probability, of_sums, probability)
                )
            else:
                of_sums += probability
    at = part.to(tl.int64) * (N - first) + j - first
    mask = there & (j >= first)
    count = (end - begin) if HEADS == 2 else 1
    if DIAGONAL:
        tl.store(diagonal + at, of_diagonal / count, mask=mask)
    if SUMS:
        tl.store(sums + at, of_sums / count, mask=mask)
    if ROW:
        tl.store(row + at, of_row / count, mask=mask)


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton_op("gtp_vit_gpu::attention_statistics", mutates_args={})
def attention_statistics(
    q: Tensor,
    k: Tensor,
    size: Tensor | None,
    scale: float,
    diagonal: bool,
    column_sums: bool,
    class_row: bool,
    heads: int,
    first: int,
) -> Tensor:
    """Statistics of softmax(q k^T * scale + log size), those asked for in this order, in float32.

    Args:
        q: [B, H, Q, D]; all N queries for the diagonal or column sums.
        k: [B, H, N, D].
        size: how many patches each key stands for, [B, N] float32; None = one each.
        scale: factor of the logits.
        diagonal, column_sums, class_row: which ones; at least one.
        heads: 0 of each head, [S, B, H, N - first]; 1 their largest, 2 their mean, [S, B, N - first].
        first: they leave out the tokens before this one.
    """
    q, k = _contiguous_rows(q), _contiguous_rows(k)
    batch, num_heads, tokens, depth = k.shape
    sizes = q if size is None else size.contiguous()
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    out = q.new_empty(diagonal + column_sums + class_row, *shape, dtype=torch.float32)
    if not diagonal and not column_sums and heads and tokens <= ONE_PROGRAM:
        wrap_triton(class_row_kernel)[(batch,)](
            q, k, sizes, out, num_heads, tokens, first, scale, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), k.stride(2), depth,
            HAS_SIZE=size is not None, HEADS=heads, ALL=power_of_two(tokens), DEPTH=16, num_warps=8,
        )  # fmt: skip
        return out
    queries = q.shape[2] if diagonal or column_sums else 1
    lse = q.new_empty(batch, num_heads, queries, dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3])
    # WIDEN: the interpreter multiplies the bits of bfloat16
    common = {"HAS_SIZE": size is not None, "PRECISION": "tf32x3", "WIDEN": INTERPRETED}
    half = q.dtype != torch.float32
    wrap_triton(logsumexp_kernel)[(batch * num_heads * triton.cdiv(queries, LOGSUMEXP["ROWS"]),)](
        q, k, sizes, lse, num_heads, queries, tokens, scale, *strides, depth, **common, **LOGSUMEXP
    )
    parts = [out, out, out]
    place = 0
    for number, is_needed in enumerate((diagonal, column_sums, class_row)):
        if is_needed:
            parts[number] = out[place]
            place += 1
    blocks = triton.cdiv(tokens, STATISTICS[half]["COLUMNS"])
    wrap_triton(statistics_kernel)[(batch * blocks * (1 if heads else num_heads),)](
        q, k, sizes, lse, *parts, num_heads, queries, tokens, first, scale, *strides, depth,
        DIAGONAL=diagonal, SUMS=column_sums, ROW=class_row, HEADS=heads, **common, **STATISTICS[half],
    )  # fmt: skip
    return out
