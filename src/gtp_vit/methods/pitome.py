"""PiToMe: tokens in large groups of similar ones have a high energy and may merge; isolated ones are protected.

The energy of a token is the mean of ELU(cosine - margin) over all tokens, so only those within the margin count. The
margin shrinks from layer to layer. In energy mode the 2 r tokens of the highest energy are paired; in bsm mode all
tokens are, ranked by energy, and the r most similar pairs merge.

Shapes: B batch, M image tokens, r merged pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.merging import MergePairs, PairReducer, averaging_macs, check_weighted_pool, max_mergeable
from gtp_vit.core.reducer import Method, Source
from gtp_vit.core.schedule import Schedule, keep_ratio_at
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import check_name, check_range
from gtp_vit.tensors import argsort_descending, full_precision, select_rows

ModeOrder = Literal["bsm_first", "energy_first", "bsm", "energy"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PiToMe(Method):
    """Merge tokens that many others resemble, and protect those that few do.

    >>> from gtp_vit import PiToMe, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), PiToMe(r=8)))
    0.948 GMACs
    """

    name: ClassVar[str] = "pitome"
    source: ClassVar[Source] = Source("arXiv 2405.16148 (NeurIPS 2024)", "hchautran/PiToMe", "CC-BY-NC-4.0")
    attention_inputs: ClassVar[str] = "keys"
    schedule_field: ClassVar[str | None] = "r"
    max_removable: ClassVar[Callable[[int], int] | None] = max_mergeable

    r: Schedule = "ratio:0.9125"
    """Tokens merged in each layer: a number, one per layer, or a named schedule; at most half of a layer's tokens. The
    original keeps the same share in every layer, "ratio:0.95"."""
    mode_order: ModeOrder = "bsm_first"
    """Which layers use which mode: bsm in the first half and energy in the second, as the original for DeiT, the other
    way round, as it does for MAE, or one of them in all."""
    margin: float = 0.75
    """The first layer's margin; the original's is 0.95 or 0.9 for CLIP."""
    margin_decay: float | None = None
    """How far the margin falls, evenly, from the first layer to one behind the last; None = to 0."""
    prop_attn: bool = False
    """Let attention favour large tokens by log size; the original does not."""
    weighted_pool: bool = False
    """Weigh tokens by their size where the head averages them, as the original does for MAE."""

    def build(self, vit: ViTInfo) -> PiToMeReducer:
        check_name("mode_order", self.mode_order, get_args(ModeOrder))
        check_range("margin", self.margin, -1, 1)
        if self.margin_decay is not None:
            check_range("margin_decay", self.margin_decay, 0, 2)
        if self.weighted_pool:
            check_weighted_pool(vit)
        return PiToMeReducer(self, vit)

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> PiToMe:
        """Settings that keep the same share in every layer, rounded so that more strength never leaves more tokens."""
        rate, left, plan = keep_ratio_at(strength), vit.image_tokens, []
        for layer in range(vit.depth):
            after = max(math.ceil(vit.image_tokens * rate ** (layer + 1)), left - max_mergeable(left))
            plan.append(left - after)
            left = after
        return cls(r=tuple(plan))


class PiToMeReducer(PairReducer):
    """PiToMe in a forward pass."""

    def __init__(self, method: PiToMe, vit: ViTInfo) -> None:
        super().__init__(method, vit)
        half = (vit.depth + 1) // 2
        by_name = {
            "bsm_first": (True, False),
            "energy_first": (False, True),
            "bsm": (True,) * 2,
            "energy": (False,) * 2,
        }
        first, second = by_name[method.mode_order]
        self.bsm = (first,) * half + (second,) * (vit.depth - half)
        falls = method.margin if method.margin_decay is None else method.margin_decay
        self.margins = tuple(method.margin - falls * layer / vit.depth for layer in range(vit.depth))

    def pairs(self, layer: int, tokens: Tokens, keys: Tensor, removed: int) -> MergePairs:
        return match_by_energy(keys, removed, self.margins[layer], bsm=self.bsm[layer])

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        total = 0
        for layer, step in enumerate(forward_pass.reducing):
            if step.keys > step.out:
                paired = step.keys if self.bsm[layer] else 2 * (step.keys - step.out)
                cosines = step.keys**2 + paired // 2 * ((paired + 1) // 2)
                total += cosines * self.vit.head_dim + averaging_macs(self.vit, step)
        return total


def match_by_energy(metric: Tensor, r: int, margin: float, *, bsm: bool) -> MergePairs:
    """The pairs that merge, of image tokens with the features `method_keys` [B, M, D].

    Args:
        metric: features that similarity is computed from.
        r: pairs to merge.
        margin: cosines below it hardly count for the energy.
        bsm: pair all tokens and merge the r most similar pairs; else pair the 2 r tokens of the highest energy.
    """
    with full_precision(metric):
        unit = F.normalize(metric.float(), dim=-1, eps=1e-12)
        # In place, and cosines of the pairs anew: memory for more maps of all tokens costs more than computing them.
        energy = F.elu((unit @ unit.transpose(1, 2)).sub_(margin), inplace=True).mean(dim=2)
        order = argsort_descending(energy)
        paired = order if bsm else order[:, : 2 * r]
        first, second = paired[:, 0::2], paired[:, 1::2]
        best, partner = (select_rows(unit, first) @ select_rows(unit, second).transpose(1, 2)).max(dim=2)
    if not bsm:
        protected = order[:, 2 * r :]
        return MergePairs(torch.cat([protected, second], dim=1), first, partner + protected.shape[1])
    ranked = argsort_descending(best)
    drop, rest = ranked[:, :r], ranked[:, r:]
    keep = torch.cat([first.gather(1, rest), second], dim=1)
    return MergePairs(keep, first.gather(1, drop), partner.gather(1, drop) + rest.shape[1])
