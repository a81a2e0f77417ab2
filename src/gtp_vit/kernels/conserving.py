"""GTP+'s operator in torch: residual, selection, merging, and the LayerNorm that follows. The native kernel's twin.

Tokens are put in the order of their importance, so that "more important than" is "before", and only the half of the
similarities that can matter is computed.

Shapes: B batch, N tokens, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.tensors import at_least_float32, full_precision, select_rows, split

BLOCKS = 8  # the lower triangle in so many strips: 9/16 of the square


def strips(tokens: int) -> list[tuple[int, int]]:
    """First and last row of each strip.

    >>> strips(20)
    [(0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 18), (18, 20)]
    """
    height = math.ceil(tokens / BLOCKS)
    return [(first, min(first + height, tokens)) for first in range(0, tokens, height)]


def similarities(tokens: int) -> int:
    """How many pairs of tokens are compared."""
    return sum((last - first) * last for first, last in strips(tokens))


def earlier_similarity(unit: Tensor) -> Tensor:
    """Cosines of every token with those before it, [B, M, M]; -2, less than any, elsewhere."""
    count = unit.shape[1]
    rows = [
        F.pad(unit[:, first:last] @ unit[:, :last].transpose(1, 2), (0, count - last)) for first, last in strips(count)
    ]
    before = torch.ones(count, count, dtype=torch.bool, device=unit.device).tril(-1)
    return torch.cat(rows, dim=1).masked_fill(~before, -2.0)


def damage(similarity: Tensor, importance: Tensor, size: Tensor, floor: float) -> Tensor:
    """What it would cost to merge each token into an earlier one, [B, M]; infinite for the first.

    (a / mean a + floor) times the least (1 - cosine) sqrt(s s' / (s + s')) over the tokens before it: how much it
    matters, times how far two clusters of these sizes move when they become one (Ward's criterion).
    """
    pair = size.unsqueeze(2) * size.unsqueeze(1) / (size.unsqueeze(2) + size.unsqueeze(1))
    apart = (1 - similarity).clamp(min=0).square() * pair
    compared = (similarity > -1.5) & (apart >= 0)  # not so if anything is NaN: that is like nobody
    nearest = torch.where(compared, apart, torch.inf).amin(dim=2).sqrt()
    return (importance / importance.mean(dim=1, keepdim=True) + floor) * nearest


def conserve(
    x: Tensor,
    branch: Tensor,
    importance: Tensor,
    size: Tensor,
    removed: int,
    floor: float,
    keep_norm: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merge the tokens that cost least into their most similar more important ones.

    Args:
        x: features [B, N, C].
        branch: the attention branch, to be added to them.
        importance: of the image tokens, [B, M]. Of equally important ones the earlier counts as the more important.
        size: of the image tokens, [B, M].
        removed: how many leave.
        floor: importance of a token that nobody attends to, in units of the mean one.
        keep_norm: bring merged tokens to the largest of the norms involved.
        norm_weight: of the LayerNorm that follows, [C]; None = no LayerNorm.
        norm_bias: of that LayerNorm.
        epsilon: of that LayerNorm.

    Returns:
        Features; features after the LayerNorm, empty if not asked for; sizes of the image tokens that stay, [B, K];
        which stay, [B, K]; which go, [B, P]; and where each of these goes, as a place among those that stay, [B, P].
    """
    dtype = x.dtype
    x = at_least_float32(x) + at_least_float32(branch)
    prefix = x.shape[1] - importance.shape[1]
    image = x[:, prefix:]
    with torch.no_grad(), full_precision(image):
        features = image.float()
        length = features.norm(dim=2).clamp(min=1e-12)
        order = importance.sort(dim=1, descending=True, stable=True).indices
        similarity = earlier_similarity(select_rows(features / length.unsqueeze(2), order))
        cost = damage(similarity, importance.gather(1, order), size.gather(1, order), floor)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.zeros_like(order).scatter(1, order, places)
        kept, gone = split(cost.gather(1, rank), removed)
        stays = torch.zeros_like(cost, dtype=torch.bool).scatter(1, rank.gather(1, kept), True)
        offered = select_rows(similarity, rank.gather(1, gone))
        offered = offered.masked_fill(~stays.unsqueeze(1) | offered.isnan(), -2.0)
        highest, best = offered.amax(dim=2), offered.argmax(dim=2)
        slot = torch.zeros_like(order).scatter(1, kept, places[:, : kept.shape[1]])
        # Only NaN leaves a token without a receiver; the first one that stays takes it then.
        target = torch.where(highest > -1.5, slot.gather(1, order.gather(1, best)), 0)
        own, given = size.gather(1, kept), size.gather(1, gone)
        new_size = own.scatter_add(1, target, given)
        share = given / new_size.gather(1, target)
    merged = image.gather(1, kept.unsqueeze(2).expand(-1, -1, x.shape[2])) * (own / new_size).unsqueeze(2).to(x.dtype)
    moved = image.gather(1, gone.unsqueeze(2).expand(-1, -1, x.shape[2])) * share.unsqueeze(2).to(x.dtype)
    merged = merged.scatter_add(1, target.unsqueeze(2).expand_as(moved), moved)
    if keep_norm:
        longest = length.gather(1, kept).scatter_reduce(1, target, length.gather(1, gone), "amax")
        factor = torch.where(new_size > own, longest / merged.float().norm(dim=2).clamp(min=1e-12), 1.0)
        merged = merged * factor.unsqueeze(2).to(x.dtype)
    x = torch.cat([x[:, :prefix], merged], dim=1).to(dtype)  # rounded once
    normed = x.new_empty(0)
    if norm_weight is not None:
        normed = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, epsilon)
    return x, normed, new_size, kept, gone, target
