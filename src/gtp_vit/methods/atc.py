"""ATC: agglomerative token clustering. In each layer the two nearest clusters of tokens join, again and again, until as
many are left as the schedule says; distances to a cluster follow from those to its members.

Shapes: B batch, M image tokens, K kept, P removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.attention import Adjustments
from gtp_vit.core.merging import MergePairs, PairReducer, averaging_macs, check_weighted_pool
from gtp_vit.core.reducer import Method, Source
from gtp_vit.core.schedule import Schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import SettingError, check_name
from gtp_vit.kernels import Checks, Operator, Ops, checks, native, value_checks
from gtp_vit.kernels.arguments import ClusterInputs, Clusters
from gtp_vit.tensors import full_precision, is_exporting, split_by_score

Linkage = Literal["average", "complete", "single"]
LINKAGES = get_args(Linkage)
Variant = Literal["exact", "original"]
MERGED_DISTANCE = 4.0  # the distance of tokens that are NaN; that of opposite ones is 2


@dataclass(frozen=True, kw_only=True, repr=False)
class ATC(Method):
    """Cluster the tokens of each layer by their keys, joining the two nearest clusters until enough are gone.

    >>> from gtp_vit import ATC, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), ATC(r=8)))
    0.945 GMACs
    """

    name: ClassVar[str] = "atc"
    source: ClassVar[Source] = Source("arXiv 2409.11923 (ECCV 2024)", "JoakimHaurum/ATC", "MIT")
    not_exported: ClassVar[str | None] = (
        "atc joins clusters one after the other, a loop that engines do not have, and cannot be exported; use tome or "
        "gtp_plus, or run the model in torch"
    )
    attention_inputs: ClassVar[str] = "keys"
    schedule_field: ClassVar[str | None] = "r"

    r: Schedule = 8
    """Tokens that go in each layer: a number, one per layer, or a named schedule. The original's for DeiT models is
    "geometric:0.7:3:6:9"."""
    linkage: Linkage = "average"
    """The distance of two clusters: the mean, the largest (complete) or the smallest (single) of their members'."""
    variant: Variant = "exact"
    """Remove exactly r tokens, or r - 1, as the original does off the shelf."""
    prop_attn: bool = True
    """Let attention favour large tokens by log size; the original does not for MAE and, by default, for DeiT models."""
    track_sizes: bool = True
    """Weigh tokens by their size in later means; the original's DeiT models do not if prop_attn is off."""
    weighted_pool: bool = False
    """Weigh tokens by their size where the head averages them, as the original does for MAE."""

    def build(self, vit: ViTInfo) -> ATCReducer:
        check_name("linkage", self.linkage, LINKAGES)
        check_name("variant", self.variant, get_args(Variant))
        if not self.track_sizes and (self.prop_attn or self.weighted_pool):
            raise SettingError("track_sizes=False keeps no sizes; switch prop_attn and weighted_pool off as well")
        if self.weighted_pool:
            check_weighted_pool(vit)
        return ATCReducer(self, vit)


class ATCReducer(PairReducer):
    """ATC in a forward pass. A cluster takes the place of its first token."""

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        plan = super().removals(grid)
        return tuple(max(number - 1, 0) for number in plan) if self.method.variant == "original" else plan

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        adjustments = super().adjust(layer, tokens)
        if adjustments is not None and is_exporting():
            raise SettingError(self.method.not_exported)
        return adjustments

    def pairs(self, layer: int, tokens: Tokens, keys: Tensor, removed: int) -> MergePairs:
        with full_precision(keys):
            unit = F.normalize(keys, dim=-1, eps=1e-12)
            apart = 1 - unit @ unit.transpose(1, 2)
        return MergePairs(*cluster(tokens.ops, ClusterInputs(apart, removed, LINKAGES.index(self.method.linkage))))

    def merge(self, layer: int, tokens: Tokens, pairs: MergePairs) -> Tokens:
        merged = super().merge(layer, tokens, pairs)
        return merged if self.method.track_sizes else merged.replace(size=None)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        acting = [step for step in forward_pass.reducing if step.keys > step.out]
        return sum(step.keys**2 * self.vit.head_dim + averaging_macs(self.vit, step) for step in acting)


def agglomerate(inputs: ClusterInputs) -> Clusters:
    """Clusters of tokens, after the nearest two have joined `removed` times.

    Of equal distances the pair whose first tokens come first counts.
    """
    distance, removed, linkage = inputs
    batch, count, _ = distance.shape
    apart = distance.detach().double().nan_to_num(nan=MERGED_DISTANCE)
    apart = apart.masked_fill(torch.eye(count, dtype=torch.bool, device=distance.device), torch.inf)
    size = torch.ones(batch, count, dtype=torch.float64, device=distance.device)
    places = torch.arange(count, device=distance.device).expand(batch, -1)
    owner = places
    for _ in range(removed):
        place = apart.flatten(1).argmin(dim=1, keepdim=True)
        first, second = place // count, place % count  # [B, 1], the first of them before the second
        both = torch.cat([first, second], dim=1)
        rows = apart.gather(1, both.unsqueeze(2).expand(-1, -1, count))
        if linkage == 0:
            sizes = size.gather(1, both)
            joined = (rows * sizes.unsqueeze(2)).sum(dim=1) / sizes.sum(dim=1, keepdim=True)
        else:
            joined = rows.amax(dim=1) if linkage == 1 else rows.amin(dim=1)
        joined = joined.scatter(1, both, torch.inf)
        new = torch.stack([joined, torch.full_like(joined, torch.inf)], dim=1)
        apart = apart.scatter(1, both.unsqueeze(2).expand_as(new), new)
        apart = apart.scatter(2, both.unsqueeze(1).expand(-1, count, -1), new.transpose(1, 2))
        size = size.scatter_add(1, first, size.gather(1, second))
        owner = torch.where(owner == second, first, owner)
    keep, drop = split_by_score((owner == places).float(), removed)
    slot = torch.zeros_like(owner).scatter(1, keep, places[:, : keep.shape[1]])
    return Clusters(keep, drop, slot.gather(1, owner.gather(1, drop)))


cluster = Operator(
    "cluster",
    ClusterInputs,
    Clusters,
    {Ops.TORCH: agglomerate, Ops.NATIVE: native.cluster},
    Checks(checks.check_cluster, checks.supports_cluster, value_checks.cluster),
    fake=native.cluster_results,
)
