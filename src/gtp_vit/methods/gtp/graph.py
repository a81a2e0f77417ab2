"""Sections 3.2.2 to 3.2.4: the graph along which removed tokens are propagated, token summarisation, and sparsification
of the attention map.

A graph is stored as the paper's appendix proposes: one list of neighbours per token. An edge i <- j, "i receives from
j", exists if j is in the list of i. Lists have the same length; an unused entry is M, one past the last token. The
graph is built once, after the embedding, and never shrinks; later layers look their tokens up by grid cell.

Shapes: B batch, M image tokens, C channels, W length of a list, K tokens that stay, P propagated tokens, which leave.
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

    Computed from aranges on the device: a Python list of offsets would be copied there, and the host would wait.
    """
    rows, columns = grid
    cell, place = torch.arange(rows * columns, device=device), torch.arange(neighbours, device=device)
    # Places 0 to 8 of a 3 x 3 window in raster order; 4 is its middle, and 1, 3, 5, 7 share an edge with that.
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

    topk selects them in time linear in M (appendix, "Implementation optimizations"). Of equally similar tokens the
    first in raster order are taken, so a list has at most `neighbours` entries. A similarity of NaN makes no edge.
    """
    count = similarity.shape[-1]
    itself = torch.eye(count, dtype=torch.bool, device=similarity.device)
    others = torch.where(itself | similarity.isnan(), -torch.inf, similarity)
    nearest = topk_by_position(others, neighbours)
    return nearest.masked_fill(others.gather(-1, nearest) == -torch.inf, count)


def mixed(spatial_graph: Tensor, semantic_graph: Tensor) -> Tensor:
    """Eq. (8): the union of both graphs; a neighbour in both is listed once. -> [B, M, W]."""
    batch, count = semantic_graph.shape[:2]
    touching = spatial_graph.expand(batch, -1, -1)
    in_both = (semantic_graph.unsqueeze(-1) == touching.unsqueeze(-2)).any(dim=-1)
    return torch.cat([touching, semantic_graph.masked_fill(in_both, count)], dim=-1)


def normalise(degree: Tensor) -> Tensor:
    """Eq. (9), from Eq. (2): the diagonal of D^-1/2, one factor per token, in float32; 0 for a token without edges.

    In D^-1/2 A D^-1/2 the weight of an edge is the product of its two tokens' factors: no matrix product is needed.
    """
    return torch.where(degree > 0, degree.float().rsqrt(), 0.0)


def normalise_matrix(edges: Tensor) -> Tensor:
    """Eq. (9) for a graph that is stored as a matrix: D^-1/2 A D^-1/2. [B, M, M] -> float32 [B, M, M]."""
    root = normalise(edges.sum(dim=-1))
    return root.unsqueeze(-1) * edges * root.unsqueeze(-2)


def degrees(neighbours: Tensor) -> Tensor:
    """Section 3.2.2, D_ii of Eq. (9): the number of neighbours of each token. [B, M, W] -> [B, M]."""
    return (neighbours < neighbours.shape[-2]).sum(dim=-1)


def adjacency(neighbours: Tensor) -> Tensor:
    """Section 3.2.2: the graph as a dense boolean matrix, in which a row is a receiver. [B, M, W] -> [B, M, M]."""
    batch, count = neighbours.shape[:2]
    empty = torch.zeros(batch, count, count + 1, dtype=torch.bool, device=neighbours.device)
    return empty.scatter(2, neighbours, True)[..., :count]


def receive(neighbours: Tensor, root: Tensor, keep: Tensor, propagated: Tensor) -> Tensor:
    """Section 3.2.3, A^p of Eq. (10): the weights of the edges from propagated tokens to those that stay. -> [B, K, P].

    Args:
        neighbours: the lists of all tokens, [B or 1, M, W].
        root: their factors from `normalise`, [B or 1, M].
        keep: grid cells of the tokens that stay, [B, K].
        propagated: grid cells of the tokens that leave, [B, P].
    """
    batch, count, leaving = keep.shape[0], neighbours.shape[1], propagated.shape[1]
    columns = torch.arange(leaving, device=keep.device).expand(batch, -1)
    # The column of each cell in the result; cells of other tokens get one more column, which is cut off at the end.
    column_of = torch.full((batch, count + 1), leaving, device=keep.device).scatter(1, propagated, columns)
    lists = neighbours.expand(batch, -1, -1).gather(1, keep.unsqueeze(2).expand(-1, -1, neighbours.shape[2]))
    column = column_of.gather(1, lists.flatten(1)).unflatten(1, (-1, neighbours.shape[2]))
    factors = root.expand(batch, -1)
    weight = factors.gather(1, keep).unsqueeze(2) * factors.gather(1, propagated).unsqueeze(1)
    zeros = torch.zeros(batch, keep.shape[1], leaving + 1, device=keep.device)
    return zeros.scatter(2, column, 1.0)[..., :leaving] * weight


def summarise(values: Tensor, prefix: int, keep: Tensor, drop: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Eq. (10) and (12): X^s = X^k + alpha A^p X^p for a whole sequence.

    Args:
        values: features or sizes of all tokens, [B, c + M, D].
        prefix: number of tokens at the start, which do not change.
        keep: image tokens that stay, [B, K].
        drop: image tokens that are propagated, [B, P].
        weights: A^p, the weight of each propagated token in each token that stays, [B, K, P].
        alpha: weight of the propagated sum.
    """
    return weighted_merge(values, prefix, keep, drop, weights, alpha=alpha)


def topk_by_position(values: Tensor, k: int) -> Tensor:
    """Section 3.2.2, the threshold T_i: indices of the k largest of each row; of equal ones the first. -> [..., k].

    topk does not define which of several equal values it takes. So it is called on integers that are all different:
    they compare first by value and then by position, of which the smaller one wins.
    """
    if is_exporting():  # engines cannot read the bits of a float
        return values.float().topk(k, dim=-1).indices
    count = values.shape[-1]
    bits = (values.float() + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to 0
    # Integers in the order of the floats: those with the sign bit set are negative already, but in reverse order.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    reversed_position = torch.arange(count - 1, -1, -1, device=values.device)
    return (ordered * count + reversed_position).topk(k, dim=-1).indices


@dataclass(frozen=True)
class Sparsify:
    """The settings of `keep_largest` as an edit of the attention map."""

    theta: float
    per_row: bool = False
    renormalise: bool = False

    def __call__(self, probs: Tensor) -> Tensor:
        return keep_largest(probs, self.theta, per_row=self.per_row, renormalise=self.renormalise)

    def threshold_rank(self, entries: int) -> int | None:
        """k, if these settings only zero the entries of a map below its k-th smallest one; otherwise None."""
        return None if self.per_row or self.renormalise else threshold_rank(entries, self.theta)


def threshold_rank(entries: int, theta: float) -> int:
    """Section 3.2.4, as in the released code: k = int(N^2 (1 - theta)); 0 if theta is so near 1 that nothing goes."""
    return int(entries * (1 - theta))


def keep_largest(probs: Tensor, theta: float, *, per_row: bool = False, renormalise: bool = False) -> Tensor:
    """Section 3.2.4: zero all but the theta N^2 largest entries of each head's map. [B, H, N, N] -> the same.

    Rows are not scaled to sum to 1 again, unless `renormalise`. With `per_row` each row has a threshold of its own.
    """
    entries = probs if per_row else probs.flatten(-2)
    sparse = zero_below(entries, threshold_rank(entries.shape[-1], theta)).view_as(probs)
    if renormalise:
        sparse = sparse / sparse.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(sparse.dtype).tiny)
    return sparse
