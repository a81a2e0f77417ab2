"""Shared by methods that merge tokens: pairs of similar tokens, averages weighted by size.

Shapes: B batch, M image tokens, r merged pairs, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.attention import Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Reducer
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import LayerTokens, ViTInfo
from gtp_vit.errors import SettingError
from gtp_vit.tensors import argsort_descending, counts_launches, full_precision, sorted_ascending


class MergePairs(NamedTuple):
    """Indices of the image tokens that stay, of those that go, and of the one that each of these merges into."""

    keep: Tensor  # [B, M - r]: the rest of the first half, then the whole second half
    drop: Tensor  # [B, r]
    target: Tensor  # [B, r]: for each of them, the index in `keep` of the token it merges into


def match(metric: Tensor, prefix: int, r: int, keep_order: bool) -> MergePairs:
    """The r most similar pairs of tokens at even and odd places of the sequence.

    Args:
        metric: features that similarity is computed from, [B, M, D], image tokens only.
        prefix: tokens before them, which shift even and odd and never merge.
        r: pairs to merge.
        keep_order: do tokens of the first half that stay keep their order? Else the most similar come first. As the
            order decides the next layer's halves, it matters: ToMe keeps it on models with a class token.
    """
    count = metric.shape[1]
    places = torch.arange(count, device=metric.device)
    first, second = places[prefix % 2 :: 2], places[1 - prefix % 2 :: 2]
    with full_precision(metric):
        unit = F.normalize(metric.float(), dim=-1, eps=1e-12)
        best, partner = (unit[:, prefix % 2 :: 2] @ unit[:, 1 - prefix % 2 :: 2].transpose(1, 2)).max(dim=-1)
    order = argsort_descending(best)
    merged, rest = first[order].split([r, order.shape[1] - r], dim=1)
    rest = sorted_ascending(rest) if keep_order else rest
    keep = torch.cat([rest, second.expand(rest.shape[0], -1)], dim=1)
    return MergePairs(keep, merged, partner.gather(1, order[:, :r]) + rest.shape[1])


def mean_keys(attention: LayerAttention) -> Tensor:
    """The features that similarity is computed from: keys averaged over the heads, in float32, [B, M, D]."""
    keys = attention.keys
    return keys.mean(dim=1, dtype=torch.promote_types(keys.dtype, torch.float32))


def average(pairs: MergePairs, size: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of a size-weighted mean: what each kept token takes, what it retains, in `dtype`, and its new size.

    Sizes [B, M] -> [B, M - r, r], [B, M - r], [B, M - r].
    """
    own, incoming = size.gather(1, pairs.keep), size.gather(1, pairs.drop)
    weights = torch.zeros(*own.shape, incoming.shape[1], device=size.device)
    if counts_launches(size):
        # Fewer calls; and sums along rows: a scatter adds in any order on a GPU, with other bits in every run.
        taken = weights.scatter_(1, pairs.target.unsqueeze(1), incoming.unsqueeze(1))
        parts = torch.cat([own.unsqueeze(2), taken], dim=2)
        total = parts.sum(dim=2)
        weights = (parts / total.unsqueeze(2)).to(dtype)
        return weights[..., 1:], weights[..., 0], total
    total = own.scatter_add(1, pairs.target, incoming)
    share = incoming / total.gather(1, pairs.target)
    weights = weights.scatter(1, pairs.target.unsqueeze(1), share.unsqueeze(1))
    return weights.to(dtype), (own / total).to(dtype), total


class PairReducer(Reducer):
    """Merges tokens with similar keys; a method says which, by `pairs`.

    Its settings have prop_attn and weighted_pool, or it has `weighs_keys` and `finish` of its own.
    """

    drops_patches = False

    def __init__(self, method: Any, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.plan = self.removals(vit.grid)

    @property
    def weighs_keys(self) -> bool:
        """Does attention favour large tokens?"""
        return bool(self.method.prop_attn)

    def pairs(self, layer: int, tokens: Tokens, keys: Tensor, removed: int) -> MergePairs:
        """The pairs that remove `removed` tokens, by the mean of each token's keys [B, M, D]."""
        raise NotImplementedError

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        weights = tokens.key_sizes if self.weighs_keys else None
        return super().adjust(layer, tokens) if weights is None else Adjustments(weights)

    def reduce(self, attention: LayerAttention) -> Tokens:
        tokens, layer = attention.add(), attention.layer
        removed = self.removals_of(tokens)[layer]
        if removed == 0:
            return tokens
        with torch.no_grad():
            pairs = self.pairs(layer, tokens, mean_keys(attention), removed)
        return self.merge(layer, tokens, pairs)

    def merge(self, layer: int, tokens: Tokens, pairs: MergePairs) -> Tokens:
        """The tokens after these pairs became one each: their mean, weighted by size."""
        with torch.no_grad():
            weights, retain, size = average(pairs, tokens.sizes, tokens.x.dtype)
        return tokens.merge(pairs.keep, pairs.drop, weights, size, retain)

    def finish(self, tokens: Tokens, norm: Callable[[Tensor], Tensor]) -> Tensor:
        x = norm(tokens.x)
        return weighted_for_pool(x, tokens) if self.method.weighted_pool else x


def check_weighted_pool(vit: ViTInfo) -> None:
    """Refuse `weighted_pool` where the head does not average the image tokens."""
    if not vit.head_averages_image_tokens:
        raise SettingError("weighted_pool needs a head that averages the image tokens, and this model's does not")


def weighted_for_pool(x: Tensor, tokens: Tokens) -> Tensor:
    """Normed features x [B, N, C], scaled so that the head's plain mean weighs tokens by their size."""
    if tokens.size is None:
        return x
    weights = tokens.size / tokens.size.mean(dim=1, keepdim=True)
    return x * F.pad(weights, (tokens.prefix, 0), value=1.0).unsqueeze(-1).to(x.dtype)


def max_mergeable(tokens: int) -> int:
    """The largest number of these tokens that can merge: half."""
    return tokens // 2


def matching_macs(vit: ViTInfo, step: LayerTokens) -> int:
    """Similarities of the two halves, and the average as a product of matrices."""
    return num_bipartite_pairs(vit, step.keys) * vit.head_dim + averaging_macs(vit, step)


def num_bipartite_pairs(vit: ViTInfo, tokens: int) -> int:
    """The number of pairs of image tokens at even and odd positions."""
    second = (tokens + (vit.prefix % 2)) // 2
    return (tokens - second) * second


def averaging_macs(vit: ViTInfo, step: LayerTokens) -> int:
    """The average as a product of matrices."""
    return (step.out + vit.prefix) * (step.keys - step.out) * vit.dim
