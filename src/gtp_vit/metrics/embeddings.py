"""Embeddings: cosines to the unreduced model's, and whether each image keeps its nearest neighbours.

The angle between two embeddings is what retrieval, k-NN and zero-shot classification read, and on a classifier without
its head it ranks methods nearly as the classifier's KL does (docs/encoders.md).

Shapes: B batch, I images, K neighbours, C channels, T texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.errors import BadSetting, GTPError, counted
from gtp_vit.metrics.base import UNREDUCED, Array, Arrays, Figure, Measure, finite_rows, refuse_shape, values
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.tensors import rescaled

TEMPERATURE = 0.07  # of the votes of neighbours, as DINO's k-NN classifier has it


@dataclass(frozen=True, eq=False)
class Embeddings(Measure):
    """For models that return one vector for each image, which is compared with others."""

    name: ClassVar[str] = "embedding"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("knn", "k-NN %", 2, interval=False, partial=True),
        Figure("knn_change", "k-NN change", 2, change="knn", partial=True),
        Figure("zero_shot_top1", "zero-shot %", 2, interval=False),
        Figure("zero_shot_agreement", "zero-shot agreement %", 2, interval=False),
        Figure("neighbours", "same neighbours %", 2, interval=False, partial=True),
        Figure("distance_p95", "1 - cosine, 95 %", quantile=("distance", 0.95), interval=False, brief=False),
        Figure("distance", "1 - cosine"),
    )
    damage: ClassVar[str] = "distance"
    searched: ClassVar[str] = "distance"
    summary: ClassVar[tuple[str, ...]] = ("distance", "neighbours")
    targets: ClassVar[dict[str, str]] = {"min_cosine": "distance", "min_neighbours": "neighbours"}
    undefined: ClassVar[str] = "not finite, or zero, which has no direction"
    meaning: ClassVar[str] = "1 - cosine: how far an embedding points away from the unreduced model's."

    kind: str = "features"
    k: int = 10  # neighbours
    texts: Tensor | None = None  # [T, C]: embeddings of texts, of which an image gets the nearest

    def __post_init__(self) -> None:
        if self.texts is not None:
            _check_texts(self.texts)

    def settings(self) -> dict[str, Any]:
        texts = None if self.texts is None else tensors_fingerprint({"texts": self.texts})
        return {"measure": self.name, "neighbours": self.k, "texts": texts}

    def check(self, name: str, found: Any, images: int) -> Tensor:
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != images or found.shape[1] < 2:
            raise refuse_shape(name, found, images, "an embedding is a vector for each image: [images, channels]")
        if self.texts is not None and self.texts.shape[1] != found.shape[1]:
            raise BadSetting(
                f"the embeddings of texts have {self.texts.shape[1]} numbers, those of {name} {found.shape[1]}; give "
                "those of the same model"
            )
        return found

    def kept(self, base: Tensor, found: Tensor, labels: Tensor, whole: Tensor) -> Arrays:
        cosine = F.cosine_similarity(rescaled(base.double()), rescaled(found.double()), dim=1)
        directed = finite_rows(base, found) & (base != 0).any(dim=1) & (found != 0).any(dim=1)
        distance = torch.where(directed, (1 - cosine).clamp(min=0), math.nan)
        arrays = {
            "distance": values(distance),
            "label": labels.numpy(force=True),
            "vector": torch.where(whole.unsqueeze(1), found.float(), math.nan).numpy(force=True),
        }
        if self.texts is not None:
            texts = F.normalize(rescaled(self.texts.to(found.device, torch.float32)), dim=1)
            nearest = (rescaled(found.float()) @ texts.T).argmax(dim=1)
            directed = found.isfinite().all(dim=1) & (found != 0).any(dim=1)
            arrays["text"] = torch.where(directed, nearest, -1).numpy(force=True)
        return arrays

    def per_image(self, kept: Mapping[str, Arrays]) -> dict[str, Arrays]:
        base = kept[UNREDUCED]
        compared = np.logical_not(np.isnan(base["vector"]).all(axis=1))
        count = int(compared.sum())
        if 2 * self.k > count - 1:  # a model that knows nothing would keep more than half of them
            most = (count - 1) // 2
            raise GTPError(
                f"{counted(self.k, 'neighbour is', 'neighbours are')} asked for, and among "
                f"{counted(count, 'image', 'images')} each has {counted(count - 1, 'other', 'others')}, of which at "
                f"most half may count; give more images{f', or --nearest {most}' if most else ''}"
            )
        zero = np.flatnonzero((base["vector"] == 0).all(axis=1))
        if len(zero):
            raise GTPError(
                f"the unreduced model's embeddings are zero on {len(zero)} of {count} images (the first is image "
                f"{zero[0]} of those that could be read): they point nowhere, so there is nothing to compare with; "
                "check its weights"
            )
        labels = base["label"][compared]
        # Labels that are all the same, or all different, say nothing of neighbours.
        votes = bool((labels >= 0).all()) and 1 < len(np.unique(labels)) < count
        nearest = _nearest(base["vector"][compared], self.k)
        found: dict[str, Arrays] = {}
        for name, own in kept.items():
            neighbours, likeness = nearest if own is base else _nearest(own["vector"][compared], self.k)
            finite = ~np.isnan(own["distance"][compared])  # others have no direction: near to none, they count as wrong
            same = finite * (neighbours[:, :, None] == nearest[0][:, None, :]).any(axis=2).mean(axis=1)
            found[name] = {
                "distance": own["distance"].astype(np.float64),
                "neighbours": _spread(100.0 * same, compared),
            }
            if votes:
                right = finite & (_vote(neighbours, likeness, labels) == labels)
                found[name]["knn"] = _spread(100.0 * right, compared)
            if self.texts is not None:
                found[name]["zero_shot_agreement"] = 100.0 * (own["text"] == base["text"])
                if base["label"].min() >= 0 and base["label"].max() < len(self.texts):
                    found[name]["zero_shot_top1"] = 100.0 * (own["text"] == base["label"])
        return found


def _check_texts(texts: Tensor) -> None:
    if texts.ndim != 2 or len(texts) == 0:
        raise BadSetting(
            f"the embeddings of texts are {list(texts.shape)}; give a vector for each text: [texts, channels]"
        )
    useless = int((~(texts.isfinite().all(dim=1) & (texts != 0).any(dim=1))).sum())
    if useless:
        raise BadSetting(
            f"the embeddings of texts are zero or not finite for {useless} of {len(texts)} texts; compute them again"
        )


def _spread(some: Array, where: Array) -> Array:
    """Values of some images among all, NaN for the others."""
    found = np.full(where.shape, np.nan)
    found[where] = some
    return found


def _nearest(vectors: Array, k: int) -> tuple[Array, Array]:
    """The k nearest other images of each by cosine, and these cosines, [I, K] each."""
    unit = F.normalize(rescaled(torch.from_numpy(np.ascontiguousarray(vectors))), dim=1)
    unit = unit.nan_to_num(0.0, 0.0, 0.0)  # an embedding that is zero or not finite is near to none
    places, cosines = [], []
    for begin in range(0, len(unit), 1024):
        part = unit[begin : begin + 1024] @ unit.T
        rows = torch.arange(len(part))
        part[rows, begin + rows] = -2.0
        best = part.topk(k, dim=1)
        places.append(best.indices)
        cosines.append(best.values)
    return torch.cat(places).numpy(), torch.cat(cosines).numpy()


def _vote(neighbours: Array, cosines: Array, labels: Array) -> Array:
    """The label that the neighbours give each image, near ones counting more, [I]."""
    names, number = np.unique(labels, return_inverse=True)
    weights = np.exp((cosines - 1) / TEMPERATURE)
    found = np.empty(len(labels), dtype=labels.dtype)
    for index in range(len(labels)):
        votes = np.bincount(number[neighbours[index]], weights[index], minlength=len(names))
        found[index] = names[votes.argmax()]
    return found
