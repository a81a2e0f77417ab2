"""GTP+: conserving graph propagation, a method of our own. What is removed goes whole to its most similar kept token.

In a layer that removes P tokens, after the attention residual, those go whose merging costs least: tokens that the
class token hardly attends to and that look like a more important one. Each gives all its mass to the most similar more
important token that stays: features are averaged by size and brought back to the largest of the norms involved, sizes
add up to the number of patches, and attention favours tokens by their size.

Settings first, then what they do in a forward pass, then the arithmetic. It puts tokens in the order of their
importance, so that "more important than" is "before", and computes only the half of the similarities that can matter.

Shapes: B batch, N tokens, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.attention import Ask, Stats
from gtp_vit.core.reducer import Method, Reducer, Source, Step, VitInfo
from gtp_vit.core.schedule import Schedule, searched, whole_tokens
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import check_range
from gtp_vit.kernels import Operator, Ops, checks, native
from gtp_vit.tensors import at_least_float32, batch_numbers, behind_prefix, full_precision, select_rows, split

BLOCKS = 8  # strips of the lower triangle, which then are 9/16 of the square


@dataclass(frozen=True, kw_only=True, repr=False)
class GTPPlus(Method):
    """Merge tokens that are unimportant and look like a more important one into the most similar of those."""

    name: ClassVar[str] = "gtp_plus"
    source: ClassVar[Source] = Source("none, our own", "this package", "Apache-2.0")
    asks: ClassVar[str] = "class row; column sums where there is no class token"
    schedule: ClassVar[str | None] = "propagate"
    tunes: ClassVar[dict[str, tuple[float, float]]] = {"floor": (0.02, 20.0), "proportional_attention": (0.3, 1.5)}

    propagate: Schedule = "searched:8"
    """Tokens removed in each layer: a number, one a layer, or a named schedule."""
    floor: float = 0.5
    """Importance of a token without attention, where the mean token has 1; large values ignore importance."""
    keep_norm: bool = True
    """Bring averaged tokens back to the largest of the norms involved."""
    proportional_attention: float = 0.9
    """How much attention favours large tokens: 1 = as if each were as many tokens as it has merged, 0 = not at all."""

    def build(self, vit: VitInfo) -> GTPPlusReducer:
        check_range("floor", self.floor, 0, 1000)
        check_range("proportional_attention", self.proportional_attention, 0, 2)
        return GTPPlusReducer(self, vit)

    @classmethod
    def at(cls, vit: VitInfo, strength: float) -> GTPPlus:
        """A schedule of the default shape: half of the tokens leave at 0.5, and all but one at once at 1."""
        shape = searched(vit.depth, vit.image_tokens, vit.image_tokens / (2 * vit.depth))
        if not vit.head_reads_image_tokens:
            shape[-1] = 0  # it would have no effect
        scale = strength / max(1 - strength, 1e-9)
        return cls(propagate=tuple(whole_tokens([scale * number for number in shape], vit.image_tokens)))


class GTPPlusReducer(Reducer):
    """GTP+ in a forward pass."""

    drops_patches = False

    def __init__(self, method: GTPPlus, vit: VitInfo) -> None:
        super().__init__(vit, method)
        self.plan = self.removals(vit.grid)
        self.ask_importance = Ask(frozenset({"class_row" if vit.class_token else "column_sums"}), heads="mean")

    def ask(self, layer: int, tokens: Tokens) -> Ask | None:
        return self.ask_importance if self.removals_of(tokens)[layer] else None

    def fused(
        self, layer: int, tokens: Tokens, branch: Tensor, stats: Stats, norm: nn.LayerNorm | None
    ) -> tuple[Tokens, Tensor | None]:
        removed = self.removals_of(tokens)[layer]
        if removed == 0:
            return tokens.add(branch), None
        importance = stats.class_row if self.vit.class_token else stats.column_sums
        assert importance is not None
        norm = norm if tokens.ops.fuses_norm else None
        x, normed, new_size, kept, gone, target = conserve(
            tokens.ops,
            tokens.x,
            branch,
            importance,
            tokens.size,
            removed,
            self.method.floor,
            self.method.keep_norm,
            *((None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)),
        )
        owner = tokens.owners(kept, gone, target)
        tokens = tokens.but(x=x, cell=tokens.cell.gather(1, kept), size=new_size, owner=owner)
        return tokens, None if norm is None else normed

    def reduce(self, layer: int, tokens: Tokens, stats: Stats) -> Tokens:
        return self.fused(layer, tokens, torch.zeros_like(tokens.x), stats, None)[0]

    def key_weights(self, tokens: Tokens) -> Tensor | None:
        power, weights = self.method.proportional_attention, tokens.key_sizes
        if weights is None or power == 0:
            return None
        return weights if power == 1 else weights.pow(power)

    def own_macs(self, grid: tuple[int, int], steps: Sequence[Step], layers: int) -> int:
        """Similarities, and the class token's row; merging is additions."""
        total = 0
        for step in steps[:layers]:
            if step.keys > step.after:
                total += self.class_row_macs(step.keys) if self.vit.class_token else 0
                total += similarities(step.keys) * self.vit.dim
        return total


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
    compared = (similarity > -1.5) & (apart >= 0)  # False for NaN, which is similar to no token
    nearest = torch.where(compared, apart, torch.inf).amin(dim=2).sqrt()
    return (importance / importance.mean(dim=1, keepdim=True) + floor) * nearest


