"""Sections 3.2.2 to 3.2.4: the graph along which removed tokens are propagated, token summarisation, and sparsification
of the attention map.

A graph is kept sparse, as the paper's appendix proposes: for every token the list of its neighbours. An edge i <- j, "i
receives from j", exists if j is in the list of i. Unused entries hold M, one past the last token. The
graph is built once, after the embedding, and never shrinks; later layers look their tokens up by grid cell.

Shapes: B batch, M image tokens, C channels, W entries of a list, K kept tokens, P propagated tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels.reference import zero_below
from gtp_vit.tensors import full_precision, is_exporting, weighted_merge


def spatial(grid: tuple[int, int], neighbours: int = 8, device: torch.device | None = None) -> Tensor:
    """Eq. (5): the patches that touch a patch; 8 neighbours count corners, 4 do not. -> [M, 8 or 4].

    Computed on the device: a list of offsets would be copied from the host, which waits for that.
    """
    rows, columns = grid
    cell, place = torch.arange(rows * columns, device=device), torch.arange(neighbours, device=device)
    # The places of a 3 x 3 window in raster order: 1, 3, 5, 7 share an edge with its middle, 4.
    place = place * 2 + 1 if neighbours == 4 else place + (place >= 4)
    row = cell.unsqueeze(1) // columns + place // 3 - 1
    column = cell.unsqueeze(1) % columns + place % 3 - 1
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return torch.where(inside, row * columns + column, rows * columns)


def cosine_similarity(x: Tensor) -> Tensor:
    """Eq. (6): x_i x_j^T / (|x_i| |x_j|) of all pairs, in float32. [B, M, C] -> [B, M, M]."""
    with full_precision(x):
        unit = F.normalize(x.float(), dim=-1)
        return unit @ unit.transpose(-2, -1)


def semantic(similarity: Tensor, neighbours: int) -> Tensor:
    """Eq. (7): the `neighbours` other tokens most similar to a token. [B, M, M] -> [B, M, neighbours].

    They are found by topk, linear in the row's length (appendix, "Implementation optimizations"). Of equally similar
    tokens the first in raster order are taken, so a list never has more than that many. NaN is similar to no token.
    """
    count = similarity.shape[-1]
    itself = torch.eye(count, dtype=torch.bool, device=similarity.device)
    others = torch.where(itself | similarity.isnan(), -torch.inf, similarity)
    nearest = topk_by_position(others, neighbours)
    return nearest.masked_fill(others.gather(-1, nearest) == -torch.inf, count)


def mixed(spatial_graph: Tensor, semantic_graph: Tensor) -> Tensor:
    """Eq. (8): the union of both graphs: a neighbour in both stands in the list once. -> [B, M, W]."""
    batch, count = semantic_graph.shape[:2]
    near = spatial_graph.expand(batch, -1, -1)
    twice = (semantic_graph.unsqueeze(-1) == near.unsqueeze(-2)).any(dim=-1)
    return torch.cat([near, semantic_graph.masked_fill(twice, count)], dim=-1)


def normalise(degree: Tensor) -> Tensor:
    """Eq. (9), from Eq. (2): the factors D^-1/2 of D^-1/2 A D^-1/2, in float32; 0 for a token without edges.

    The weight of an edge i <- j is the product of the two tokens' factors, so no matrix is multiplied.
    """
    return torch.where(degree > 0, degree.float().rsqrt(), 0.0)


def normalise_matrix(edges: Tensor) -> Tensor:
    """Eq. (9) for a graph that is kept as a matrix: D^-1/2 A D^-1/2. [B, M, M] -> float32 [B, M, M]."""
    root = normalise(edges.sum(dim=-1))
    return root.unsqueeze(-1) * edges * root.unsqueeze(-2)


def degrees(neighbours: Tensor) -> Tensor:
    """Section 3.2.2, D_ii of Eq. (9): how many neighbours a token has. [B, M, W] -> [B, M]."""
    return (neighbours < neighbours.shape[-2]).sum(dim=-1)


def adjacency(neighbours: Tensor) -> Tensor:
    """Section 3.2.2: the same graph as a dense matrix of True and False, receiver as row. [B, M, W] -> [B, M, M]."""
    batch, count = neighbours.shape[:2]
    empty = torch.zeros(batch, count, count + 1, dtype=torch.bool, device=neighbours.device)
    return empty.scatter(2, neighbours, True)[..., :count]


def receive(neighbours: Tensor, root: Tensor, keep: Tensor, propagated: Tensor) -> Tensor:
    """Section 3.2.3, A^p of Eq. (10): what each kept token takes from each propagated one. -> [B, K, P].

    Args:
        neighbours: lists of all tokens, [B or 1, M, W].
        root: their factors, [B or 1, M].
        keep: the tokens that stay, as grid cells, [B, K].
        propagated: the tokens that leave, [B, P].
    """
    batch, count, leaving = keep.shape[0], neighbours.shape[1], propagated.shape[1]
    slots = torch.arange(leaving, device=keep.device).expand(batch, -1)
    slot_of = torch.full((batch, count + 1), leaving, device=keep.device).scatter(1, propagated, slots)
    lists = neighbours.expand(batch, -1, -1).gather(1, keep.unsqueeze(2).expand(-1, -1, neighbours.shape[2]))
    slot = slot_of.gather(1, lists.flatten(1)).unflatten(1, (-1, neighbours.shape[2]))
    factors = root.expand(batch, -1)
    weight = factors.gather(1, keep).unsqueeze(2) * factors.gather(1, propagated).unsqueeze(1)
    nothing = torch.zeros(batch, keep.shape[1], leaving + 1, device=keep.device)
    return nothing.scatter(2, slot, 1.0)[..., :leaving] * weight


def summarise(values: Tensor, prefix: int, keep: Tensor, drop: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Eq. (10) and (12): X^s = X^k + alpha A^p X^p for a whole sequence, whose prefix tokens stay as they are.

    Args:
        values: features or sizes of all tokens, [B, c + M, D].
        prefix: number of tokens at the start that stay as they are.
        keep: image tokens that stay, [B, K].
        drop: image tokens that are propagated, [B, P].
        weights: A^p, what each kept token takes from each propagated one, [B, K, P].
        alpha: how strongly.
    """
    return weighted_merge(values, prefix, keep, drop, weights, alpha=alpha)


