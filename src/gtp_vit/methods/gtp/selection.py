"""Section 3.2.1, token selection: which image tokens are important enough to stay.

Shapes: B batch, H heads, N tokens, M image tokens, C channels, K kept, P propagated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Aggregate = Callable[[Tensor], Tensor]  # [B, H, ...] -> [B, ...]: the paper's circled plus over the heads

AGGREGATES: dict[str, Aggregate] = {
    "max": lambda values: values.amax(dim=1),
    "mean": lambda values: values.mean(dim=1),
    "done": lambda values: values,  # attention has aggregated already
}


def regeneration_difficulty(diagonal: Tensor, aggregate: Aggregate) -> Tensor:
    """Eq. (3), Gamma: how much a token attends to itself, A_ii, aggregated over the heads. [B, H, M] -> [B, M]."""
    return aggregate(diagonal)


def broadcasting_ability(column_sums: Tensor, aggregate: Aggregate) -> Tensor:
    """Eq. (4), Psi: how much all tokens attend to a token, sum_j A_ji, aggregated over the heads. -> [B, M]."""
    return aggregate(column_sums)


def mixed(difficulty: Tensor, ability: Tensor) -> Tensor:
    """Section 3.2.1, MixedAttn: Gamma x Psi."""
    return difficulty * ability


def class_attention(class_row: Tensor, aggregate: Aggregate) -> Tensor:
    """Section 3.2.1, CLSAttn: what the class token attends to. [B, H, M] -> [B, M]."""
    return aggregate(class_row)


def dissimilarity(rows: Tensor) -> Tensor:
    """Section 3.2.1, CosSim: minus the sum of a row's cosine similarities to all rows. [B, M, D] -> [B, M].

    Rows are token features in the paper and head-aggregated attention rows in the released code. The sum over j of
    cos(i, j) is the product of row i with the sum of all unit rows, so no M x M matrix is needed.
    """
    unit = F.normalize(rows.float(), dim=-1)
    return -(unit * unit.sum(dim=1, keepdim=True)).sum(dim=-1)


def random_scores(layers: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Section 3.2.1, Random: a rank for each layer and grid cell, [layers, tokens]; no two of a layer are equal."""
    return torch.rand(layers, tokens, generator=generator, device="cpu").argsort(dim=-1).argsort(dim=-1)


class SelectionInputs(NamedTuple):
    """Inputs of a selection, for image tokens only; statistics that were not asked for are None."""

    features: Tensor | None = None  # [B, M, C]     after the attention residual
    noise: Tensor | None = None  # [B, M]
    diagonal: Tensor | None = None  # [B, H, M], or [B, M] if attention has aggregated the heads
    column_sums: Tensor | None = None  # the same
    class_row: Tensor | None = None  # the same
    map: Tensor | None = None  # [B, H, M, N]  rows of the image tokens, all columns


class Selector(NamedTuple):
    """A way to score tokens, and the statistics of attention it needs for that."""

    required_stats: frozenset[str]
    score: Callable[[SelectionInputs, Aggregate], Tensor]


def _mixed(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    return mixed(_diagonal(inputs, aggregate), _broad(inputs, aggregate))


def _sum(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    return _diagonal(inputs, aggregate) + _broad(inputs, aggregate)


def _diagonal(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.diagonal is not None
    return regeneration_difficulty(inputs.diagonal, aggregate)


def _broad(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.column_sums is not None
    return broadcasting_ability(inputs.column_sums, aggregate)


def _class(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.class_row is not None
    return class_attention(inputs.class_row, aggregate)


def _attention_rows(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.map is not None
    return dissimilarity(aggregate(inputs.map))


def _features(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.features is not None
    return dissimilarity(inputs.features)


def _noise(inputs: SelectionInputs, aggregate: Aggregate) -> Tensor:
    assert inputs.noise is not None
    return inputs.noise


SELECTORS: dict[str, Selector] = {
    "mixed": Selector(frozenset({"diagonal", "column_sums"}), _mixed),
    "diagonal": Selector(frozenset({"diagonal"}), _diagonal),
    "broad": Selector(frozenset({"column_sums"}), _broad),
    "sum": Selector(frozenset({"diagonal", "column_sums"}), _sum),
    "class": Selector(frozenset({"class_row"}), _class),
    "cosine_tokens": Selector(frozenset(), _features),  # what the paper calls CosSim
    "cosine_attention": Selector(frozenset({"map"}), _attention_rows),  # what the released code calls CosSim
    "random": Selector(frozenset(), _noise),
}
# What paper and released code call the same; CosSim is missing, because they mean different things by it.
PAPER_NAMES = {
    "MixedAttn": "mixed",
    "DiagAttn": "diagonal",
    "BroadAttn": "broad",
    "IMGAttn": "broad",
    "SumAttn": "sum",
    "CLSAttn": "class",
    "Random": "random",
}
