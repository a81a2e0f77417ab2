"""Arguments and results of each operator, the same for all its implementations.

Torch's own schema of an operator is flat, in the order of the fields here.

Shapes: B batch, H heads, Q queries, N tokens, D head dimension, C channels, M image tokens, K kept, P removed,
M0 patches, W list entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class NormParams(NamedTuple):
    """A LayerNorm as three arguments of an operator; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0

    @classmethod
    def of(cls, norm: nn.LayerNorm | None) -> NormParams:
        return cls() if norm is None else cls(norm.weight, norm.bias, norm.eps)

    def apply(self, x: Tensor) -> Tensor:
        """x after the norm; empty if there is none."""
        if self.weight is None:
            return x.new_empty(0)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class AttentionInputs(NamedTuple):
    """Arguments of the operator `attention`."""

    q: Tensor  # [B, H, Q, D]; all N queries where the map is sparsified or statistics are asked for
    k: Tensor  # [B, H, N, D]
    v: Tensor  # [B, H, N, D]
    size: Tensor | None  # how many patches each key stands for, [B, N]; None = one each
    scale: float  # factor of the logits
    removed: int  # entries below the n-th smallest of each head's map become 0; 0 removes none
    queries: int  # how many queries get an output
    statistic_mask: list[bool]  # which statistics to return: diagonal, column sums, class row
    heads: int  # 0 returns them for each head; 1 their largest, 2 their mean over the heads
    first: int  # they leave out the tokens before this one


class AttentionResult(NamedTuple):
    """The result of `attention`."""

    output: Tensor  # [B, queries, H D]
    statistics: Tensor  # those asked for, [S, B, H, N - first] or [S, B, N - first]


class GTPReduceInputs(NamedTuple):
    """Arguments of GTP's operator `gtp_reduce`."""

    x: Tensor  # features [B, N, C]
    branch: Tensor  # the attention branch, to be added to them
    scores: Tensor  # importance of the image tokens, [B, M]
    position: Tensor  # their grid cells, [B, M]
    size: Tensor | None  # sizes of all tokens, [B, N]; None = one each
    neighbours: Tensor  # the graph's lists, [B or 1, M0, W]
    root: Tensor  # the factors of its edges, [B or 1, M0]
    removed: int  # how many image tokens leave
    alpha: float  # how strongly they are propagated
    with_size: bool  # return sizes as well
    norm_weight: Tensor | None  # of the LayerNorm that follows, [C]; None = no LayerNorm
    norm_bias: Tensor | None
    epsilon: float

    @property
    def norm(self) -> NormParams:
        return NormParams(self.norm_weight, self.norm_bias, self.epsilon)


class GTPReduceResult(NamedTuple):
    """The result of `gtp_reduce`: the tokens that stay."""

    x: Tensor  # features [B, N - P, C]
    normed: Tensor  # the same after the LayerNorm that follows; empty if not asked for
    size: Tensor  # of all of them, [B, N - P]; empty if not asked for
    cell: Tensor  # grid cells of the image tokens, [B, M - P]


class NeighboursInputs(NamedTuple):
    """Arguments of GTP's operator `neighbours`: for the mixed or semantic graph of each image."""

    similarity: Tensor  # of all pairs of patches, [B, M0, M0]
    rows: int  # of the patch grid
    columns: int  # of the patch grid
    spatial: int  # 0, 4 or 8 spatial neighbours
    semantic: int  # how many semantic neighbours, at least one


class Neighbours(NamedTuple):
    """The result of `neighbours`."""

    lists: Tensor  # [B, M0, W]; M0 fills short ones
    root: Tensor  # the factors of the edges, degree^-1/2 of each cell, [B, M0]


class GTPPlusMergeInputs(NamedTuple):
    """Arguments of GTP+'s operator `gtp_plus_merge`."""

    x: Tensor  # features [B, N, C]
    branch: Tensor  # the attention branch, to be added to them
    importance: (
        Tensor  # of the image tokens, [B, M]; of equally important ones the earlier counts as the more important
    )
    size: Tensor | None  # of the image tokens, [B, M]; None = one each
    removed: int  # how many leave
    importance_floor: float  # importance of a token without attention, in units of the mean one
    preserve_norm: bool  # bring merged tokens to the largest of the norms involved
    norm_weight: Tensor | None  # of the LayerNorm that follows, [C]; None = no LayerNorm
    norm_bias: Tensor | None
    epsilon: float

    @property
    def norm(self) -> NormParams:
        return NormParams(self.norm_weight, self.norm_bias, self.epsilon)


class GTPPlusMergeByProbeInputs(NamedTuple):
    """Arguments of GTP+'s operator `gtp_plus_merge_by_probe`."""

    x: Tensor  # features [B, N, C]
    branch: Tensor  # the attention branch, to be added to them
    probe: Tensor  # [C]; its product with a token of length 1 is the logarithm of the token's squared sensitivity
    size: Tensor  # of the image tokens, [B, M]
    protected: Tensor | None  # 1 for image tokens that neither leave nor receive, else 0, [B, M]; None = there are none
    removed: int  # how many leave
    importance_floor: float  # importance of a token without sensitivity, in units of the mean one
    preserve_norm: bool  # bring merged tokens to the largest of the norms involved
    norm_weight: Tensor | None  # of the LayerNorm that follows, [C]; None = no LayerNorm
    norm_bias: Tensor | None
    epsilon: float

    @property
    def norm(self) -> NormParams:
        return NormParams(self.norm_weight, self.norm_bias, self.epsilon)


class GTPPlusMergeResult(NamedTuple):
    """The result of `gtp_plus_merge` and of `gtp_plus_merge_by_probe`."""

    x: Tensor  # features [B, N - P, C]
    normed: Tensor  # the same after the LayerNorm that follows; empty if not asked for
    size: Tensor  # of the image tokens that stay, [B, K]
    keep: Tensor  # which stay, [B, K]
    drop: Tensor  # which go, [B, P]
    target: Tensor  # where each of these goes, as a place among those that stay, [B, P]


class ClusterInputs(NamedTuple):
    """Arguments of ATC's operator `cluster`."""

    distance: Tensor  # of each pair of tokens, [B, M, M], symmetric; computed with in float64
    removed: int  # how often two clusters join
    linkage: int  # the distance of clusters: 0 mean, 1 largest, 2 smallest of their members'


class Clusters(NamedTuple):
    """The result of `cluster`."""

    keep: Tensor  # the first token of each cluster, [B, K]
    drop: Tensor  # the other tokens, [B, P]
    target: Tensor  # the place of each of these among the first ones, [B, P]
