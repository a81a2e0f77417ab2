"""embed: the embeddings of a model, batch by batch, with the names of the images.

Shapes: B images that could be read and whose embedding is finite, C numbers in an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gtp_vit.core.backbone import Output, main_output
from gtp_vit.errors import BadInput, BadSetting, GTPError, UnsupportedBackbone, check_range, first_line, shown
from gtp_vit.inputs.data import (
    Batch,
    DataSettings,
    ImageFiles,
    ImageStream,
    InMemory,
    Item,
    batches,
    open_images,
    planned_batches,
)
from gtp_vit.measure.eval_mode import eval_mode
from gtp_vit.patch import host_of
from gtp_vit.runs import distributed

DTYPES = {"float32": torch.float32, "float16": torch.float16}
# What a model returns, in words.
KINDS = {"features": "pooled features", "embedding": "image embedding", "classes": "class scores"}


class Embedded(NamedTuple):
    """The embeddings of a batch; images without one are apart."""

    places: Tensor  # [B] places in the data set
    names: tuple[str, ...]  # B file names
    embeddings: Tensor  # [B, C] on the CPU
    labels: Tensor  # [B]; -1 = there is none
    unreadable: dict[int, str]  # place -> name and why
    not_finite: dict[int, str]  # place -> name and what the model returned for it


def embed(
    model: nn.Module,
    images: Any,
    *,
    batch_size: int = 64,
    workers: int = 2,
    normalise: bool = False,
    dtype: str = "float32",
) -> Iterator[Embedded]:
    """The embeddings of all images in order, batch by batch; images are read while the model works.

    What a model returns is its embedding: pooled features (num_classes=0), an image embedding as CLIP's, or class
    scores if it has classes. Where torch.distributed runs, every process gets its own batches, and no two the same.

    >>> import gtp_vit
    >>> fast = gtp_vit.patch(gtp_vit.create_model("vit_tiny_patch16_224", num_classes=0))
    >>> [tuple(part.embeddings.shape) for part in embed(fast, torch.zeros(3, 3, 224, 224), batch_size=2)]
    [(2, 192), (1, 192)]

    Args:
        model: patched or not; it runs in eval mode, where it is, in its own precision.
        images: a folder, prepared as the model's weights want it; prepared images as a tensor [I, channels, height,
            width]; or a data set of such, alone or first in a tuple with their label.
        batch_size: images at a time.
        workers: processes that read images.
        normalise: scale every embedding to length 1.
        dtype: float32 or float16.
    """
    check_range("batch_size", batch_size, 1, 65536, whole=True)
    check_range("workers", workers, 0, 256, whole=True)
    embedder = Embedder(model, normalise=normalise, dtype=dtype)
    dataset = dataset_of(model, images)
    if isinstance(dataset, ImageStream):
        return map(embedder, batches(dataset, batch_size=batch_size, workers=workers, share=distributed.share()))
    rank, processes = distributed.share()
    count = len(dataset)
    plan = [range(begin, min(begin + batch_size, count)) for begin in range(0, count, batch_size)][rank::processes]
    return map(embedder, planned_batches(dataset, plan, workers=workers, pin=embedder.device.type == "cuda"))


class Embedder:
    """From a batch of images to their embeddings."""

    def __init__(
        self, model: nn.Module, *, output: Output | None = None, normalise: bool = False, dtype: str = "float32"
    ) -> None:
        """`output` is what the model returns, where it cannot be asked: an exported file."""
        if dtype not in DTYPES:
            raise BadSetting(f"dtype is {shown(dtype)}; it must be {' or '.join(DTYPES)}")
        self.model, self.normalise, self.dtype = model, normalise, dtype
        self.output = output or _output_of(model)
        if self.output is not None:
            check_output(self.output)
        weight = next(model.parameters(), torch.zeros(0))  # an exported file has none
        self.device, self.precision = weight.device, weight.dtype

    def __call__(self, batch: Batch) -> Embedded:
        found = self._run(batch.images).clone()  # a tensor of inference mode could not be trained on
        stored = found.to(DTYPES[self.dtype])
        finite = stored.isfinite().all(dim=1)
        good = finite.nonzero().flatten().tolist()
        bad = {
            int(batch.place[index]): f"{batch.names[index]}: {self._problem(found[index])}"
            for index in (~finite).nonzero().flatten().tolist()
        }
        names = tuple(batch.names[index] for index in good)
        return Embedded(batch.place[good], names, stored[good], batch.labels[good], batch.unreadable, bad)

    @torch.inference_mode()
    def _run(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.zeros(0, 0 if self.output is None else self.output.width)
        with eval_mode(self.model):
            returned = self.model(images.to(self.device, self.precision, non_blocking=True))
        found = main_output(returned, "features" if self.output is None else self.output.kind)
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            raise BadSetting(f"the model returns {what} for {len(images)} images; an embedding is one vector for each")
        if self.output is None:
            self.output = Output("features", found.shape[1])
        if found.shape[1] != self.output.width:
            raise BadSetting(
                f"the model returns {what} for {len(images)} images, and {self.output.width} numbers before"
            )
        found = found.float().cpu()
        return found / found.norm(dim=1, keepdim=True) if self.normalise else found

    def _problem(self, found: Tensor) -> str:
        """Why a vector cannot be stored."""
        if bool(found.isfinite().all()):
            return f"it has numbers up to {float(found.abs().max()):.3g}, and float16 ends at 65504; store float32"
        return f"its embedding is not finite{', or is zero and has no direction' if self.normalise else ''}"


def _output_of(model: nn.Module) -> Output | None:
    """What a model returns; None for other modules, e.g. a compiled one: then the first batch tells."""
    try:
        output = host_of(model).output
    except UnsupportedBackbone:
        return None
    if output is None:
        raise UnsupportedBackbone(
            f"{type(model).__name__} takes more than images; give the part of it that embeds images: for CLIP "
            "CLIPVisionModelWithProjection (the commands do so by themselves: hf:NAME), for open_clip model.visual"
        )
    return output


def check_output(output: Output) -> None:
    """Refuse models without one vector for an image."""
    if output.kind == "tokens":
        raise BadSetting(
            f"the model has an output for every token, {output.width} numbers each, and an embedding is one vector for "
            "an image; create it with pooling, e.g. global_pool='token' or 'avg'"
        )


def dataset_of(model: nn.Module, images: Any) -> Any:
    """Images of any kind as a data set with names and places."""
    if isinstance(images, (str, Path)):
        height, width = host_of(model).inputs.size
        size = height if height == width else None  # a model for any size is not for that of its weights alone
        return open_images(model, DataSettings(data_dir=Path(images), split="", img_size=size, labels=False))
    if isinstance(images, Tensor):
        inputs = host_of(model).inputs
        if images.ndim != 4 or images.shape[1] != inputs.channels:
            raise BadInput(
                f"images are {list(images.shape)}; give [images, {inputs.channels}, height, width], a folder or a data "
                "set"
            )
        return InMemory(images, torch.full((len(images),), -1))
    if isinstance(images, (InMemory, ImageFiles, ImageStream)):
        return images
    if not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise BadInput(
            f"images are a {type(images).__name__}; give a folder, a tensor [images, channels, height, width], or a "
            "data set with a length and an index"
        )
    return Given(images)


class Given(Dataset[Item]):
    """A data set of the caller's: prepared images, alone or first in a tuple with their label."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Item:
        name = f"image {place}"
        try:
            found = self.images[place]
            if isinstance(found, Item):
                return found._replace(place=place)
            image, label = (found[0], found[1]) if isinstance(found, (tuple, list)) and len(found) > 1 else (found, -1)
            if isinstance(image, (tuple, list)):
                image = image[0]
            if not isinstance(image, Tensor):
                raise GTPError(f"it is a {type(image).__name__} and must be a tensor; give the data set a transform")
            return Item(place, image, _number(label), name, "")
        except Exception as error:  # of the caller's own code
            return Item(place, torch.zeros(0), -1, name, first_line(error))


def _number(label: Any) -> int:
    """A label as a number; -1 for anything else."""
    try:
        return int(label)
    except (TypeError, ValueError):
        return -1
