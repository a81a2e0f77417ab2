"""torchprofile's convention, by which the paper counts MACs: norms and scales count as well.

It takes one MAC for each element that is multiplied by a learned weight, and one for each element of the queries, which
the released code scales before their product with the keys. GTP's own work is counted as the released code does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gtp_vit.core.costs import Convention
from gtp_vit.core.reducer import Reducer
from gtp_vit.core.vit import BlockCosts, ForwardPass, ViTInfo
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.gtp.selection import SELECTORS


def _norm(x: Tensor, *arguments: object) -> int:
    """MACs of a norm that has weights."""
    return x.numel() if any(isinstance(argument, Tensor) for argument in arguments[:2]) else 0


def _scale(x: object, by: object) -> int:
    """MACs of a product with one weight a channel, as in LayerScale."""
    if not (isinstance(x, Tensor) and isinstance(by, Tensor)):
        return 0
    return x.numel() if by.ndim == 1 and x.ndim > 1 and by.shape[0] == x.shape[-1] else 0


# operator -> MACs from its arguments
OPERATORS: dict[object, Callable[..., int]] = {
    torch.ops.aten.native_layer_norm: _norm,
    torch.ops.aten.native_batch_norm: _norm,
    torch.ops.aten._native_batch_norm_legit: _norm,
    torch.ops.aten._native_batch_norm_legit_no_training: _norm,
    torch.ops.aten._batch_norm_no_update: _norm,
    torch.ops.aten._batch_norm_with_update: _norm,
    torch.ops.aten.mul: _scale,
    torch.ops.aten.mul_: _scale,
}


def overhead_macs(reducer: Reducer, forward_pass: ForwardPass) -> int:
    """MACs of a method's own work; of GTP as the tool sees the released code."""
    return (
        released_gtp_macs(reducer.method, reducer.vit, forward_pass)
        if isinstance(reducer.method, GTP)
        else reducer.overhead_macs(forward_pass)
    )


def released_gtp_macs(settings: GTP, vit: ViTInfo, forward_pass: ForwardPass) -> int:
    """The MACs that the tool counts in the released code of GTP."""
    steps, graph, total = forward_pass.steps, settings.graph, 0
    count = steps[0].keys
    if count == steps[-1].out:
        return 0
    if graph != "none":
        total += count**2 * vit.dim if graph in ("mixed", "semantic") else 0
        total += 2 * count**3  # the degree matrices are multiplied as dense ones
    for layer, step in enumerate(forward_pass.reducing):
        total += _selection(settings.select, settings.heads, step.keys, vit.prefix)
        if graph != "none":
            # The sizes of the last layer are unused, so the tool does not see them.
            sizes = settings.proportional_attention and layer < len(steps) - 1
            # alpha is multiplied in a step of its own
            total += step.out * (step.keys - step.out + 1) * (vit.dim + int(sizes))
    return total


def _selection(select: str, heads: str, count: int, prefix: int) -> int:
    """Products, means and the similarity matrix of the selection."""
    if select == "cosine_attention":
        return count * (count + prefix) * (count + int(heads == "mean"))
    products = count if select == "mixed" else 0
    return products + (len(SELECTORS[select].required_stats) * count if heads == "mean" else 0)


def with_scaled_queries(block: BlockCosts) -> BlockCosts:
    """The costs of a block that scales its queries in a step of its own."""
    scaling = block.pairs // 2
    return block._replace(queries=block.queries + scaling, map_only=block.map_only + scaling)


TORCHPROFILE = Convention("torchprofile", OPERATORS, with_scaled_queries, overhead_macs)
