"""Tri-Level ("Peeling the Onion"): drop tokens that the class token does not attend to, and sparsify the attention map.

The third level, removing training examples, is not here.

Shapes: B batch, N tokens, M image tokens, K kept.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import check_layers, scale_keep_ratio
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import check_range
from gtp_vit.tensors import select_rows, split_by_score


@dataclass(frozen=True, kw_only=True, repr=False)
class TriLevel(Method):
    """Drop inattentive tokens in a few layers, and let those that stay attend only to what they attended to most.

    >>> from gtp_vit import TriLevel, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), TriLevel(keep_ratio=0.7)))
    0.812 GMACs
    """

    name: ClassVar[str] = "trilevel"
    source: ClassVar[Source] = Source("arXiv 2211.10801 (AAAI 2023)", "ZLKong/Tri-Level-ViT", "MIT")
    needs_class_token: ClassVar[bool] = True
    attention_inputs: ClassVar[str] = "class row; the map where attn_ratio < 1"
    keep_ratio_field: ClassVar[str | None] = "keep_ratio"

    keep_ratio: float = 0.7
    """Share of its image tokens that each of the layers in `pruning_loc` keeps (the paper's R_T)."""
    attn_ratio: float = 1.0
    """Share of the image tokens that a token may attend to afterwards. Below 1 it costs time and saves none."""
    pruning_loc: tuple[int, ...] | None = None
    """Layers that drop tokens, counted from 0; by default at one, two and three quarters: 3, 6, 9 of 12."""

    def build(self, vit: ViTInfo) -> TriLevelReducer:
        self.check_class_token(vit)
        check_range("keep_ratio", self.keep_ratio, 0, 1, exclude_low=True)
        check_range("attn_ratio", self.attn_ratio, 0, 1, exclude_low=True)
        return TriLevelReducer(self, vit)

    def scaled(self, vit: ViTInfo, fraction: float) -> TriLevel:
        keep, attend = (scale_keep_ratio(ratio, fraction) for ratio in (self.keep_ratio, self.attn_ratio))
        return dataclasses.replace(self, keep_ratio=keep, attn_ratio=attend)


def strongest_mask(attention: Tensor, ratio: float) -> Tensor:
    """1 for each row's largest entries, the given share of them and what equals the last; [B, K, K]."""
    count = math.ceil(attention.shape[-1] * ratio)
    return (attention >= attention.topk(count, dim=-1).values[..., -1:]).float()


class TriLevelReducer(Reducer):
    """Tri-Level in a forward pass; `method_state` is the mask of the attention map, [B, N, N]."""

    def __init__(self, method: TriLevel, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.layers = check_layers("pruning_loc", method.pruning_loc, vit.depth)
        self.masks = method.attn_ratio < 1
        self.statistics = ("class_row", "map") if self.masks else ("class_row",)

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        tokens, counts = grid[0] * grid[1], []
        for layer in range(self.vit.depth):
            counts.append(tokens - self.tokens_after(tokens) if layer in self.layers else 0)
            tokens -= counts[-1]
        return tuple(counts)

    def tokens_after(self, tokens: int) -> int:
        return math.ceil(self.method.keep_ratio * tokens)

    def prunes(self, layer: int, tokens: int) -> bool:
        return layer in self.layers and (self.masks or self.tokens_after(tokens) < tokens)

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        if tokens.method_state is not None:
            return Adjustments(mask=tokens.method_state)
        return PLAIN if self.prunes(layer, tokens.cell.shape[1]) else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        count, prefix = attention.tokens.cell.shape[1], attention.tokens.prefix
        if not self.prunes(attention.layer, count):
            return attention.add()
        stats = attention.statistics(*self.statistics, heads="mean")
        assert stats.class_row is not None
        keep, _ = split_by_score(stats.class_row, count - self.tokens_after(count))
        tokens = attention.add().keep(keep)
        if stats.map is not None:
            rows = select_rows(stats.map.mean(dim=1)[:, prefix:, prefix:], keep)
            rows = rows.gather(2, keep.unsqueeze(1).expand(-1, keep.shape[1], -1))
            mask = F.pad(strongest_mask(rows, self.method.attn_ratio), (prefix, 0, prefix, 0), value=1.0)
            tokens = tokens.replace(method_state=mask)
        return tokens

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        if self.masks:  # the map is computed anyway, the class token's row with it
            return 0
        acting = [step for layer, step in enumerate(forward_pass.reducing) if self.prunes(layer, step.keys)]
        return sum(self.class_row_macs(step.keys) for step in acting)
