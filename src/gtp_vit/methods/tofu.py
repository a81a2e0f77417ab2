"""ToFu: token fusion. ToMe's pairs, but early layers drop a pair's first token, and late layers average the two and
bring the mean to the largest of their norms.

Early MLPs are far from linear, says the paper: between two tokens there may be nothing they know. It has no released
code, and PiToMe's and OpenToMe's "ToFu" is a different one, here `variant="pitome"`.

Shapes: B batch, M image tokens, K kept, r merged pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from gtp_vit.core.merging import MergePairs, PairReducer, match, matching_macs, max_mergeable, num_bipartite_pairs
from gtp_vit.core.reducer import Method, Source
from gtp_vit.core.schedule import Schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import SettingError, check_name, check_range
from gtp_vit.tensors import full_precision

Variant = Literal["paper", "pitome"]
Norm = Literal["mlerp", "mean"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ToFu(Method):
    """Drop the most similar tokens in early layers, merge them in late ones without losing their norm.

    >>> from gtp_vit import ToFu, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), ToFu(r=8)))
    0.930 GMACs
    """

    name: ClassVar[str] = "tofu"
    source: ClassVar[Source] = Source("arXiv 2312.01026 (WACV 2024)", "none released", "none")
    attention_inputs: ClassVar[str] = "keys"
    schedule_field: ClassVar[str | None] = "r"
    max_removable: ClassVar[Callable[[int], int] | None] = max_mergeable

    r: Schedule = 8
    """Tokens removed in each layer: a number, one per layer, or a named schedule; at most half of a layer's tokens."""
    first_merging_layer: int | None = None
    """The first layer that merges, those before it drop; None = half of the depth, as the paper, or one more with
    `variant="pitome"`."""
    norm: Norm = "mlerp"
    """What merged tokens become: their mean brought to the largest norm, or the plain mean."""
    variant: Variant = "paper"
    """As the paper describes it, or as PiToMe's repository does: its mean is divided by the receiver's old norm, not by
    its own."""
    track_sizes: bool = False
    """Average by size and let attention favour large tokens, in the layers that merge; the paper does not say."""

    def build(self, vit: ViTInfo) -> ToFuReducer:
        check_name("variant", self.variant, get_args(Variant))
        check_name("norm", self.norm, get_args(Norm))
        if self.first_merging_layer is not None:
            check_range("first_merging_layer", self.first_merging_layer, 0, vit.depth, integer=True)
        if self.track_sizes and self.variant == "pitome":
            raise SettingError("variant='pitome' keeps no sizes; remove track_sizes, or use variant='paper'")
        return ToFuReducer(self, vit)


class ToFuReducer(PairReducer):
    """ToFu in a forward pass."""

    def __init__(self, method: ToFu, vit: ViTInfo) -> None:
        super().__init__(method, vit)
        self.first_merging_layer = (
            vit.depth // 2 + (method.variant == "pitome")
            if method.first_merging_layer is None
            else method.first_merging_layer
        )
        self.drops_patches = self.first_merging_layer > 0

    def pairs(self, layer: int, tokens: Tokens, keys: Tensor, removed: int) -> MergePairs:
        return match(keys, tokens.prefix, removed, self.vit.class_token)

    def merge(self, layer: int, tokens: Tokens, pairs: MergePairs) -> Tokens:
        if layer < self.first_merging_layer:
            return tokens.keep(pairs.keep)
        merged = super().merge(layer, tokens, pairs)
        merged = merged if self.method.track_sizes else merged.replace(size=None)
        return merged if self.method.norm == "mean" else self._with_longer_norm(tokens, merged, pairs)

    def _with_longer_norm(self, before: Tokens, merged: Tokens, pairs: MergePairs) -> Tokens:
        """Merged tokens brought to the largest norm of those they were merged from; the others as they are."""
        with torch.no_grad(), full_precision(before.x):
            length = before.image.float().norm(dim=2)
            own, merging = length.gather(1, pairs.keep), length.gather(1, pairs.drop)
            # [B, K, r]: a product with zeros and ones, as engines have no maximum by index
            places = torch.arange(pairs.keep.shape[1], device=own.device).unsqueeze(1)
            visits = pairs.target.unsqueeze(1) == places
            longest = torch.maximum(own, (visits * merging.unsqueeze(1)).amax(dim=2))
            below = own if self.method.variant == "pitome" else merged.image.float().norm(dim=2)
            factor = torch.where(visits.any(dim=2), longest / below.clamp(min=1e-12), 1.0)
        image = merged.image * factor.unsqueeze(2).to(merged.x.dtype)
        return merged.replace(x=torch.cat([merged.x[:, : merged.prefix], image], dim=1))

    @property
    def weighs_keys(self) -> bool:
        return True

    def finish(self, tokens: Tokens, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(tokens.x)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        total = 0
        for layer, step in enumerate(forward_pass.reducing):
            if step.keys > step.out:
                merges = layer >= self.first_merging_layer
                total += (
                    matching_macs(self.vit, step)
                    if merges
                    else num_bipartite_pairs(self.vit, step.keys) * self.vit.head_dim
                )
        return total
