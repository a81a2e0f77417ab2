"""Labelled images, read as the model wants them: folders, Hugging Face data sets and WebDataset through timm's readers.

An image that cannot be read does not end a run and is not replaced by another (as timm's own data sets do): it comes
back with the reason, and the caller counts it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from gtp_vit.errors import GTPError

MOST_PIXELS = 100_000_000  # of one image; more is taken for a decompression bomb


class Item(NamedTuple):
    """One image, or why there is none."""

    place: int
    image: Tensor  # zeros if it cannot be read
    label: int
    name: str
    problem: str  # "" = none


class Batch(NamedTuple):
    """Images that could be read, and the others' names and problems."""

    place: Tensor  # [B] places in the data set
    images: Tensor  # [B, channels, height, width]
    labels: Tensor  # [B]
    unreadable: dict[int, str]  # place -> name and problem


@dataclass(frozen=True)
class DataSettings:
    """Where images come from and how they are prepared; names as in timm's validate.py."""

    data_dir: Path
    dataset: str = ""  # "" = folders of images; hfds/NAME, wds/NAME and torch/NAME as in timm
    split: str = "validation"
    img_size: int | None = None
    crop_pct: float | None = None
    interpolation: str = ""
    limit: int = 0  # only the first so many; 0 = all


class ImageFiles(Dataset[Item]):
    """A timm reader with a place for every image."""

    def __init__(self, reader: Any, transform: Any, shape: tuple[int, ...], limit: int = 0) -> None:
        self.reader, self.transform, self.shape, self.limit = reader, transform, shape, limit

    def __len__(self) -> int:
        return min(len(self.reader), self.limit or len(self.reader))

    def __getitem__(self, index: int) -> Item:
        name = str(self.reader.filename(index)) if hasattr(self.reader, "filename") else f"image {index}"
        try:
            file, label = self.reader[index]
            with contextlib.closing(file):
                return Item(index, self.transform(_open(file)), int(label), name, "")
        except Exception as error:  # decoders raise what they like
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return Item(index, torch.zeros(self.shape), -1, name, reason[0])


class ImageStream(IterableDataset[Item]):
    """A timm reader that only knows the next image; places are counted."""

    def __init__(self, stream: Iterable[Any], transform: Any, shape: tuple[int, ...], limit: int = 0) -> None:
        self.stream, self.transform, self.shape, self.limit = stream, transform, shape, limit

    def __iter__(self) -> Iterator[Item]:
        for index, (image, label) in enumerate(itertools.islice(self.stream, self.limit or None)):
            try:
                yield Item(index, self.transform(image.convert("RGB")), int(label), f"image {index}", "")
            except Exception as error:
                yield Item(index, torch.zeros(self.shape), -1, f"image {index}", str(error).splitlines()[0])


class InMemory(Dataset[Item]):
    """Images that are prepared already."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return Item(index, self.images[index], int(self.labels[index]), f"image {index}", "")


def preparation(model: nn.Module, settings: DataSettings) -> dict[str, Any]:
    """How this checkpoint wants its images: timm's data configuration of the model, with the user's changes."""
    import timm.data

    changes = {"crop_pct": settings.crop_pct, "interpolation": settings.interpolation, "img_size": settings.img_size}
    config = timm.data.resolve_data_config({k: v for k, v in changes.items() if v}, model=model)
    embed: Any = model.patch_embed
    channels = next(p.shape[1] for p in embed.parameters() if p.ndim == 4)  # of the first convolution
    if not getattr(model, "dynamic_img_size", False):
        config["input_size"] = (channels, *embed.img_size)  # as the model is, whatever its checkpoint says
    return config


def open_images(model: nn.Module, settings: DataSettings) -> ImageFiles | ImageStream:
    """The data set, checked against the model's classes."""
    import timm.data

    folder = settings.data_dir
    if not settings.dataset and not folder.is_dir():
        near = [path.name for path in folder.parent.glob(f"{folder.name[:3]}*")] if folder.parent.is_dir() else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise GTPError(f"there is no folder {folder}{hint}")
    config = preparation(model, settings)
    transform = timm.data.create_transform(**config, is_training=False)
    try:
        dataset = timm.data.create_dataset(settings.dataset, root=str(folder), split=settings.split)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GTPError(f"no images in {folder}: {reason[0]}") from error
    shape = tuple(config["input_size"])
    if isinstance(dataset, IterableDataset):
        return ImageStream(dataset, transform, shape, settings.limit)
    reader = dataset.reader if hasattr(dataset, "reader") else _Plain(dataset)
    if len(reader) == 0:
        raise GTPError(f"no images in {folder}; give a folder with one folder of images for each class")
    classes, wanted = len(getattr(reader, "class_to_idx", ())), getattr(model, "num_classes", 0)
    if classes and wanted and classes != wanted:
        raise GTPError(
            f"{folder} has {classes} classes, but the model tells {wanted} apart; give the model's own data, or a "
            f"model with {classes} classes (--num-classes)"
        )
    return ImageFiles(reader, transform, shape, settings.limit)


class _Plain:
    """torchvision's data sets have no reader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def batches(
    dataset: Dataset[Item], *, batch_size: int, workers: int, skip: int = 0, pin: bool = False
) -> Iterator[Batch]:
    """Batches in the order of the data set, without its first `skip` images."""
    if isinstance(dataset, InMemory):  # no copy, no process
        for begin in range(skip, len(dataset), batch_size):
            part = slice(begin, begin + batch_size)
            images = dataset.images[part]
            yield Batch(torch.arange(begin, begin + len(images)), images, dataset.labels[part], {})
        return
    if isinstance(dataset, ImageStream):
        loader = DataLoader(dataset, batch_size, num_workers=min(workers, 1), collate_fn=_collate)
        seen = 0
        for batch in loader:
            seen += len(batch.place) + len(batch.unreadable)
            if seen > skip:  # the journal is written batch by batch, so a run ends between two of them
                yield batch
        return
    rest = Subset(dataset, range(skip, len(dataset)))  # type: ignore[arg-type]
    yield from DataLoader(rest, batch_size, num_workers=workers, collate_fn=_collate, pin_memory=pin)


def _collate(items: list[Item]) -> Batch:
    good = [item for item in items if not item.problem]
    images = torch.stack([item.image for item in good]) if good else torch.zeros(0, *items[0].image.shape)
    return Batch(
        torch.tensor([item.place for item in good], dtype=torch.long),
        images,
        torch.tensor([item.label for item in good], dtype=torch.long),
        {item.place: f"{item.name}: {item.problem}" for item in items if item.problem},
    )


def open_picture(path: Path) -> Any:
    """One picture of the user's, or a clear error."""
    if not path.is_file():
        raise GTPError(f"there is no picture {path}")
    try:
        with path.open("rb") as file:
            return _open(file)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GTPError(f"{path} cannot be read: {reason[0]}") from error


def _open(file: Any) -> Any:
    """A decoded RGB picture; pictures that are bombs, or cut off, raise."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = file if isinstance(file, Image.Image) else Image.open(file)
        if image.width * image.height > MOST_PIXELS:
            raise GTPError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS // 10**6} million")
        return image.convert("RGB")
