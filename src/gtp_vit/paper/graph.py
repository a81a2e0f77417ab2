"""Section 3.2.2, sparse graph construction: along which edges a removed token hands on what it knows.

A graph is a matrix with the receiver as row and the giver as column. It is built once, after the embedding.

Shapes: B batch, M image tokens, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def spatial(grid: tuple[int, int], neighbours: int = 8, device: torch.device | None = None) -> Tensor:
    """Eq. (5): True where two patches touch; 8 neighbours count corners, 4 do not. -> bool [M, M]."""
    rows, columns = grid
    cell = torch.arange(rows * columns, device=device)
    row, column = cell // columns, cell % columns
    down = (row[:, None] - row[None, :]).abs()
    across = (column[:, None] - column[None, :]).abs()
    distance = torch.maximum(down, across) if neighbours == 8 else down + across
    return distance == 1


def cosine_similarity(x: Tensor) -> Tensor:
    """Eq. (6): x_i x_j^T / (|x_i| |x_j|) of all pairs, in float32. [B, M, C] -> [B, M, M]."""
    unit = F.normalize(x.float(), dim=-1)
    return unit @ unit.transpose(-2, -1)


def semantic(similarity: Tensor, neighbours: int) -> Tensor:
    """Eq. (7): True for the M = `neighbours` other tokens most similar to each token. -> bool [B, M, M].

    The threshold T_i comes from topk, linear in the row's length (appendix, "Implementation optimizations"). Of
    several tokens at the threshold those first in raster order are taken, so a row never has more than M edges.
    """
    count = similarity.shape[-1]
    itself = torch.eye(count, dtype=torch.bool, device=similarity.device)
    others = similarity.masked_fill(itself, -torch.inf)
    threshold = others.topk(neighbours, dim=-1).values[..., -1:]
    above = others > threshold
    level = others == threshold
    room = neighbours - above.sum(dim=-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))


def mixed(spatial_graph: Tensor, semantic_graph: Tensor) -> Tensor:
    """Eq. (8): the union of both graphs."""
    return spatial_graph | semantic_graph


def normalise(graph: Tensor) -> Tensor:
    """Eq. (9), from Eq. (2): D^-1/2 A D^-1/2, D the row sums, in float32; a token without edges keeps weight 0.

    D is diagonal, so scaling rows and columns replaces the two dense matrix products of the released code.
    """
    degree = graph.sum(dim=-1, dtype=torch.float32)
    root = torch.where(degree > 0, degree.rsqrt(), 0.0)
    return root.unsqueeze(-1) * graph * root.unsqueeze(-2)
