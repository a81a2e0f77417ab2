"""The operators in pure torch: what runs in training, on other devices, in exported programs, and without a compiler.

Each has the signature of its native kernel, and tests compare the two.

Shapes: B batch, H heads, N tokens, D head dimension, C channels, M image tokens, M0 patches, W list entries.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.paper import graph
from gtp_vit.paper.propagation import summarise
from gtp_vit.paper.sparsity import zero_below
from gtp_vit.tensors import at_least_float32, full_precision, split


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    scale: float,
    removed: int,
    queries: int,
    asked: list[bool],
    heads: int,
    first: int,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + log size) v of the first `queries` tokens, and statistics of the map.

    Args:
        q: [B, H, Q, D]; all N queries where the map is sparsified or statistics are asked for.
        k: [B, H, N, D].
        v: [B, H, N, D].
        size: how many patches each key stands for, [B, N]; None = one each.
        scale: factor of the logits.
        removed: entries below the n-th smallest of each head's map become 0; 0 removes none.
        queries: how many queries get an output.
        asked: which statistics to return: diagonal, column sums, class row.
        heads: 0 returns them for each head; 1 their largest, 2 their mean over the heads.
        first: they leave out the tokens before this one.

    Returns:
        The output [B, queries, H D], and the statistics asked for, [S, B, H, N - first] or [S, B, N - first].
    """
    diagonal, column_sums, class_row = asked
    if removed == 0 and not diagonal and not column_sums:
        out = fused(q[:, :, :queries], k, v, scale, size)
        row = softmax(q[:, :, :1], k, scale, size) if class_row else q.new_empty(*q.shape[:2], 1, k.shape[2])
        return out, statistics(row, asked, heads, first)
    probs = softmax(q, k, scale, size)
    probs = zero_below(probs.flatten(2), removed).view_as(probs)
    return weigh(probs[:, :, :queries], v), statistics(probs, asked, heads, first)


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float, size: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Torch's own attention, [B, Q, H D]. On a CPU in float32 at least, as the native kernel computes it."""
    dtype = v.dtype
    with full_precision(q) if q.is_cpu else nullcontext():
        if q.is_cpu:
            q, k, v = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=added(size, bias, q.dtype), scale=scale)
    return out.to(dtype).transpose(1, 2).flatten(2)


def weigh(probs: Tensor, v: Tensor) -> Tensor:
    """The output of attention, [B, Q, H D], in the values' dtype; summed up in the map's precision."""
    with full_precision(v):
        out = (probs @ v.to(probs.dtype)).to(v.dtype)
    return out.transpose(1, 2).flatten(2)


def statistics(probs: Tensor, asked: list[bool], heads: int, first: int) -> Tensor:
    """Diagonal, column sums and first row of an attention map, those asked for, in float32."""
    found = []
    if asked[0]:
        found.append(probs.diagonal(dim1=-2, dim2=-1).float())
    if asked[1]:
        found.append(probs.sum(dim=-2, dtype=torch.float32))
    if asked[2]:
        found.append(probs[:, :, 0].float())
    if heads:
        found = [each.amax(dim=1) if heads == 1 else each.mean(dim=1) for each in found]
    if found:
        return torch.stack(found)[..., first:]
    batch, num_heads, _, tokens = probs.shape
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    return probs.new_empty(0, *shape, dtype=torch.float32)


def added(size: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the logits, [B or 1, H or 1, Q or 1, N]: log sizes of the keys, and the model's own bias."""
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
    more = added(size, bias, q.dtype)
    found = (q * scale) @ k.transpose(-2, -1)
    return found if more is None else found + more


def reduce(
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
        Features, features after the LayerNorm, sizes and grid cells of the tokens that stay; empty if not asked for.
    """
    dtype = x.dtype
    x = at_least_float32(x) + at_least_float32(branch)
    prefix = x.shape[1] - position.shape[1]
    kept, gone = split(scores, removed)
    kept_cells, gone_cells = position.gather(1, kept), position.gather(1, gone)
    weights = graph.receive(neighbours, root, kept_cells, gone_cells)
    if with_size:
        size = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device) if size is None else size
        new_size = summarise(size.unsqueeze(-1), prefix, kept, gone, weights, alpha).squeeze(-1)
    else:
        new_size = x.new_empty(0, dtype=torch.float32)
    x = summarise(x, prefix, kept, gone, weights, alpha).to(dtype)  # rounded once
    normed = x.new_empty(0)
    if norm_weight is not None:
        normed = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, epsilon)
    return x, normed, new_size, kept_cells


def neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> tuple[Tensor, Tensor]:
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
