"""MCTF: multi-criteria token fusion. Similar, unimportant and small tokens attract each other and merge.

It merges before the attention of a block, on the map of that same block ("one step ahead"): queries, keys and map are
computed for all tokens, values and all that follows only for those that are left. A token's importance is the mean of
its column of the map, over all queries. Merging goes both ways between the tokens at even and at odd places, with the
same attractions, so a token may move on with the one it has been merged into.

Settings, the forward pass, then its steps.

Shapes: B batch, H heads, N tokens, M image tokens, K kept, P merged, A and B' tokens at even and odd places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.merging import MergePairs, average, averaging_macs, num_bipartite_pairs
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule, even_schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import check_name, check_range
from gtp_vit.kernels import reference
from gtp_vit.tensors import argsort_descending, full_precision, select_rows, sorted_ascending, with_prefix_rows

Pooling = Literal["importance", "size", "max", "mean"]
MIN_TOKENS_LEFT = 9  # image tokens that always stay: the original's 10 with the class token


def max_fusible(tokens: int) -> int:
    """The largest number of these tokens that can merge: half, and not the last nine."""
    return max(min(tokens // 2, tokens - MIN_TOKENS_LEFT), 0)


@dataclass(frozen=True, kw_only=True, repr=False)
class MCTF(Method):
    """Merge tokens that are similar, unimportant and small, judged by the attention that is about to use them.

    >>> from gtp_vit import MCTF, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), MCTF(r=8)))
    0.934 GMACs
    """

    name: ClassVar[str] = "mctf"
    source: ClassVar[Source] = Source("arXiv 2403.10030 (CVPR 2024)", "mlvlab/MCTF", "MIT")
    attention_inputs: ClassVar[str] = "the whole map; column sums with one_step_ahead=0"
    schedule_field: ClassVar[str | None] = "r"
    max_removable: ClassVar[Callable[[int], int] | None] = max_fusible

    r: Schedule = "after:1:16"
    """Tokens merged in each layer: a number, one per layer, or a named schedule; at most half of a layer's tokens, and
    nine stay. The original's fast setting, r = 0.35 in three layers, is "keep:0.65:3:6:9"."""
    one_step_ahead: int = 1
    """1: merge before attention, by its map, and merge the map; 2: compute the map again; 0: merge after the MLP."""
    tau_sim: float = 1.0
    """Attraction is similarity to the power 1 / tau_sim, times the next two; 0 leaves a factor out."""
    tau_info: float = 20.0
    """The inverse importance of both tokens to the power 1 / tau_info."""
    tau_size: float = 40.0
    """The inverse size of both tokens to the power 1 / tau_size."""
    bidirectional: bool = True
    """Merge half of the tokens from even into odd places, then half from odd into even ones; else all of the former."""
    pooling: Pooling = "importance"
    """What merged tokens become: their mean weighted by importance times size, or by size, their plain mean, or the
    largest of their features, channel by channel."""
    prop_attn: bool = True
    """Let attention favour large tokens by log size."""

    def build(self, vit: ViTInfo) -> MCTFReducer:
        check_range("one_step_ahead", self.one_step_ahead, 0, 2, integer=True)
        for name in ("tau_sim", "tau_info", "tau_size"):
            check_range(name, getattr(self, name), 0, 1000)
        check_name("pooling", self.pooling, get_args(Pooling))
        return MCTFReducer(self, vit)

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> MCTF:
        """The same number in every layer but the first; and but the last, where merging would only cost."""
        last = int(not vit.head_reads_image_tokens and vit.depth > 2)
        layers = max(vit.depth - 1 - last, 1)
        plan = even_schedule(strength, layers, vit.image_tokens)
        plan = (plan,) * layers if isinstance(plan, int) else plan
        return cls(r=(*(0,) * (vit.depth - layers - last), *plan, *(0,) * last))


