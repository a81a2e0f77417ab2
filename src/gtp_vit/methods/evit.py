"""EViT: in a few layers, keep the tokens that the class token attends to most, and fuse the others into one.

Shapes: B batch, M image tokens, K kept, P fused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import check_layers
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import check_range
from gtp_vit.tensors import full_precision, select_rows, split_by_score


@dataclass(frozen=True, kw_only=True, repr=False)
class EViT(Method):
    """Keep the tokens that the class token attends to, fuse the inattentive ones into one token.

    >>> from gtp_vit import EViT, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), EViT(keep_rate=0.7)))
    0.821 GMACs
    """

    name: ClassVar[str] = "evit"
    source: ClassVar[Source] = Source("arXiv 2202.07800 (ICLR 2022)", "youweiliang/evit", "Apache-2.0")
    needs_class_token: ClassVar[bool] = True
    attention_inputs: ClassVar[str] = "class row"
    keep_ratio_field: ClassVar[str | None] = "keep_rate"

    keep_rate: float = 0.7
    """Share of its image tokens that each of the layers in `drop_loc` keeps (the paper's k)."""
    fuse_token: bool = True
    """Fuse what is dropped into one more token, weighted by the class token's attention."""
    drop_loc: tuple[int, ...] | None = None
    """Layers that drop tokens, counted from 0; by default at one, two and three quarters: 3, 6, 9 of 12."""

    def build(self, vit: ViTInfo) -> EViTReducer:
        self.check_class_token(vit)
        check_range("keep_rate", self.keep_rate, 0, 1, exclude_low=True)
        return EViTReducer(self, vit)


class EViTReducer(Reducer):
    """EViT in a forward pass; `method_state` is the name of the next fused token."""

    def __init__(self, method: EViT, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.layers = check_layers("drop_loc", method.drop_loc, vit.depth)
        self.drops_patches = not method.fuse_token

    def tokens_after(self, layer: int, tokens: int) -> int:
        """The number of a layer's image tokens that stay, the fused one not counted."""
        return math.ceil(self.method.keep_rate * tokens) if layer in self.layers else tokens

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        tokens, layers = grid[0] * grid[1], []
        for layer in range(self.vit.depth):
            left = self.tokens_after(layer, tokens)
            after = left + int(self.method.fuse_token and left < tokens)
            layers.append(LayerTokens(tokens, tokens, after, after))
            tokens = after
        return tuple(layers)

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        count = tokens.cell.shape[1]
        return PLAIN if self.tokens_after(layer, count) < count else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        row = attention.statistics("class_row", heads="mean").class_row
        assert row is not None
        tokens, count = attention.add(), row.shape[1]
        keep, drop = split_by_score(row, count - self.tokens_after(attention.layer, count))
        if not self.method.fuse_token:
            return tokens.keep(keep)
        weights = row.gather(1, drop).unsqueeze(1)  # not normalised, as published
        with full_precision(tokens.x):
            fused = weights.to(tokens.x.dtype) @ select_rows(tokens.image, drop)
        number = tokens.method_state or tokens.grid[0] * tokens.grid[1]
        return tokens.fuse(keep, drop, fused, number).replace(method_state=number + 1)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        total = 0
        for layer, step in enumerate(forward_pass.reducing):
            left = self.tokens_after(layer, step.keys)
            if left < step.keys:
                total += self.class_row_macs(step.keys)
                total += (step.keys - left) * self.vit.dim if self.method.fuse_token else 0
        return total
