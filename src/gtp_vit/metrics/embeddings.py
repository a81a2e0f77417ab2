"""Embeddings: cosines to the unreduced model's, and whether each image keeps its nearest neighbours.

The angle between two embeddings is what retrieval, k-NN and zero-shot classification read, and on a classifier without
its head it ranks methods nearly as the classifier's KL does (docs/encoders.md).

Shapes: B batch, I images, K neighbours, C channels, T texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.backbone import Output
from gtp_vit.errors import GTPError, SettingError, check_range, plural
from gtp_vit.metrics.base import UNREDUCED, Array, Arrays, Bound, Measure, Metric, finite_rows, refuse_shape, to_array
from gtp_vit.metrics.texts import check_texts, read_texts
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.tensors import rescale

TEMPERATURE = 0.07  # of the votes of neighbours, as DINO's k-NN classifier has it


@dataclass(frozen=True, eq=False)
class Embeddings(Measure):
    """For models that return one vector for each image, which is compared with others."""

    name: ClassVar[str] = "embedding"
    help: ClassVar[str] = "cosine and nearest neighbours"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("knn", "k-NN %", 2, interval=False, partial=True),
        Metric("knn_change", "k-NN change", 2, change="knn", partial=True),
        Metric("zero_shot_top1", "zero-shot %", 2, interval=False),
        Metric("zero_shot_agreement", "zero-shot agreement %", 2, interval=False),
        Metric("neighbours", "same neighbours %", 2, interval=False, partial=True),
        Metric("distance_p95", "1 - cosine, 95 %", quantile=("distance", 0.95), interval=False, brief=False),
        Metric("distance", "1 - cosine"),
    )
    damage: ClassVar[str] = "distance"
    objective: ClassVar[str] = "distance"
    summary: ClassVar[tuple[str, ...]] = ("distance", "neighbours")
    headline: ClassVar[str] = "neighbours"
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound(
            "min_cosine",
            "at least this cosine to the unreduced model's embedding",
            high=1,
            metric="distance",
            at_least=True,
            reading=lambda distance: 1 - distance,
        ),
        Bound(
            "min_neighbours",
            "at least this percentage of an image's nearest neighbours unchanged",
            metric="neighbours",
            at_least=True,
        ),
    )
    demo_sections: ClassVar[frozenset[str]] = frozenset({"neighbours", "features"})
    undefined: ClassVar[str] = "not finite, or zero, which has no direction"
    explanation: ClassVar[str] = "1 - cosine: how far an embedding points away from the unreduced model's."

    kind: str = "features"
    num_neighbours: int = field(
        default=10,
        metadata={"help": "number of nearest images that are compared, and that vote where there are labels"},
    )
    text_embeddings: Tensor | Path | None = field(  # [T, C]; an image's class is that of the nearest
        default=None,
        metadata={
            "help": "embeddings of one text for each class, [classes, channels], for zero-shot agreement; .safetensors "
            "with one tensor, or .npy",
            "type": Path | None,
        },
    )

    def __post_init__(self) -> None:
        check_range("num_neighbours", self.num_neighbours, 1, 1000, integer=True)
        if isinstance(self.text_embeddings, Path):
            object.__setattr__(self, "text_embeddings", read_texts(self.text_embeddings))
        if self.texts is not None:
            check_texts(self.texts)

    @property
    def texts(self) -> Tensor | None:
        """The embeddings of texts, once they are read."""
        return self.text_embeddings if isinstance(self.text_embeddings, Tensor) else None

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        return output is not None and output.kind in ("features", "embedding")

    @classmethod
    def unsupported_reason(cls, output: Output) -> str | None:
        if output.kind == "classes":
            return f"the model scores {output.width} classes, which is not an embedding; create it with num_classes=0"
        return super().unsupported_reason(output)

    @property
    def min_images(self) -> int:
        return self.num_neighbours + 1

    def settings(self) -> dict[str, object]:
        texts = None if self.texts is None else tensors_fingerprint({"texts": self.texts})
        return {"measure": self.name, "neighbours": self.num_neighbours, "texts": texts}

    def check(self, name: str, output: object, images: int) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != images or output.shape[1] < 2:
            raise refuse_shape(name, output, images, "an embedding is a vector for each image: [images, channels]")
        if self.texts is not None and self.texts.shape[1] != output.shape[1]:
            raise SettingError(
                f"the embeddings of texts have {self.texts.shape[1]} numbers, those of {name} {output.shape[1]}; give "
                "those of the same model"
            )
        return output

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        cosine = F.cosine_similarity(rescale(base.double()), rescale(output.double()), dim=1)
        directed = finite_rows(base, output) & (base != 0).any(dim=1) & (output != 0).any(dim=1)
        distance = torch.where(directed, (1 - cosine).clamp(min=0), math.nan)
        arrays = {
            "distance": to_array(distance),
            "label": labels.numpy(force=True),
            "vector": torch.where(keep_arrays.unsqueeze(1), output.float(), math.nan).numpy(force=True),
        }
        if self.texts is not None:
            texts = F.normalize(rescale(self.texts.to(output.device, torch.float32)), dim=1)
            nearest = (rescale(output.float()) @ texts.T).argmax(dim=1)
            directed = output.isfinite().all(dim=1) & (output != 0).any(dim=1)
            arrays["text"] = torch.where(directed, nearest, -1).numpy(force=True)
        return arrays

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        base = stored[UNREDUCED]
        compared = np.logical_not(np.isnan(base["vector"]).all(axis=1))
        count = int(compared.sum())
        if 2 * self.num_neighbours > count - 1:  # a model that knows nothing would keep more than half of them
            most = (count - 1) // 2
            raise GTPError(
                f"{plural(self.num_neighbours, 'neighbour is', 'neighbours are')} asked for, and among "
                f"{plural(count, 'image', 'images')} each has {plural(count - 1, 'other', 'others')}, of which at "
                f"most half may count; give more images{f', or --num-neighbours {most}' if most else ''}"
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
        nearest = _nearest_neighbours(base["vector"][compared], self.num_neighbours)
        figures: dict[str, Arrays] = {}
        for name, arrays in stored.items():
            neighbours, likeness = (
                nearest if arrays is base else _nearest_neighbours(arrays["vector"][compared], self.num_neighbours)
            )
            finite = ~np.isnan(
                arrays["distance"][compared]
            )  # others have no direction: near to none, they count as wrong
            same = finite * (neighbours[:, :, None] == nearest[0][:, None, :]).any(axis=2).mean(axis=1)
            figures[name] = {
                "distance": arrays["distance"].astype(np.float64),
                "neighbours": _scatter(100.0 * same, compared),
            }
            if votes:
                right = finite & (_vote(neighbours, likeness, labels) == labels)
                figures[name]["knn"] = _scatter(100.0 * right, compared)
            if self.texts is not None:
                figures[name]["zero_shot_agreement"] = 100.0 * (arrays["text"] == base["text"])
                if base["label"].min() >= 0 and base["label"].max() < len(self.texts):
                    figures[name]["zero_shot_top1"] = 100.0 * (arrays["text"] == base["label"])
        return figures

    def explain(self, base: Arrays) -> str:
        """The number of images that neighbours were sought among, and the use of labels."""
        count = int((~np.isnan(base["neighbours"])).sum())
        text = (
            f"{self.explanation} Same neighbours: of each image's {self.num_neighbours} nearest among {count}, how "
            "many are those of the unreduced model."
        )
        if "knn" in base:
            return f"{text} k-NN: how often a vote of its neighbours' labels gives an image's own label."
        return f"{text} No k-NN accuracy: images have no labels, or all the same one, or no two the same."

    def direction(self, output: Tensor, noise: Tensor) -> Tensor:
        """The output's direction: a unit vector, whose distance is 1 - cosine."""
        length = output.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        unit = output / length
        return (noise - unit * (unit * noise).sum(dim=-1, keepdim=True)) / length