def merge_cheapest(
    x: Tensor,
    branch: Tensor,
    importance: Tensor,
    size: Tensor | None,
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
        size: of the image tokens, [B, M]; None = one each.
        removed: how many leave.
        floor: importance of a token without attention, in units of the mean one.
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
    size = torch.ones_like(importance) if size is None else size
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
        # A token has no receiver only if there is NaN; the first kept token then takes it.
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


def merge_cheapest_portably(
    x: Tensor, branch: Tensor, importance: Tensor, size: Tensor | None, removed: int, floor: float, keep_norm: bool,
    norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`merge_cheapest` in few operators that every engine has and runs fast; without the LayerNorm.

    An engine pays for every pass over an array, so nothing is cut out or put together: prefix tokens are in all the
    arrays, as tokens that no other goes to. Merging is a product with a matrix of zeros and ones. Of equally important
    tokens any may count as the more important.
    """
    dtype = x.dtype
    with full_precision(x):
        x = at_least_float32(x) + at_least_float32(branch)
        count, prefix = importance.shape[1], x.shape[1] - importance.shape[1]
        left = count - removed
        length = x.norm(dim=2).clamp(min=1e-12)
        ranked, order = importance.topk(count, dim=1)
        numbers = batch_numbers(order)
        unit = select_rows(x / length.unsqueeze(2), order + prefix, numbers)
        # cosine - 1 of every token with the more important ones, which are before it; far below that elsewhere
        one = torch.ones(count, count, dtype=x.dtype, device=x.device)
        near = unit @ unit.transpose(1, 2) - (one + 1e4 * one.triu())
        if size is None:  # all pairs have the same factor, which changes no decision
            apart = -near.amax(dim=2)
        else:  # s s' / (s + s') is 1 / (1 / s + 1 / s')
            smallness = 1 / size.gather(1, order)
            apart = (near * near / (smallness.unsqueeze(2) + smallness.unsqueeze(1))).amin(dim=2).sqrt()
        cost = (ranked / ranked.mean(dim=1, keepdim=True) + floor) * apart
        by_cost = cost.topk(count, dim=1).indices  # one topk, so that no token is in both, whatever is equal
        stay, go = by_cost[:, :left], by_cost[:, left:]
        kept, place = order.gather(1, stay).topk(left, dim=1, largest=False)  # in ascending order
        gone = order.gather(1, go)
        offered = select_rows(near, go, numbers).transpose(1, 2)
        target = select_rows(offered, stay.gather(1, place), numbers).argmax(dim=1)  # of [B, K, P]
        rows = behind_prefix(kept, prefix)
        goes = (target.unsqueeze(1) + prefix == torch.arange(prefix + left, device=x.device)[:, None]).to(x.dtype)
        if size is None:
            own, given = torch.ones((), dtype=x.dtype, device=x.device), goes
        else:
            own = F.pad(size, (prefix, 0), value=1.0).gather(1, rows)
            given = goes * size.gather(1, gone).unsqueeze(1)  # [B, c + K, P]
        new_size = own + given.sum(dim=2)
        merged = select_rows(x, rows, numbers) * (own / new_size).unsqueeze(2)
        merged = merged + (given / new_size.unsqueeze(2)) @ select_rows(x, gone + prefix, numbers)
        if keep_norm:
            longest = (goes * length.gather(1, gone + prefix).unsqueeze(1)).amax(dim=2)
            longest = torch.maximum(length.gather(1, rows), longest)
            factor = torch.where(new_size > own, longest / merged.norm(dim=2).clamp(min=1e-12), 1.0)
            merged = merged * factor.unsqueeze(2)
    return merged.to(dtype), merged.new_empty(0), new_size[:, prefix:].float(), kept, gone, target


def _flops(x: tuple[int, ...], importance: tuple[int, ...]) -> int:
    """Operations of the twin's strips; the kernel's tiles follow the triangle more closely."""
    return 2 * x[0] * x[2] * similarities(importance[1])


conserve: Operator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = Operator(
    "conserve",
    merge_cheapest,
    {Ops.NATIVE: native.conserve, Ops.PORTABLE: merge_cheapest_portably},
    check=checks.check_conserve,
    fits=checks.fits_conserve,
    fake=native.conserve_results,
    flops=_flops,
)