def topk_by_position(values: Tensor, k: int) -> Tensor:
    """Section 3.2.2, the threshold T_i: indices of the k largest of each row; of equal ones the first. -> [..., k].

    topk does not define which of several equal values it takes. So it gets integers that are all different: the bits of
    the value, in the order of the values, followed by the position.
    """
    if is_exporting():  # engines have no bit casts
        return values.float().topk(k, dim=-1).indices
    count = values.shape[-1]
    bits = (values.float() + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    position = torch.arange(count - 1, -1, -1, device=values.device)
    return (ordered * count + position).topk(k, dim=-1).indices


@dataclass(frozen=True)
class Sparsify:
    """The settings of `keep_largest` as an edit of the attention map."""

    theta: float
    per_row: bool = False
    renormalise: bool = False

    def __call__(self, probs: Tensor) -> Tensor:
        return keep_largest(probs, self.theta, per_row=self.per_row, renormalise=self.renormalise)

    def threshold_rank(self, entries: int) -> int | None:
        """k, if all this does is to zero what is below the k-th smallest of a map's entries; else None."""
        return None if self.per_row or self.renormalise else threshold_rank(entries, self.theta)


def threshold_rank(entries: int, theta: float) -> int:
    """Section 3.2.4, as released: k = int(N^2 (1 - theta)); 0 if theta is so near 1 that nothing is to be removed."""
    return int(entries * (1 - theta))


def keep_largest(probs: Tensor, theta: float, *, per_row: bool = False, renormalise: bool = False) -> Tensor:
    """Section 3.2.4: zero all but the largest theta N^2 entries of each head's map. [B, H, N, N] -> the same.

    Rows are not scaled to sum to 1 again, unless `renormalise`. With `per_row` each row has a threshold of its own.
    """
    entries = probs if per_row else probs.flatten(-2)
    sparse = zero_below(entries, threshold_rank(entries.shape[-1], theta)).view_as(probs)
    if renormalise:
        sparse = sparse / sparse.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(sparse.dtype).tiny)
    return sparse
