"""ToMe: token merging. Half of the tokens each look for their most similar partner in the other half, and the r most
similar pairs of a layer become one token each.

Shapes: B batch, M image tokens, A and B' tokens of the two halves, r merged pairs, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.merging import MergePairs, PairReducer, check_weighted_pool, match, matching_macs, max_mergeable
from gtp_vit.core.reducer import Method, Source
from gtp_vit.core.schedule import Schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.kernels import Ops, triton_set


@dataclass(frozen=True, kw_only=True, repr=False)
class ToMe(Method):
    """Merge the most similar tokens of each layer, judged by their keys.

    >>> from gtp_vit import ToMe, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), ToMe(r=8)))
    0.932 GMACs
    """

    name: ClassVar[str] = "tome"
    source: ClassVar[Source] = Source("arXiv 2210.09461 (ICLR 2023)", "facebookresearch/ToMe", "CC-BY-NC-4.0")
    attention_inputs: ClassVar[str] = "keys"
    schedule_field: ClassVar[str | None] = "r"
    max_removable: ClassVar[Callable[[int], int] | None] = max_mergeable

    r: Schedule = 8
    """Tokens merged in each layer: a number, one per layer, or a named schedule; at most half of a layer's tokens."""
    prop_attn: bool = True
    """Let attention favour large tokens by log size. Off the shelf, switch it off for MAE-style models."""
    weighted_pool: bool = False
    """Weigh tokens by their size where the head averages them, as ToMe does for MAE; only in the model's forward, as
    `forward_features` returns the tokens as they are."""

    def build(self, vit: ViTInfo) -> ToMeReducer:
        if self.weighted_pool:
            check_weighted_pool(vit)
        return ToMeReducer(self, vit)


class ToMeReducer(PairReducer):
    """ToMe in a forward pass."""

    def reduce(self, attention: LayerAttention) -> Tokens:
        tokens = attention.tokens
        removed = self.removals_of(tokens)[attention.layer]
        if removed == 0 or tokens.ops is not Ops.TRITON:
            return super().reduce(attention)
        keys, norm = attention.keys, attention.mlp_norm
        inputs = (tokens.x, attention.branch(), tokens.size)
        merged = triton_set.merge_similar(inputs, keys, removed, self.vit.class_token, norm)
        return tokens.replace(
            x=merged.x,
            cell=tokens.cell.gather(1, merged.keep),
            token_id=None if tokens.token_id is None else tokens.token_id.gather(1, merged.keep),
            size=merged.size,
            owner=tokens.owners_after(merged.keep, merged.drop, merged.target),
            normed=None if norm.weight is None else merged.normed,
        )

    def pairs(self, layer: int, tokens: Tokens, keys: Tensor, removed: int) -> MergePairs:
        return match(keys, tokens.prefix, removed, self.vit.class_token)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        return sum(matching_macs(self.vit, step) for step in forward_pass.reducing if step.keys > step.out)
