"""GTP's reduction in two launches: selection, then residual, propagation and LayerNorm of one row a program.

Shapes: B batch, N = c + M tokens, c prefix tokens, M image tokens, K kept, P removed, M0 patches, W list entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .parts import norm_flags, power_of_two, split_kernel, store_row, sum_rows, warps_for


@triton.jit
def propagate_kernel(
    x, branch, size, position, neighbours, root, kept, gone, norm_weight, norm_bias,
    x_out, normed_out, size_out, cell_out,
    M, c, C, K, P, M0, W, graph_step, alpha, epsilon,
    HAS_SIZE: tl.constexpr, WITH_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    LISTS: tl.constexpr, CHANNELS: tl.constexpr, GONE: tl.constexpr,
):  # fmt: skip
    """A row of the result, its size and its cell. Grid: (B (c + K),). graph_step: 1 = each image has its own graph."""
    rows = c + K
    b = (tl.program_id(0) // rows).to(tl.int64)
    r = tl.program_id(0) % rows
    x += b * (c + M) * C
    branch += b * (c + M) * C
    graph = b * graph_step * M0
    k = tl.arange(0, CHANNELS)
    mask = k < C
    slot = r - c
    is_image = slot >= 0
    own_token = tl.load(kept + b * K + slot, mask=is_image, other=0)
    row = tl.where(is_image, c + own_token, r)
    result = sum_rows(x, branch, row, k, C, mask)
    if WITH_SIZE:
        together = tl.load(size + b * (c + M) + row) if HAS_SIZE else 1.0
    if is_image:
        cell = tl.load(position + b * M + own_token)
        tl.store(cell_out + b * K + slot, cell)
        cell = tl.minimum(tl.maximum(cell, 0), M0 - 1)  # reads nothing outside of the lists, whatever it is given
        factor = tl.load(root + graph + cell)
        w = tl.arange(0, LISTS)
        entry = tl.load(neighbours + (graph + cell) * W + w, mask=w < W, other=-1)
        for p0 in range(0, P, GONE):
            p = p0 + tl.arange(0, GONE)
            token = tl.load(gone + b * P + p, mask=p < P, other=0)
            from_cell = tl.load(position + b * M + token, mask=p < P, other=-2)
            near = tl.max((entry[:, None] == from_cell[None, :]).to(tl.int32), axis=0) > 0
            near = near & (from_cell >= 0) & (from_cell < M0)
            weight = tl.load(root + graph + from_cell, mask=near, other=0.0) * factor
            count = tl.sum(near.to(tl.int32))
            done = -1
            for _ in range(count):  # in ascending order of p: few, and the same sum in every run
                done = tl.min(tl.where(near & (p > done), p, 2147483647))
                which = p == done
                other = tl.sum(tl.where(which, token, 0))
                share = tl.sum(tl.where(which, weight, 0.0)) * alpha
                result += sum_rows(x, branch, c + other, k, C, mask) * share
                if WITH_SIZE:
                    together += (tl.load(size + b * (c + M) + c + other) if HAS_SIZE else 1.0) * share
    if WITH_SIZE:
        tl.store(size_out + b * rows + r, together)
    at = (b * rows + r) * C
    store_row(result, x_out, normed_out, norm_weight, norm_bias, at, k, mask, C, epsilon, HAS_NORM, HAS_BIAS)


@triton_op("gtp_vit_gpu::propagate", mutates_args={})
def propagate(
    x: Tensor,
    branch: Tensor,
    scores: Tensor,
    position: Tensor,
    size: Tensor | None,
    neighbours: Tensor,
    root: Tensor,
    removed: int,
    alpha: float,
    with_size: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The image tokens with the largest scores stay, and receive of the others that are in their list of neighbours.

    Args:
        x: features [B, N, C].
        branch: the attention branch, to be added to them.
        scores: importance of the image tokens, which come last, [B, M] float32.
        position: their grid cells, [B, M] int64.
        size: sizes of all tokens, [B, N] float32; None = one each.
        neighbours: the graph's lists, [B or 1, M0, W] int64; M0 fills short ones.
        root: the factors of its edges, [B or 1, M0] float32.
        removed: how many image tokens leave, at least 1 and less than M.
        alpha: how strongly they are propagated.
        with_size: return sizes as well.
        norm_weight, norm_bias, epsilon: the LayerNorm that follows; without a weight there is none.

    Returns:
        Features [B, N - P, C], the same after the LayerNorm, sizes [B, N - P], grid cells [B, K].
    """
    (batch, tokens, channels), count = x.shape, position.shape[1]
    prefix, left = tokens - count, count - removed
    _, patches, width = neighbours.shape
    x, branch, scores, position = x.contiguous(), branch.contiguous(), scores.contiguous(), position.contiguous()
    neighbours, root = neighbours.contiguous(), root.contiguous()
    sizes = scores if size is None else size.contiguous()
    kept, gone = (x.new_empty(batch, many, dtype=torch.int64) for many in (left, removed))
    slots = x.new_empty(batch, count, dtype=torch.int32)
    x_out = x.new_empty(batch, tokens - removed, channels)
    normed = x.new_empty((0,) if norm_weight is None else x_out.shape)
    new_size = x.new_empty((batch, tokens - removed) if with_size else (0,), dtype=torch.float32)
    cell = torch.empty_like(kept)
    every = power_of_two(count)
    wrap_triton(split_kernel)[(batch,)](
        scores, kept, gone, slots, count, left, removed, ALL=every, SOME=16 if every <= 1024 else 4, num_warps=8
    )
    wrap_triton(propagate_kernel)[(batch * (prefix + left),)](
        x, branch, sizes, position, neighbours, root, kept, gone, x if norm_weight is None else norm_weight,
        x if norm_bias is None else norm_bias, x_out, normed, new_size, cell,
        count, prefix, channels, left, removed, patches, width, int(neighbours.shape[0] > 1), alpha, epsilon,
        HAS_SIZE=size is not None, WITH_SIZE=with_size, LISTS=power_of_two(width), CHANNELS=power_of_two(channels),
        GONE=min(32, power_of_two(removed)), num_warps=warps_for(channels), **norm_flags(norm_weight, norm_bias),
    )  # fmt: skip
    return x_out, normed, new_size, cell
