"""Section 4, how the paper counts MACs: torchprofile's convention, which counts norms and scales as well.

It takes one MAC for each element that is multiplied by a learned weight, and one for each element of the queries, which
the released code scales before their product with the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gtp_vit.paper.selection import SELECTORS

Block = TypeVar("Block", bound=Any)


def _norm(x: Tensor, *arguments: Any) -> int:
    """Section 4: MACs of a norm that has weights."""
    return x.numel() if any(isinstance(each, Tensor) for each in arguments[:2]) else 0


def _scale(x: Any, by: Any) -> int:
    """Section 4: MACs of a product with one weight a channel, as in LayerScale."""
    both = isinstance(x, Tensor) and isinstance(by, Tensor)
    return x.numel() if both and by.ndim == 1 and x.ndim > 1 and by.shape[0] == x.shape[-1] else 0


# operator -> MACs from its arguments
COUNTED = {
    torch.ops.aten.native_layer_norm: _norm,
    torch.ops.aten.native_batch_norm: _norm,
    torch.ops.aten._native_batch_norm_legit: _norm,
    torch.ops.aten._native_batch_norm_legit_no_training: _norm,
    torch.ops.aten._batch_norm_no_update: _norm,
    torch.ops.aten._batch_norm_with_update: _norm,
    torch.ops.aten.mul: _scale,
    torch.ops.aten.mul_: _scale,
}


def released_gtp(settings: Any, vit: Any, steps: Sequence[Any], layers: int) -> int:
    """Section 4: what the tool sees of the released code of GTP, with its settings and those of a ViT.

    `steps` are the tokens of each layer, of which the first `layers` reduce.
    """
    count, graph, total = steps[0].keys, settings.graph, 0
    if count == steps[-1].after:
        return 0
    if graph != "none":
        total += count**2 * vit.dim if graph in ("mixed", "semantic") else 0
        total += 2 * count**3  # the degree matrices are multiplied as dense ones
    for layer, step in enumerate(steps[:layers]):
        total += _selection(settings.select, settings.heads, step.keys, vit.prefix)
        if graph != "none":
            # The sizes of the last layer are unused, so the tool does not see them.
            sizes = settings.proportional_attention and layer < len(steps) - 1
            # alpha is multiplied in a step of its own
            total += step.after * (step.keys - step.after + 1) * (vit.dim + int(sizes))
    return total


def _selection(select: str, heads: str, count: int, prefix: int) -> int:
    """Section 4: products, means and the similarity matrix of the selection."""
    if select == "cosine_attention":
        return count * (count + prefix) * (count + int(heads == "mean"))
    products = count if select == "mixed" else 0
    return products + (len(SELECTORS[select].needs) * count if heads == "mean" else 0)


def with_scaled_queries(block: Block) -> Block:
    """Section 4: the costs of a block that scales its queries in a step of its own."""
    return block._replace(queries=block.queries + block.pairs // 2, looks=block.looks + block.pairs // 2)
