"""GTP+: conserving graph propagation, a method of our own. What is removed goes whole to its most similar kept token.

In a layer that removes P tokens, after the attention residual, those go whose merging costs least: tokens that the
class token hardly attends to and that look like a more important one. Each gives all its mass to the most similar more
important token that stays: features are averaged by size and brought back to the largest of the norms involved, sizes
add up to the number of patches, and attention favours tokens by their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gtp_vit import kernels
from gtp_vit.core.attention import Ask, Stats
from gtp_vit.core.merging import Pairs, average, sizes_of, with_sizes
from gtp_vit.core.reducer import Convention, Method, Reducer, Source, Step, VitInfo
from gtp_vit.core.schedule import Schedule, removals, searched, weaker, whole_tokens
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import check_range
from gtp_vit.kernels.conserving import similarities
from gtp_vit.paper.propagation import summarise


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
    """Importance of a token that nobody attends to, against 1 for the mean one; large values ignore importance."""
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
        """In the default shape: half of the tokens leave at 0.5, and at 1 all but one where the first ones leave."""
        shape = searched(vit.depth, vit.image_tokens, vit.image_tokens / (2 * vit.depth))
        if not vit.head_reads_image_tokens:
            shape[-1] = 0  # nobody would see it
        scale = strength / max(1 - strength, 1e-9)
        return cls(propagate=tuple(whole_tokens([scale * number for number in shape], vit.image_tokens)))

    def weakened(self, vit: VitInfo, share: float) -> GTPPlus:
        return dataclasses.replace(self, propagate=weaker(self.propagate, share, vit.depth, vit.image_tokens))


class GTPPlusReducer(Reducer):
    """GTP+ in a forward pass; remembers the sizes of the image tokens, [B, M]."""

    def __init__(self, method: GTPPlus, vit: VitInfo) -> None:
        super().__init__(vit)
        self.method = method
        self.size_power = method.proportional_attention
        self.plan = self.removals(vit.grid)
        self.ask_importance = Ask(frozenset({"class_row" if vit.class_token else "column_sums"}), heads="mean")

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        return removals(self.method.propagate, self.vit.depth, grid[0] * grid[1])

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
        norm = norm if tokens.native else None  # torch's own norm is as good as the twin's
        size = sizes_of(tokens)
        x, normed, new_size, kept, gone, target = kernels.conserve(
            tokens.native,
            tokens.x,
            branch,
            importance,
            size,
            removed,
            self.method.floor,
            self.method.keep_norm,
            *((None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)),
        )
        source = tokens.source
        if source is not None:
            weights, retain, _ = average(Pairs(kept, gone, target), size)
            source = summarise(source, 0, kept, gone, weights, 1.0, retain)
        tokens = tokens.but(x=x, position=tokens.position.gather(1, kept), source=source)
        tokens = with_sizes(tokens, new_size, self.size_power > 0)
        return tokens, None if norm is None else normed

    def own_macs(self, grid: tuple[int, int], steps: Sequence[Step], layers: int, convention: Convention) -> int:
        """Similarities, and the class token's row; merging is additions."""
        total = 0
        for step in steps[:layers]:
            if step.keys > step.after:
                total += self.class_row_macs(step.keys) if self.vit.class_token else 0
                total += similarities(step.keys) * self.vit.dim
        return total
