"""Slicing: drop the last tokens of each layer, as many as a method removes there. The price of a method that is free.

No method: what it keeps has nothing to do with the image. It is timed beside a method to see what its own work costs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import LayerTokens, ViTInfo


@dataclass(frozen=True, kw_only=True, repr=False)
class Slicing(Method):
    """Keep the first image tokens of each layer."""

    name: ClassVar[str] = "slicing"
    source: ClassVar[Source] = Source("none", "none", "none")

    keys_per_layer: tuple[int, ...]
    """Image tokens that go into each layer."""
    tokens_after_layer: tuple[int, ...]
    """Image tokens after its attention."""

    def build(self, vit: ViTInfo) -> Reducer:
        return SlicingReducer(vit, self)


class SlicingReducer(Reducer):
    """Slicing in a forward pass."""

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        counts = zip(self.method.keys_per_layer, self.method.tokens_after_layer, strict=True)
        return tuple(LayerTokens(keys, keys, left, left) for keys, left in counts)

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        return _first(tokens, self.method.keys_per_layer[layer])

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        return PLAIN if self.method.tokens_after_layer[layer] < tokens.cell.shape[1] else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        tokens, left = attention.tokens, self.method.tokens_after_layer[attention.layer]
        return _first(tokens, left).add(attention.branch()[:, : tokens.prefix + left])


def _first(tokens: Tokens, count: int) -> Tokens:
    if count >= tokens.cell.shape[1]:
        return tokens
    return tokens.replace(x=tokens.x[:, : tokens.prefix + count], cell=tokens.cell[:, :count])


def slicing_like(reducer: Reducer) -> Slicing | None:
    """Slicing with the numbers of tokens of a method; None where they depend on the image or grow again."""
    if reducer.adaptive:
        return None
    steps = reducer.steps(reducer.vit.grid)
    for step, following in itertools.pairwise(steps):
        if step.queries != step.keys or step.mlp != step.out or following.keys > step.out:
            return None
    return Slicing(
        keys_per_layer=tuple(step.keys for step in steps), tokens_after_layer=tuple(step.out for step in steps)
    )
