"""DiffRate-style reduction: each layer drops some tokens of low class attention and merges some more into similar ones.

DiffRate learns how many of each in every layer; here the schedule is given.

Shapes: B batch, M image tokens, K kept, T merged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule, removals, scale_schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import ScheduleError
from gtp_vit.tensors import argsort_descending, full_precision, select_rows


@dataclass(frozen=True, kw_only=True, repr=False)
class DiffRate(Method):
    """Sort tokens by class attention; drop the last ones, and merge those before them into the most similar ones.

    >>> from gtp_vit import DiffRate, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), DiffRate(prune=3, merge=5)))
    0.928 GMACs
    """

    name: ClassVar[str] = "diffrate"
    source: ClassVar[Source] = Source("arXiv 2305.17997 (ICCV 2023)", "OpenGVLab/DiffRate", "no licence given")
    needs_class_token: ClassVar[bool] = True
    attention_inputs: ClassVar[str] = "class row"

    prune: Schedule = "peak:3"
    """Tokens dropped in each layer: a number, one per layer, or a named schedule."""
    merge: Schedule = "peak:5"
    """Tokens merged in each layer, besides those dropped."""

    @classmethod
    def from_kept_counts(cls, prune_kept_num: list[int], merge_kept_num: list[int], tokens: int = 197) -> DiffRate:
        """Settings from the original's lists: how many of `tokens` are left after dropping and merging in each layer.

        >>> DiffRate.from_kept_counts([197, 190, 150], [196, 180, 150])
        DiffRate(prune=(0, 6, 30), merge=(1, 10, 0))
        """
        if len(prune_kept_num) != len(merge_kept_num) or not prune_kept_num:
            raise ScheduleError(
                f"the lists have {len(prune_kept_num)} and {len(merge_kept_num)} entries; give one per layer in each"
            )
        before = [tokens, *merge_kept_num]
        prune = tuple(b - p for b, p in zip(before, prune_kept_num, strict=False))
        merge = tuple(p - m for p, m in zip(prune_kept_num, merge_kept_num, strict=True))
        if min(*prune, *merge) < 0:
            raise ScheduleError(
                f"tokens kept rise from one layer to the next, from {tokens} tokens on; they can only fall"
            )
        return cls(prune=prune, merge=merge)

    def build(self, vit: ViTInfo) -> DiffRateReducer:
        self.check_class_token(vit)
        return DiffRateReducer(self, vit)

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> DiffRate:
        """Settings that merge and drop in the proportions of the defaults."""
        steps = round(strength * max(int(16 * (vit.image_tokens - 1) / vit.depth) - 1, 0))
        return cls(prune=f"peak:{steps * 3 / 128}", merge=f"peak:{steps * 5 / 128}")

    def scaled(self, vit: ViTInfo, fraction: float) -> DiffRate:
        prune, merge = (
            scale_schedule(schedule, fraction, vit.depth, vit.image_tokens) for schedule in (self.prune, self.merge)
        )
        return dataclasses.replace(self, prune=prune, merge=merge)


class DiffRateReducer(Reducer):
    """DiffRate in a forward pass. Tokens are sorted by class attention in every layer that reduces."""

    def __init__(self, method: DiffRate, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.removals_of_both = self.plans(vit.grid)

    def plans(self, grid: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens dropped and tokens merged in each layer."""
        patches, depth = grid[0] * grid[1], self.vit.depth
        prune = removals(self.method.prune, depth, patches)
        merge = removals(self.method.merge, depth, patches)
        if sum(prune) + sum(merge) >= patches:
            raise ScheduleError(
                f"prune and merge remove {sum(prune)} + {sum(merge)} tokens, but there are only {patches} image tokens "
                "and one must stay"
            )
        return prune, merge

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        return tuple(p + m for p, m in zip(*self.plans(grid), strict=True))

    def _plan(self, layer: int, tokens: Tokens) -> tuple[int, int]:
        prune, merge = self.removals_of_both if tokens.grid == self.vit.grid else self.plans(tokens.grid)
        return prune[layer], merge[layer]

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        if tokens.size is not None:
            return Adjustments(tokens.key_sizes)
        return PLAIN if any(self._plan(layer, tokens)) else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        dropped, merged = self._plan(attention.layer, attention.tokens)
        if dropped + merged == 0:
            return attention.add()
        row = attention.statistics("class_row", heads="mean").class_row
        assert row is not None
        tokens, order = attention.add(), argsort_descending(row)
        left = order.shape[1] - dropped - merged
        if merged == 0:
            return tokens.keep(order[:, :left])
        keep, drop = order[:, :left], order[:, left : left + merged]
        with torch.no_grad(), full_precision(tokens.x):
            unit = F.normalize(tokens.image.float(), dim=-1)
            similarity, target = (select_rows(unit, drop) @ select_rows(unit, keep).transpose(1, 2)).max(dim=2)
            chosen = torch.zeros(*keep.shape, merged, device=keep.device).scatter(1, target.unsqueeze(1), 1.0)
            retain = 1 / (1 + chosen.sum(dim=2))  # a plain mean, whatever the sizes
            size = tokens.sizes
            # Opposite tokens add nothing: a size must stay positive.
            size = size.gather(1, keep).scatter_add(1, target, size.gather(1, drop) * similarity.clamp(min=0))
        return tokens.merge(keep, drop, chosen * retain.unsqueeze(2), size, retain)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        total = 0
        for merged, step in zip(self.plans(forward_pass.grid)[1], forward_pass.reducing, strict=False):
            total += self.class_row_macs(step.keys) if step.keys > step.out else 0
            # similarities, and the mean as a product
            total += (2 * step.out + self.vit.prefix) * merged * self.vit.dim
        return total
