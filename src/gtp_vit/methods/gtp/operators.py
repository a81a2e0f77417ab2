"""GTP's two operators: the reduction of a layer, and the lists of neighbours; in torch, and as native kernels.

Shapes: B batch, N tokens, C channels, M image tokens, M0 patches, W list entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gtp_vit.kernels import NormParams, Operator, Ops, checks, native, value_checks
from gtp_vit.methods.gtp import graph
from gtp_vit.tensors import at_least_float32, split

Shape = tuple[int, ...]


class Reduced(NamedTuple):
    """The tokens that stay."""

    x: Tensor  # features [B, N - P, C]
    normed: Tensor  # the same after the LayerNorm that follows; empty if not asked for
    size: Tensor  # of all of them, [B, N - P]; empty if not asked for
    cell: Tensor  # grid cells of the image tokens, [B, M - P]


def reduce_in_torch(
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
    """Residual, selection, propagation, compaction, and the LayerNorm that follows.

    Args:
        x: features [B, N, C].
        branch: the attention branch, to be added to them.
        scores: importance of the image tokens, [B, M].
        position: their grid cells, [B, M].
        size: sizes of all tokens, [B, N]; None = one each.
        neighbours: the graph's lists, [B or 1, M0, W].
        root: the factors of its edges, [B or 1, M0].
        removed: how many image tokens leave.
        alpha: how strongly they are propagated.
        with_size: return sizes as well.
        norm_weight: of the LayerNorm, [C]; None = no LayerNorm.
        norm_bias: of the LayerNorm.
        epsilon: of the LayerNorm.

    Returns:
        The fields of a `Reduced`.
    """
    dtype = x.dtype
    x = at_least_float32(x) + at_least_float32(branch)
    prefix = x.shape[1] - position.shape[1]
    kept, gone = split(scores, removed)
    kept_cells, gone_cells = position.gather(1, kept), position.gather(1, gone)
    weights = graph.receive(neighbours, root, kept_cells, gone_cells)
    if with_size:
        size = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device) if size is None else size
        new_size = graph.summarise(size.unsqueeze(-1), prefix, kept, gone, weights, alpha).squeeze(-1)
    else:
        new_size = x.new_empty(0, dtype=torch.float32)
    x = graph.summarise(x, prefix, kept, gone, weights, alpha).to(dtype)  # rounded once
    return x, NormParams(norm_weight, norm_bias, epsilon).apply(x), new_size, kept_cells


def neighbours_in_torch(
    similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int
) -> tuple[Tensor, Tensor]:
    """The mixed or semantic graph of each image: its lists of neighbours, and the factors of its edges.

    Args:
        similarity: of all pairs of patches, [B, M0, M0].
        rows: of the patch grid.
        columns: of the patch grid.
        spatial: 0, 4 or 8 spatial neighbours.
        semantic: how many semantic neighbours, at least one.
    """
    found = graph.semantic(similarity, semantic)
    if spatial:
        found = graph.mixed(graph.spatial((rows, columns), spatial, similarity.device), found)
    return found, graph.normalise(graph.degrees(found))


def _reduce_flops(x: Shape, removed: int, with_size: bool) -> int:
    """Operations of the dense product in torch; the kernel does only what the sparse graph needs."""
    return 2 * x[0] * (x[1] - removed) * removed * (x[2] + int(with_size))


reduce: Operator[tuple[Tensor, Tensor, Tensor, Tensor]] = Operator(
    "reduce",
    reduce_in_torch,
    {Ops.NATIVE: native.reduce},
    check=checks.check_reduce,
    fits=checks.fits_reduce,
    fake=native.reduce_results,
    flops=_reduce_flops,
    whole=("scores", "position", "neighbours"),  # scores may be ranks; the others are cells
    check_values=value_checks.reduce,
)
neighbours: Operator[tuple[Tensor, Tensor]] = Operator(
    "neighbours",
    neighbours_in_torch,
    {Ops.NATIVE: native.neighbours},
    check=checks.check_neighbours,
    fits=checks.fits_neighbours,
    fake=native.neighbours_results,
    check_values=value_checks.neighbours,
)