class MCTFReducer(Reducer):
    """MCTF in a forward pass. Tokens that stay come first from even places, then from odd ones by their attraction."""

    drops_patches = False

    def __init__(self, method: MCTF, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.plan = self.removals(vit.grid)

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        layers, ahead = [], self.method.one_step_ahead
        for step in super().steps(grid):
            if step.keys == step.out:
                layers.append(step)
            elif ahead == 0:
                layers.append(LayerTokens(step.keys, step.keys, step.keys, step.out))
            else:
                layers.append(LayerTokens(*(step.out,) * 4, map_tokens=step.keys if ahead == 1 else 0))
        return tuple(layers)

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        by_size = self._size_bias(tokens)
        return super().adjust(layer, tokens) if by_size.key_weights is None else by_size

    def _size_bias(self, tokens: Tokens) -> Adjustments:
        return Adjustments(tokens.key_sizes if self.method.prop_attn else None)

    def add_and_reduce(self, attention: LayerAttention) -> Tokens:
        """With one_step_ahead: merge by the map of all tokens, then go on with those that are left."""
        tokens, layer = attention.tokens, attention.layer
        if not self.method.one_step_ahead or not self.removals_of(tokens)[layer]:
            return super().add_and_reduce(attention)
        probs = attention.map_only()
        with torch.no_grad():
            importance = probs.mean(dim=(1, 2))[:, tokens.prefix :].float()
            pairs, shares = self._match(layer, tokens, importance)
        merged = self._merge(tokens, pairs, *shares)
        again = self.method.one_step_ahead == 2  # is the map computed again?
        attention.replace_tokens(merged, self._size_bias(merged) if again else PLAIN)
        if again:
            return attention.add()
        recorded = RecordedMap(probs, tokens.prefix, pairs, *shares[:2])
        queries = tokens.prefix if attention.prefix_only else None
        output = output_from_max_rows if self.method.pooling == "max" else output_from_merged_map
        return attention.add(output(recorded, attention.values_only(), queries))

    def reduce(self, attention: LayerAttention) -> Tokens:
        """With one_step_ahead=0: importance is known now, and tokens merge after the MLP."""
        if not self.removals_of(attention.tokens)[attention.layer]:
            return attention.add()
        column_sums = attention.statistics("column_sums", heads="mean").column_sums
        return attention.add().replace(method_state=column_sums)

    def after(self, layer: int, tokens: Tokens) -> Tokens:
        if tokens.method_state is None:
            return tokens
        with torch.no_grad():
            pairs, shares = self._match(layer, tokens, tokens.method_state)
        return self._merge(tokens.replace(method_state=None), pairs, *shares)

    def _match(
        self, layer: int, tokens: Tokens, importance: Tensor
    ) -> tuple[MergePairs, tuple[Tensor, Tensor, Tensor]]:
        """The tokens that merge, and how much of each: weights [B, K, P] and [B, K], and sizes afterwards, [B, K]."""
        importance, method = importance.clamp(min=1e-12), self.method
        factor = torch.ones_like(importance)
        if method.tau_info:
            factor = factor * importance.pow(-1 / method.tau_info)
        if method.tau_size and tokens.size is not None:
            factor = factor * tokens.size.pow(-1 / method.tau_size)
        removed = self.removals_of(tokens)[layer]
        pairs = match_both_ways(tokens.image, factor, method.tau_sim, tokens.prefix, removed, method.bidirectional)
        weights, retain, size = average(pairs, tokens.sizes)
        if method.pooling == "importance":
            weights, retain, _ = average(pairs, importance * tokens.sizes)
        elif method.pooling != "size":
            weights, retain, _ = average(pairs, torch.ones_like(importance))
        return pairs, (weights, retain, size)

    def _merge(self, tokens: Tokens, pairs: MergePairs, weights: Tensor, retain: Tensor, size: Tensor) -> Tokens:
        merged = tokens.merge(pairs.keep, pairs.drop, weights, size, retain)
        return merged.replace(x=group_max(tokens.x, tokens.prefix, pairs)) if self.method.pooling == "max" else merged

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        total, ahead, before = 0, self.method.one_step_ahead, forward_pass.grid[0] * forward_pass.grid[1]
        # Merging before attention matters in a shortened block, too.
        steps = forward_pass.steps if ahead else forward_pass.reducing
        for step, cost in zip(steps, forward_pass.blocks, strict=False):
            if before > step.out:
                total += num_bipartite_pairs(self.vit, before) * self.vit.dim
                total += averaging_macs(self.vit, step._replace(keys=before))
                if ahead == 2:
                    total += cost.map_of(self.vit.prefix + before)
                else:
                    total += self._reused_map(step, short=forward_pass.shortened and step is forward_pass.steps[-1])
            before = step.out
        return total

    def _reused_map(self, step: LayerTokens, *, short: bool) -> int:
        """The cost of reusing a map: its product with the values is of all tokens."""
        if not step.map_tokens or self.method.pooling == "max":
            return 0
        width, prefix, removed = self.vit.heads * self.vit.head_dim, self.vit.prefix, step.map_tokens - step.out
        if short:
            return prefix * removed * width
        before, after = prefix + step.map_tokens, prefix + step.out
        return (before**2 - after**2) * width


def match_both_ways(
    image: Tensor, factor: Tensor, tau_sim: float, prefix: int, r: int, bidirectional: bool
) -> MergePairs:
    """The r image tokens that merge, and into which.

    Args:
        image: features of the image tokens, [B, M, C].
        factor: of each token, [B, M]: attraction is the product of both factors and the similarity.
        tau_sim: the similarity (cosine + 1) / 2 has the power 1 / tau_sim; 0 = it is left out.
        prefix: tokens before them, which shift even and odd and never merge.
        r: how many tokens merge.
        bidirectional: half of them go from even to odd places, and then half from odd to even; else all the former.
    """
    places = torch.arange(image.shape[1], device=image.device)
    even, odd = slice(prefix % 2, None, 2), slice(1 - prefix % 2, None, 2)
    attraction = factor[:, even].unsqueeze(2) * factor[:, odd].unsqueeze(1)  # [B, A, B']
    if tau_sim:
        with full_precision(image):
            unit = F.normalize(image.float(), dim=-1, eps=1e-12)
            similarity = ((unit[:, even] @ unit[:, odd].transpose(1, 2) + 1) / 2).clamp(min=0)
        attraction = attraction * (similarity if tau_sim == 1 else similarity.pow(1 / tau_sim))
    forth = r // 2 if bidirectional else r
    best, partner = attraction.max(dim=2)
    order = argsort_descending(best)
    drop, stay = order[:, :forth], sorted_ascending(order[:, forth:])
    count, others = stay.shape[1], attraction.shape[2]
    if not bidirectional:
        keep = torch.cat([places[even][stay], places[odd].expand(image.shape[0], -1)], dim=1)
        return MergePairs(keep, places[even][drop], partner.gather(1, drop) + count)
    best_back, partner_back = select_rows(attraction, stay).max(dim=1)  # [B, B']
    order = argsort_descending(best_back)
    drop_back, stay_back = order[:, : r - forth], order[:, r - forth :]
    receivers = partner_back.gather(1, drop_back)
    # Where the tokens at odd places are afterwards: those that went there go on with them.
    along = torch.arange(count, count + stay_back.shape[1], device=image.device).expand_as(stay_back)
    place = torch.zeros_like(partner_back).scatter(1, stay_back, along).scatter(1, drop_back, receivers)
    assert place.shape[1] == others
    return MergePairs(
        keep=torch.cat([places[even][stay], places[odd][stay_back]], dim=1),
        drop=torch.cat([places[even][drop], places[odd][drop_back]], dim=1),
        target=torch.cat([place.gather(1, partner.gather(1, drop)), receivers], dim=1),
    )


class RecordedMap(NamedTuple):
    """A map, and how its tokens have merged since."""

    probs: Tensor  # [B, H, N, N]
    prefix: int
    pairs: MergePairs
    weights: Tensor  # [B, K, P]: what each kept token takes of each that goes
    retain: Tensor  # [B, K]: what it keeps of itself


def output_from_merged_map(recorded: RecordedMap, v: Tensor, queries: int | None) -> Tensor:
    """The output of attention, [B, Q, H D], by a map whose columns are summed over groups and whose rows are averaged.

    Neither is done to the map, which is large: summing columns is to give each old token the value of its group, and
    averaging rows is to average outputs.
    """
    probs, prefix, pairs, weights, retain = recorded
    values = v.gather(2, _row_after_merging(pairs, prefix)[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3]))
    if queries is not None:  # of prefix tokens, which do not merge
        return reference.weighted_values(probs[:, :, :queries], values)
    out = reference.weighted_values(probs, values)
    own = select_rows(out, with_prefix_rows(pairs.keep, prefix)) * F.pad(retain, (prefix, 0), value=1.0).unsqueeze(
        2
    ).to(out)
    # Each token that goes is in one row of the weights: additions, where a product would count as work.
    incoming = select_rows(out, pairs.drop + prefix) * weights.sum(dim=1).unsqueeze(2).to(out)
    return own.scatter_add(1, (pairs.target + prefix).unsqueeze(2).expand_as(incoming), incoming)