def _scatter(values: Array, mask: Array) -> Array:
    """Values of some images among all, NaN for the others."""
    scattered = np.full(mask.shape, np.nan)
    scattered[mask] = values
    return scattered


def _nearest_neighbours(vectors: Array, k: int) -> tuple[Array, Array]:
    """The k nearest other images of each by cosine, and these cosines, [I, K] each."""
    unit = F.normalize(rescale(torch.from_numpy(np.ascontiguousarray(vectors))), dim=1)
    unit = unit.nan_to_num(0.0, 0.0, 0.0)  # an embedding that is zero or not finite is near to none
    indices, cosines = [], []
    for begin in range(0, len(unit), 1024):
        part = unit[begin : begin + 1024] @ unit.T
        rows = torch.arange(len(part))
        part[rows, begin + rows] = -2.0
        best = part.topk(k, dim=1)
        indices.append(best.indices)
        cosines.append(best.values)
    return torch.cat(indices).numpy(), torch.cat(cosines).numpy()


def _vote(neighbours: Array, cosines: Array, labels: Array) -> Array:
    """The label that the neighbours give each image, near ones counting more, [I]."""
    names, number = np.unique(labels, return_inverse=True)
    weights = np.exp((cosines - 1) / TEMPERATURE)
    winners = np.empty(len(labels), dtype=labels.dtype)
    for index in range(len(labels)):
        votes = np.bincount(number[neighbours[index]], weights[index], minlength=len(names))
        winners[index] = names[votes.argmax()]
    return winners
