"""PPT: token pruning and pooling. In a few layers each image either merges similar tokens or drops unimportant ones.

Where the scores of an image's tokens hardly vary, none is unimportant, so tokens are merged (as ToMe does); where they
vary, the lowest are dropped. Both results have the same shape, so both are computed and one is taken.

Shapes: B batch, M image tokens, r tokens removed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gtp_vit.core.attention import Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.merging import MergePairs, average, match, matching_macs, max_mergeable, mean_keys
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import check_layers, removals
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import check_range
from gtp_vit.tensors import argsort_descending


@dataclass(frozen=True, kw_only=True, repr=False)
class PPT(Method):
    """Merge tokens of images whose scores hardly vary, drop the unimportant ones of the others.

    >>> from gtp_vit import PPT, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), PPT(r=50)))
    0.802 GMACs
    """

    name: ClassVar[str] = "ppt"
    source: ClassVar[Source] = Source("arXiv 2310.01812", "xjwu1024/PPT", "Apache-2.0")
    needs_class_token: ClassVar[bool] = True
    attention_inputs: ClassVar[str] = "class row, keys and values"

    r: int = 50
    """Tokens removed in each of the layers in `pp_loc_list`; at most half of a layer's tokens."""
    pp_loc_list: tuple[int, ...] | None = None
    """Layers that remove tokens, counted from 0; by default at one, two and three quarters: 3, 6, 9 of 12."""
    threshold: float = 7e-5
    """Variance of the scores below which an image's tokens are merged rather than dropped."""
    prop_attn: bool = True
    """Let attention favour large tokens by log size."""

    def build(self, vit: ViTInfo) -> PPTReducer:
        self.check_class_token(vit)
        check_range("r", self.r, 0, 10**6, integer=True)
        check_range("threshold", self.threshold, 0, 1)
        return PPTReducer(self, vit)

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> PPT:
        return cls(r=round(strength * max(vit.image_tokens // 2 - 1, 0)))

    def scaled(self, vit: ViTInfo, fraction: float) -> PPT:
        return dataclasses.replace(self, r=round(fraction * self.r))


class PPTReducer(Reducer):
    """PPT in a forward pass."""

    def __init__(self, method: PPT, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.layers = check_layers("pp_loc_list", method.pp_loc_list, vit.depth)
        self.plan = self.removals(vit.grid)

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        listed = tuple(self.method.r if layer in self.layers else 0 for layer in range(self.vit.depth))
        return removals(listed, self.vit.depth, grid[0] * grid[1], max_mergeable)

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        weights = tokens.key_sizes if self.method.prop_attn else None
        return super().adjust(layer, tokens) if weights is None else Adjustments(weights)

    def reduce(self, attention: LayerAttention) -> Tokens:
        removed = self.removals_of(attention.tokens)[attention.layer]
        if removed == 0:
            return attention.add()
        row = attention.statistics("class_row", heads="mean").class_row
        assert row is not None
        tokens = attention.add()
        with torch.no_grad():
            scores = importance(row, attention.values)
            merging = scores.var(dim=1, keepdim=True) < self.method.threshold  # [B, 1]
            merged = match(mean_keys(attention), tokens.prefix, removed, keep_order=True)
            order = argsort_descending(scores)
            left = order.shape[1] - removed
            keep = torch.where(merging, merged.keep, order[:, :left])
            drop = torch.where(merging, merged.drop, order[:, left:])
            size = tokens.sizes
            # Dropped tokens give nothing, as if their size were 0.
            incoming = torch.where(merging, size.gather(1, drop), 0.0)
            weights, retain, size = average(MergePairs(keep, drop, merged.target), size.scatter(1, drop, incoming))
        return tokens.merge(keep, drop, weights, size, retain)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        acting = [step for step in forward_pass.reducing if step.keys > step.out]
        return sum(self.class_row_macs(step.keys) + matching_macs(self.vit, step) for step in acting)


def importance(class_row: Tensor, values: Tensor) -> Tensor:
    """The class token's attention times the length of the value, as shares of their sum, [B, M]."""
    scores = class_row * values.transpose(1, 2).flatten(2).float().norm(dim=2)
    return scores / scores.sum(dim=1, keepdim=True)
