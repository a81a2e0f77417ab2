"""ATS: adaptive token sampling. Each image keeps as many tokens as the distribution of their scores asks for.

A token's score is the class token's attention to it times the length of its value. The scores' cumulative distribution
is sampled at equal steps, and tokens that no step hits are gone: rows of the attention map that are never computed.

Images of a batch keep different numbers of tokens. The shorter ones are padded with tokens of size 0, which attention
ignores, so an image's result does not depend on the rest of the batch.

Shapes: B batch, M image tokens, K kept, Y sampling steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from gtp_vit.core.attention import PLAIN, QKV, Adjustments, attend, class_row
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule, check_layers, keep_ratio_at, removals, scale_schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import SettingError, check_name
from gtp_vit.tensors import argsort_ascending, is_exporting, split_by_score, with_prefix_rows

Minimum = Literal["lowest", "zero"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ATS(Method):
    """Keep the tokens that equal steps through the cumulative distribution of their scores hit.

    >>> from gtp_vit import ATS, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), ATS(budget=8)))
    0.916 GMACs
    """

    name: ClassVar[str] = "ats"
    source: ClassVar[Source] = Source("arXiv 2111.15667 (ECCV 2022)", "adaptivetokensampling/ATS", "Apache-2.0")
    needs_class_token: ClassVar[bool] = True
    fixed_shapes: ClassVar[str] = "no; yes with a budget"
    attention_inputs: ClassVar[str] = "class row and values"

    layers: tuple[int, ...] | None = None
    """Layers that sample, counted from 0; by default from one quarter of the depth to the end: 3 to 11 of 12."""
    cdf_min: Minimum = "lowest"
    """Where the distribution begins: at the lowest score, as the original does for an image by itself, or at zero from
    the second sampling layer on, as it does in practice in a large batch."""
    budget: Schedule | None = None
    """Remove exactly this many tokens in each layer, for fixed shapes and export: sampled with as many steps as tokens
    stay, completed by the highest scores. Replaces `layers`."""

    def build(self, vit: ViTInfo) -> ATSReducer:
        self.check_class_token(vit)
        check_name("cdf_min", self.cdf_min, get_args(Minimum))
        if self.layers is not None and self.budget is not None:
            raise SettingError(
                "ATS has layers and a budget; give one of them; a budget also decides which layers sample"
            )
        if self.budget is None and self.layers != () and vit.head_reads_image_tokens:
            raise SettingError(
                "ATS keeps a different number of tokens in each image, and this model's head reads image tokens, which "
                "would include padding; use ATS(budget=...), which keeps a fixed number"
            )
        return ATSReducer(self, vit)

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> ATS:
        """Settings with a budget: without one the number of tokens is not known."""
        layers = ":".join(str(layer) for layer in range(vit.depth // 4, vit.depth))
        return cls(budget=f"keep:{keep_ratio_at(strength)}:{layers}")

    def scaled(self, vit: ViTInfo, fraction: float) -> Method:
        if self.budget is None:  # how many tokens stay is the image's choice
            return super().scaled(vit, fraction)
        return dataclasses.replace(self, budget=scale_schedule(self.budget, fraction, vit.depth, vit.image_tokens))


def sample(scores: Tensor, valid: Tensor, steps: int, from_zero: bool) -> Tensor:
    """The tokens hit by equal steps through the cumulative distribution of their scores, [B, M] bool.

    Args:
        scores: scores of the image tokens, [B, M], summing to 1 over the valid ones.
        valid: False for padding, [B, M].
        steps: the number of steps.
        from_zero: does the distribution begin at 0, so that the lowest token may stay?
    """
    order = argsort_ascending(scores.masked_fill(~valid, -1.0))
    real = valid.gather(1, order)
    total = scores.gather(1, order).masked_fill(~real, 0.0).cumsum(dim=1)
    lowest = torch.zeros_like(total[:, :1])
    if not from_zero:
        lowest = total.masked_fill(~real, torch.inf).amin(dim=1, keepdim=True)
    level = (total - lowest) / (total[:, -1:] - lowest)
    start = level.masked_fill(~real | (level <= 0), torch.inf).amin(dim=1, keepdim=True)
    along = torch.arange(steps, device=scores.device) / max(steps - 1, 1)
    steps_at = start + (1 - start) * along  # [B, Y]
    level = level.masked_fill(~real, torch.inf)
    nearest = (steps_at.unsqueeze(2) - level.unsqueeze(1)).abs().argmin(dim=2)
    hit = torch.zeros_like(scores).scatter(1, order.gather(1, nearest), 1.0)
    # The last step hits the highest score, also where one token is left and there are no levels to step through.
    return (hit.scatter(1, order[:, -1:], 1.0) > 0) & valid


class ATSReducer(Reducer):
    """ATS in a forward pass. Padding has size 0."""

    def __init__(self, method: ATS, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        layers = tuple(range(vit.depth // 4, vit.depth)) if method.layers is None else method.layers
        self.layers = check_layers("layers", layers, vit.depth) if method.budget is None else ()
        self.adaptive = bool(self.layers)
        self.plan = self.removals(vit.grid)

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        if self.method.budget is not None:
            return removals(self.method.budget, self.vit.depth, grid[0] * grid[1])
        return (0,) * self.vit.depth

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        if self.adaptive:
            raise SettingError(
                "ATS keeps a different number of tokens in each image: count on images, macs(model, images=...), or "
                "fix it with a budget, ATS(budget=...) or --budget"
            )
        return tuple(LayerTokens(step.keys, step.out, step.out, step.out) for step in super().steps(grid))

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        if self.adaptive and is_exporting():
            raise SettingError(
                "a model that keeps a different number of tokens in each image has no fixed shapes and cannot "
                "be exported; use ATS(budget=...)"
            )
        if tokens.size is not None:
            return Adjustments(tokens.key_sizes)  # attention ignores padding, of size 0
        return PLAIN if self._samples(layer, tokens) else None

    def _samples(self, layer: int, tokens: Tokens) -> bool:
        return layer in self.layers or self.removals_of(tokens)[layer] > 0

    def reduce(self, attention: LayerAttention) -> Tokens:
        """Sample by the class token's row of the map, then compute the output for the tokens that stay."""
        tokens, prefix, projections = attention.tokens, attention.tokens.prefix, attention.qkv
        if not self._samples(attention.layer, tokens):
            return attention.add()
        weights = attention.adjustments.key_weights
        row = class_row(projections, weights, heads="mean", first=prefix)
        keep, left = self._sample(attention.layer, tokens, row, attention.values)
        attention.replace_tokens(left, PLAIN)
        output, _ = attend(select_queries(projections, keep, prefix), Adjustments(weights), ops=tokens.ops)
        return attention.add(output)

    def _sample(self, layer: int, tokens: Tokens, row: Tensor, values: Tensor) -> tuple[Tensor, Tokens]:
        """Indices [B, K] of the image tokens that stay, and those tokens."""
        valid = torch.ones_like(tokens.cell, dtype=torch.bool)
        if tokens.size is not None:
            valid = tokens.size > 0
        length = values.transpose(1, 2).flatten(2).float().norm(dim=2)
        scores = (row * length).masked_fill(~valid, 0.0)
        scores = scores / scores.sum(dim=1, keepdim=True)
        plan = self.removals_of(tokens)
        count, removed = scores.shape[1], plan[layer]
        first = self.layers[0] if self.layers else [bool(number) for number in plan].index(True)
        from_zero = self.method.cdf_min == "zero" and layer > first
        if removed:
            hit = sample(scores, valid, count - removed, from_zero)
            keep, _ = split_by_score(scores + 2 * hit, removed)
            return keep, tokens.keep(keep)
        # As many steps as there are patches, in every layer: fewer are not in the released code.
        hit = sample(scores, valid, tokens.grid[0] * tokens.grid[1], from_zero)
        longest = int(hit.sum(dim=1).amax()) if hit.shape[0] else count
        keep = (~hit).to(torch.uint8).sort(dim=1, stable=True).indices[:, :longest]
        stays = hit.gather(1, keep)
        return keep, tokens.keep(keep).replace(size=stays.float())

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        acting = [
            step for layer, step in enumerate(forward_pass.reducing) if layer in self.layers or step.keys > step.out
        ]
        return sum(self.class_row_macs(step.keys) for step in acting)


def select_queries(qkv: QKV, keep: Tensor, prefix: int) -> QKV:
    """The same with queries of the prefix tokens and of the image tokens `keep` [B, K] only."""
    q, k, v, scale, dropout, bias, metric = qkv
    rows = with_prefix_rows(keep, prefix)[:, None, :, None]
    if bias is not None:
        bias = bias.expand(q.shape[0], -1, -1, -1).gather(2, rows.expand(-1, q.shape[1], -1, k.shape[2]))
    q = q.gather(2, rows.expand(-1, q.shape[1], -1, q.shape[3]))
    return QKV(q, k, v, scale, dropout, bias, metric)
