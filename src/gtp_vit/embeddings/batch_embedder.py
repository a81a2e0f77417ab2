"""From a batch of images to what is stored of them: one vector for an image, or one for every patch.

Shapes: B images that could be read and whose embedding is finite, C numbers in a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Output, primary_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.loop import all_features
from gtp_vit.data.items import Batch
from gtp_vit.errors import SettingError, UnsupportedModelError, short_repr
from gtp_vit.patching import host_of, is_patched, tower_of
from gtp_vit.tensors import rescale

DTYPES = {"float32": torch.float32, "float16": torch.float16}
# What a model gives, in words.
KINDS = {
    "features": "pooled features",
    "embedding": "image embedding",
    "classes": "class scores",
    "patches": "patch features",
}


@dataclass(frozen=True)
class EmbeddingSpec:
    """The kind and shape of what is stored for an image."""

    kind: str  # of KINDS
    shape: tuple[int, ...]  # (C,), or for patches (rows * columns, C)
    grid: tuple[int, int] | None = None  # rows and columns of patches, which come row by row

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}, {' x '.join(map(str, self.shape))} numbers"


class EmbeddingBatch(NamedTuple):
    """The embeddings of a batch; images without one are apart."""

    indices: Tensor  # [B] places in the data set
    names: tuple[str, ...]  # B file names
    embeddings: Tensor  # [B, C] on the CPU; [B, patches, C] of patches
    labels: Tensor  # [B]; -1 = there is none
    unreadable: dict[int, str]  # place -> name and why
    not_finite: dict[int, str]  # place -> name and what the model returned for it


class BatchEmbedder:
    """Runs a model on batches."""

    def __init__(
        self,
        model: nn.Module,
        *,
        output: Output | None = None,
        patches: bool = False,
        normalise: bool = False,
        dtype: str = "float32",
    ) -> None:
        """Check that the model has what is asked for.

        Args:
            model: patched or not.
            output: what it returns, where it cannot be asked: an exported file.
            patches: a vector for every patch, of a model that was patched with restore=True.
            normalise: scale every vector to length 1.
            dtype: float32 or float16.
        """
        if dtype not in DTYPES:
            raise SettingError(f"dtype is {short_repr(dtype)}; it must be {' or '.join(DTYPES)}")
        self.model, self.normalise, self.dtype = model, normalise, dtype
        # None for other modules than ViTs, e.g. a compiled one: then the first batch tells.
        self.spec = _spec_of_patches(model) if patches else _spec_of_output(model, output)
        weight = next(model.parameters(), torch.zeros(0))  # an exported file has none
        self.device, self.precision = weight.device, weight.dtype

    def __call__(self, batch: Batch) -> EmbeddingBatch:
        vectors = self._run(batch.images).clone()  # a tensor of inference mode could not be trained on
        stored = vectors.to(DTYPES[self.dtype])
        finite = stored.isfinite().flatten(1).all(dim=1)
        good = finite.nonzero().flatten().tolist()
        bad = {
            int(batch.indices[index]): f"{batch.names[index]}: {self._problem(vectors[index])}"
            for index in (~finite).nonzero().flatten().tolist()
        }
        names = tuple(batch.names[index] for index in good)
        return EmbeddingBatch(batch.indices[good], names, stored[good], batch.labels[good], batch.unreadable, bad)

    @torch.inference_mode()
    def _run(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.zeros(0, *((0,) if self.spec is None else self.spec.shape))
        with eval_mode(self.model):
            vectors = self._forward(images.to(self.device, self.precision, non_blocking=True))
        if self.spec is None and isinstance(vectors, Tensor) and vectors.ndim == 2:
            self.spec = EmbeddingSpec("features", (vectors.shape[1],))
        expected = None if self.spec is None else [len(images), *self.spec.shape]
        if not isinstance(vectors, Tensor) or list(vectors.shape) != expected:
            what = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise SettingError(
                f"the model returns {what} for {len(images)} images; it should return {expected or 'a vector for each'}"
            )
        vectors = vectors.float().cpu()
        if not self.normalise:
            return vectors
        vectors = rescale(vectors)
        return vectors / vectors.norm(dim=-1, keepdim=True)

    def _forward(self, images: Tensor) -> object:
        if self.spec is None:
            return primary_output(self.model(images), "features")
        if self.spec.kind == "patches":
            tower = tower_of(self.model)
            return all_features(tower, images)[:, tower.reduction.vit.prefix :]
        return primary_output(self.model(images), self.spec.kind)

    def _problem(self, vector: Tensor) -> str:
        """Why a vector cannot be stored."""
        if bool(vector.isfinite().all()):
            return f"it has numbers up to {float(vector.abs().max()):.3g}, and float16 ends at 65504; store float32"
        return f"its embedding is not finite{', or is zero and has no direction' if self.normalise else ''}"


def _spec_of_output(model: nn.Module, output: Output | None) -> EmbeddingSpec | None:
    """The kind and shape of a model's output; raises if that is not a vector per image."""
    if output is None:
        try:
            output = host_of(model).output
        except UnsupportedModelError:
            return None
        if output is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes more than images; give the part of it that embeds images: for CLIP "
                "CLIPVisionModelWithProjection (the commands do so by themselves: hf:NAME), for open_clip model.visual"
            )
    if output.kind == "tokens":
        raise SettingError(
            f"the model has an output for every token, {output.width} numbers each, and an embedding is one vector for "
            "an image; create it with pooling, e.g. global_pool='token' or 'avg', or ask for patches=True (--patches)"
        )
    return EmbeddingSpec(output.kind, (output.width,))


def _spec_of_patches(model: nn.Module) -> EmbeddingSpec:
    if not (is_patched(model) and tower_of(model).reduction.restore):
        raise SettingError(
            "only a model that was patched with restore=True has features of all patches: patch(model, restore=True), "
            "or with Identity() in between for the unreduced ones"
        )
    vit = tower_of(model).reduction.vit
    return EmbeddingSpec("patches", (vit.image_tokens, vit.dim), vit.grid)
