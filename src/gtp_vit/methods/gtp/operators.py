"""GTP's two operators: the reduction of a layer, and the lists of neighbours; in torch, and as native kernels."""

from __future__ import annotations

import torch

from gtp_vit.kernels import Checks, Operator, Ops, checks, native, triton_set, value_checks
from gtp_vit.kernels.arguments import GTPReduceInputs, GTPReduceResult, Neighbours, NeighboursInputs
from gtp_vit.methods.gtp import graph
from gtp_vit.tensors import at_least_float32, split_by_score


def gtp_reduce_reference(inputs: GTPReduceInputs) -> GTPReduceResult:
    """Residual, selection, propagation, compaction, and the LayerNorm that follows."""
    size, position, alpha = inputs.size, inputs.position, inputs.alpha
    dtype = inputs.x.dtype
    x = at_least_float32(inputs.x) + at_least_float32(inputs.branch)
    prefix = x.shape[1] - position.shape[1]
    keep, drop = split_by_score(inputs.scores, inputs.removed)
    keep_cells, drop_cells = position.gather(1, keep), position.gather(1, drop)
    weights = graph.receive(inputs.neighbours, inputs.root, keep_cells, drop_cells)
    if inputs.with_size:
        size = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device) if size is None else size
        new_size = graph.summarise(size.unsqueeze(-1), prefix, keep, drop, weights, alpha).squeeze(-1)
    else:
        new_size = x.new_empty(0, dtype=torch.float32)
    x = graph.summarise(x, prefix, keep, drop, weights, alpha).to(dtype)  # rounded once
    return GTPReduceResult(x, inputs.norm.apply(x), new_size, keep_cells)


def neighbours_reference(inputs: NeighboursInputs) -> Neighbours:
    """The mixed or semantic graph of each image: its lists of neighbours, and the factors of its edges."""
    similarity, rows, columns, spatial, semantic = inputs
    neighbours = graph.semantic(similarity, semantic)
    if spatial:
        neighbours = graph.mixed(graph.spatial((rows, columns), spatial, similarity.device), neighbours)
    return Neighbours(neighbours, graph.normalise(graph.degrees(neighbours)))


def _reduce_flops(inputs: GTPReduceInputs) -> int:
    """Operations of the dense product in torch; the kernel does only what the sparse graph needs."""
    batch, tokens, channels = inputs.x.shape
    return 2 * batch * (tokens - inputs.removed) * inputs.removed * (channels + int(inputs.with_size))


gtp_reduce = Operator(
    "gtp_reduce",
    GTPReduceInputs,
    GTPReduceResult,
    {Ops.TORCH: gtp_reduce_reference, Ops.NATIVE: native.gtp_reduce, Ops.TRITON: triton_set.gtp_reduce},
    Checks(
        *(checks.check_gtp_reduce, checks.supports_gtp_reduce, value_checks.gtp_reduce),
        integer_args=("scores", "position", "neighbours"),  # scores may be ranks; the others are cells
        supports_triton=triton_set.takes_tokens,
    ),
    fake=native.gtp_reduce_results,
    flops=_reduce_flops,
)
neighbours = Operator(
    "neighbours",
    NeighboursInputs,
    Neighbours,
    {Ops.TORCH: neighbours_reference, Ops.NATIVE: native.neighbours},
    Checks(checks.check_neighbours, checks.supports_neighbours, value_checks.neighbours),
    fake=native.neighbours_results,
)
