"""embed: the embeddings of a model, batch by batch, with the names of the images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Transform
from gtp_vit.data.dataset import ImageDataset, Images, InMemoryDataset, SizedDataset, StreamingImageDataset, UserDataset
from gtp_vit.data.loader import batches, planned_batches
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.embeddings.batch_embedder import BatchEmbedder, EmbeddingBatch
from gtp_vit.errors import InputError, check_range
from gtp_vit.patching import host_of
from gtp_vit.runs import distributed


@dataclass(frozen=True)
class PictureFolder:
    """A folder of pictures, and how they are read.

    >>> folder = PictureFolder("photos", ignore_exif=True)
    """

    path: str | Path
    transform: Transform | None = None
    """A function from a picture to a tensor, where it is not known how the weights want it; of a Hugging Face model one
    that returns `processor(picture, return_tensors="pt")["pixel_values"][0]`."""
    ignore_exif: bool = False
    """Take pictures as they are stored, not upright as their EXIF data say."""


Source = str | Path | PictureFolder | Tensor | SizedDataset | Images


def embed(
    model: nn.Module,
    images: Source,
    *,
    batch_size: int = 64,
    workers: int = 2,
    patches: bool = False,
    normalise: bool = False,
    dtype: str = "float32",
) -> Iterator[EmbeddingBatch]:
    """The embeddings of all images in order, batch by batch; images are read while the model works.

    What a model returns is its embedding: pooled features (num_classes=0), an image embedding as CLIP's, or class
    scores if it has classes. Where torch.distributed runs, every process gets its own batches, and no two the same.

    Args:
        model: patched or not; it runs in eval mode, where it is, in its own precision.
        images: a folder, prepared as the model's weights want it, or a `PictureFolder`, which says more; prepared
            images as a tensor [I, channels, height, width]; or a data set of such, alone or first in a tuple with
            their label.
        batch_size: images at a time.
        workers: processes that read images.
        patches: the normed features of all patches, [B, patches, C] row by row, instead of one vector; of a model that
            was patched with restore=True.
        normalise: scale every vector to length 1.
        dtype: float32 or float16.

    Yields:
        Batches: the embeddings, with indices, names and labels of their images.

    Raises:
        GTPError: the model's output is not an embedding, or the images cannot be opened.

    >>> import gtp_vit
    >>> fast = gtp_vit.patch(gtp_vit.create_model("vit_tiny_patch16_224", num_classes=0))
    >>> [tuple(part.embeddings.shape) for part in embed(fast, torch.zeros(3, 3, 224, 224), batch_size=2)]
    [(2, 192), (1, 192)]
    """
    check_range("batch_size", batch_size, 1, 65536, integer=True)
    check_range("workers", workers, 0, 256, integer=True)
    embedder = BatchEmbedder(model, patches=patches, normalise=normalise, dtype=dtype)
    dataset = dataset_of(model, images)
    if isinstance(dataset, StreamingImageDataset):
        return map(
            embedder,
            batches(
                dataset, batch_size=batch_size, workers=workers, rank_and_world_size=distributed.rank_and_world_size()
            ),
        )
    rank, processes = distributed.rank_and_world_size()
    count = len(dataset)
    plan = [range(begin, min(begin + batch_size, count)) for begin in range(0, count, batch_size)][rank::processes]
    return map(embedder, planned_batches(dataset, plan, workers=workers, pin=embedder.device.type == "cuda"))


def dataset_of(model: nn.Module, images: Source) -> Images:
    """Images of any kind as a data set with names and places."""
    images = PictureFolder(images) if isinstance(images, (str, Path)) else images
    if isinstance(images, PictureFolder):
        height, width = host_of(model).inputs.size
        size = height if height == width else None  # a model for any size is not for that of its weights alone
        read = DataSettings(Path(images.path), split="", labels=False, img_size=size, ignore_exif=images.ignore_exif)
        return open_images(model, dataclasses.replace(read, transform=images.transform))
    if isinstance(images, Tensor):
        inputs = host_of(model).inputs
        if images.ndim != 4 or images.shape[1] != inputs.channels:
            raise InputError(
                f"images are {list(images.shape)}; give [images, {inputs.channels}, height, width], a folder or a data "
                "set"
            )
        return InMemoryDataset(images, torch.full((len(images),), -1))
    if isinstance(images, (InMemoryDataset, ImageDataset, StreamingImageDataset)):
        return images
    if not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise InputError(
            f"images are a {type(images).__name__}; give a folder, a tensor [images, channels, height, width], or a "
            "data set with a length and an index"
        )
    return UserDataset(images)
