"""GTP+: conserving graph propagation, a method of our own. What is removed goes whole to its most similar kept token.

In a layer that removes P tokens, after the attention residual: a token is worth keeping if the class token attends to
it and if no more important token looks like it. Each removed token gives all its mass to one receiver: features are
averaged by size and brought back to the larger of the norms involved, sizes add up to the number of patches.

Shapes: B batch, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.attention import Ask, Stats
from gtp_vit.core.reducer import Convention, Method, Reducer, Source, Step, VitInfo
from gtp_vit.core.schedule import Schedule, removals
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import check_range
from gtp_vit.methods.tome import Pairs, average, sizes_of, with_sizes
from gtp_vit.paper.propagation import select_rows
from gtp_vit.paper.selection import split


@dataclass(frozen=True, kw_only=True, repr=False)
class GTPPlus(Method):
    """Remove tokens that are unimportant or look like a more important one; give each whole to the most similar one."""

    name: ClassVar[str] = "gtp_plus"
    source: ClassVar[Source] = Source("none, our own", "this package", "Apache-2.0")
    asks: ClassVar[str] = "class row; column sums where there is no class token"
    dial: ClassVar[str] = "propagate"

    propagate: Schedule = 8
    """Tokens removed in each layer: a number, one a layer, or a named schedule."""
    importance: float = 0.15
    """How much a token's importance counts against its redundancy."""
    keep_norm: bool = True
    """Bring averaged tokens back to the larger of the norms involved."""
    proportional_attention: bool = True
    """Let attention favour large tokens by log size."""

    def build(self, vit: VitInfo) -> GTPPlusReducer:
        check_range("importance", self.importance, 0, 100)
        return GTPPlusReducer(self, vit)

    def off(self) -> GTPPlus:
        return dataclasses.replace(self, propagate=0)


def redundancy(similarity: Tensor, importance: Tensor) -> Tensor:
    """Highest similarity of each token to a more important one, [B, M]; -1 if there is none.

    Of equally important tokens the earlier one counts as the more important.
    """
    order = importance.sort(dim=1, descending=True, stable=True).indices
    rank = torch.zeros_like(order).scatter(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    before = rank.unsqueeze(1) < rank.unsqueeze(2)  # [B, M, M]: is the column's token more important than the row's?
    return similarity.masked_fill(~before, -1.0).amax(dim=2)


class GTPPlusReducer(Reducer):
    """GTP+ in a forward pass; remembers the sizes of the image tokens, [B, M]."""

    def __init__(self, method: GTPPlus, vit: VitInfo) -> None:
        super().__init__(vit)
        self.method = method
        self.plan = self.removals(vit.grid)
        self.ask_importance = Ask(frozenset({"class_row" if vit.class_token else "column_sums"}), heads="mean")

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        return removals(self.method.propagate, self.vit.depth, grid[0] * grid[1])

    def ask(self, layer: int, tokens: Tokens) -> Ask | None:
        return self.ask_importance if self.removals_of(tokens)[layer] else None

    def reduce(
        self, layer: int, tokens: Tokens, branch: Tensor, stats: Stats, norm: nn.LayerNorm | None
    ) -> tuple[Tokens, Tensor | None]:
        removed = self.removals_of(tokens)[layer]
        tokens = tokens.add(branch)
        if removed == 0:
            return tokens, None
        importance = stats.class_row if self.vit.class_token else stats.column_sums
        assert importance is not None
        with torch.no_grad():
            image = tokens.image.float()
            length = image.norm(dim=2).clamp(min=1e-12)
            unit = image / length.unsqueeze(2)
            similarity = unit @ unit.transpose(1, 2)
            worth = self.method.importance * importance / importance.mean(dim=1, keepdim=True)
            kept, gone = split(worth - redundancy(similarity, importance), removed)
            between = select_rows(similarity, gone).gather(2, kept.unsqueeze(1).expand(-1, removed, -1))
            pairs = Pairs(kept, gone, between.argmax(dim=2))
            weights, retain, size = average(pairs, sizes_of(tokens))
        tokens = tokens.merge(kept, gone, weights, retain)
        if self.method.keep_norm:
            largest = torch.maximum(
                length.gather(1, kept), ((weights > 0) * length.gather(1, gone).unsqueeze(1)).amax(2)
            )
            tokens = tokens.but(x=_with_norm(tokens.x, tokens.prefix, largest, retain < 1))
        return with_sizes(tokens, size, self.method.proportional_attention), None

    def own_macs(self, grid: tuple[int, int], steps: Sequence[Step], layers: int, convention: Convention) -> int:
        total = 0
        for step in steps[:layers]:
            removed = step.keys - step.after
            if removed:
                total += self.class_row_macs(step.keys) if self.vit.class_token else 0
                total += step.keys**2 * self.vit.dim + (step.after + self.vit.prefix) * removed * self.vit.dim
        return total


def _with_norm(x: Tensor, prefix: int, length: Tensor, changed: Tensor) -> Tensor:
    """Image tokens brought to these lengths [B, K] where `changed`; the prefix stays as it is."""
    now = x[:, prefix:].float().norm(dim=2).clamp(min=1e-12)
    factor = torch.where(changed, length / now, 1.0)
    return x * F.pad(factor, (prefix, 0), value=1.0).unsqueeze(2).to(x.dtype)