def output_from_max_rows(recorded: RecordedMap, v: Tensor, queries: int | None) -> Tensor:
    """The same with the largest of a group's rows, entry by entry, in place of their average."""
    probs, prefix, pairs, _, _ = recorded
    places = _row_after_merging(pairs, prefix)[:, None, None].expand(-1, *probs.shape[1:3], -1)
    columns = probs.new_zeros(*probs.shape[:3], v.shape[2]).scatter_add(3, places, probs)
    rows = (
        group_max(columns.transpose(1, 2).flatten(2), prefix, pairs).unflatten(2, (probs.shape[1], -1)).transpose(1, 2)
    )
    return reference.weighted_values(rows[:, :, :queries], v)


def _row_after_merging(pairs: MergePairs, prefix: int) -> Tensor:
    """For each token, prefix tokens included, its place or that of its group among those that are left, [B, N]."""
    keep, count = pairs.keep, pairs.keep.shape[1] + pairs.drop.shape[1]
    own = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
    place = keep.new_zeros(keep.shape[0], count).scatter(1, keep, own).scatter(1, pairs.drop, pairs.target)
    return with_prefix_rows(place, prefix)


def group_max(values: Tensor, prefix: int, pairs: MergePairs) -> Tensor:
    """Kept rows of `values` [B, N, D], each the largest of its group entry by entry; the prefix as it is."""
    rows = select_rows(values, with_prefix_rows(pairs.keep, prefix))
    for number in range(pairs.drop.shape[1]):  # engines have no maximum by index
        place = (pairs.target[:, number : number + 1] + prefix).unsqueeze(2).expand(-1, -1, values.shape[2])
        offered = select_rows(values, pairs.drop[:, number : number + 1] + prefix)
        rows = rows.scatter(1, place, torch.maximum(rows.gather(1, place), offered))
    return rows
