"""Features of patches: error and angle to the unreduced model's, patch by patch, after the last norm.

Reduced models are restored to the full grid (core/restoring.py), whatever their own forward returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.backbone import Output
from gtp_vit.core.loop import all_features
from gtp_vit.errors import SettingError, UnsupportedModelError
from gtp_vit.methods.identity import Identity
from gtp_vit.metrics.base import Arrays, Bound, Measure, Metric, finite_rows, refuse_shape, to_array
from gtp_vit.patching import is_patched, patch, tower_of
from gtp_vit.tensors import rescale


@dataclass(frozen=True)
class PatchFeatures(Measure):
    """For models that are read as a map of features."""

    name: ClassVar[str] = "dense"
    help: ClassVar[str] = "features of all patches, restored"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("patch_distance", "1 - cosine per patch"),
        Metric("patch_error", "relative error per patch"),
    )
    damage: ClassVar[str] = "patch_error"
    objective: ClassVar[str] = "patch_error"
    summary: ClassVar[tuple[str, ...]] = ("patch_error", "patch_distance")
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("max_error", "at most this relative error of features, patch by patch", metric="patch_error"),
        Bound(
            "min_cosine",
            "at least this cosine to the unreduced features, patch by patch",
            high=1,
            metric="patch_distance",
            at_least=True,
            reading=lambda distance: 1 - distance,
        ),
    )
    restores: ClassVar[bool] = True
    demo_sections: ClassVar[frozenset[str]] = frozenset({"features"})
    explanation: ClassVar[str] = (
        "Relative error per patch: how far a restored feature is from the unreduced model's, by its length."
    )

    kind: str = "tokens"

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        return output is not None and output.kind == "tokens"

    @classmethod
    def unsupported_reason(cls, output: Output) -> str | None:
        return None

    def outputs(self, name: str, model: nn.Module, images: Tensor) -> Tensor:
        return self.check(name, patch_features(model, images), len(images)).float()

    def check(self, name: str, output: object, images: int) -> Tensor:
        if isinstance(output, Tensor) and output.ndim == 3 and len(output) == images:
            return output
        raise refuse_shape(name, output, images, "features of patches are [images, patches, channels]")

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        if base.shape != output.shape:
            raise SettingError(
                f"there are features of {list(output.shape)} and {list(base.shape)}: not the same patches"
            )
        error = patch_errors(base, output).mean(dim=1)
        distance = (1 - F.cosine_similarity(rescale(base), rescale(output), dim=2)).mean(dim=1).clamp(min=0)
        finite = finite_rows(base, output)
        both = {"patch_error": error, "patch_distance": distance}
        return {key: to_array(torch.where(finite, value, math.nan)) for key, value in both.items()}

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        return {
            name: {key: np.asarray(array, np.float64) for key, array in arrays.items()}
            for name, arrays in stored.items()
        }

    def direction(self, output: Tensor, noise: Tensor) -> Tensor:
        """All directions, by the length of the features: the relative error."""
        return noise / output.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def patch_errors(base: Tensor, features: Tensor) -> Tensor:
    """The relative error of each feature against the unreduced model's, [..., M0] of two [..., M0, C]."""
    unit, moved = rescale(base), rescale(features, like=base)
    return (moved - unit).norm(dim=-1) / unit.norm(dim=-1).clamp(min=1e-12)


def patch_features(model: nn.Module, images: Tensor) -> Tensor:
    """The normed features of all patches, [B, M0, C], of a supported ViT or a model around one, patched or not."""
    if not is_patched(model):
        try:
            model = patch(model, Identity(), restore=True, quiet=True)
        except UnsupportedModelError as error:
            raise SettingError(f"features of patches are read from a ViT; {error}") from error
    tower = tower_of(model)
    if not tower.reduction.restore:
        raise SettingError("the model is patched without restore, so patches are missing; patch it with restore=True")
    return all_features(tower, images)[:, tower.reduction.vit.prefix :]
