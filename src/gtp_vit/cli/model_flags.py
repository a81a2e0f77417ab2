"""Flags that several commands share: which model and which images, and how to open them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from gtp_vit.cli.parser import Choices, Positional, Short
from gtp_vit.core.ranges import Range
from gtp_vit.data.dataset import ImageDataset, InMemoryDataset, StreamingImageDataset
from gtp_vit.data.loader import evenly_spaced_images, first_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.data.transforms import INTERPOLATIONS
from gtp_vit.errors import GTPError, UnsupportedModelError
from gtp_vit.models import bundled
from gtp_vit.models.factory import create_model, has_own_weights, require_known_model, unsupported_reason
from gtp_vit.models.sources import transform_of
from gtp_vit.runs import distributed

NUM_CORES = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


@dataclass(frozen=True)
class ModelFlags:
    """Flags that name a model."""

    model: Positional[str] = bundled.NAME
    """A timm model, lvvit_t/s/m/l, or fashion_vit, the small model inside the package; hf:FOLDER_OR_NAME,
    open_clip:NAME/TAG, torchvision:NAME."""
    pretrained: bool = False
    """Load pre-trained weights. fashion_vit and hf:... always have them."""
    checkpoint: Path | None = None
    """A file of weights: safetensors or pth; loaded without executing code."""
    num_classes: int | None = None
    """Number of classes, if different from the model's; for finetuned checkpoints."""
    img_size: int | None = None
    """Height and width of the images, if different from the model's."""
    resample_positions: bool = False
    """Resample the positions of a --checkpoint of the model's own size to --img-size."""
    threads: Annotated[int, Range(0, 4096)] = 0
    """CPU threads; 0 = torch's default."""


@dataclass(frozen=True)
class DataFlags(ModelFlags):
    """Flags that name a model and its images, spelled as in timm."""

    data_dir: Path | None = None
    """Image folder with one subfolder per class, optionally below train/ and validation/; also a URL: s3://, gs://,
    hf://. fashion_vit has images of its own."""
    dataset: str = ""
    """Data set in timm's notation: hfds/NAME, wds/NAME, torch/NAME; parquet/COLUMN for Parquet files with the bytes of
    images in that column; by default a folder."""
    split: str = "validation"
    """Split of the data set."""
    batch_size: Annotated[int, Short("-b"), Range(1, 65536)] = 64
    """Images in a batch."""
    workers: Annotated[int, Short("-j"), Range(0, 256)] = NUM_CORES
    """Processes that read images; by default as many as there are cores, at most 8."""
    limit: Annotated[int, Range(0, 10**9)] = 0
    """Only the first images, at most this many; 0 = all."""
    crop_pct: Annotated[float | None, Range(0, 1, exclude_low=True)] = None
    """Fraction of the image that is evaluated, if different from the checkpoint's."""
    interpolation: Annotated[str, Choices(INTERPOLATIONS)] = ""
    """Interpolation of the resize, if different from the checkpoint's."""
    ignore_exif: bool = False
    """Ignore the EXIF orientation, as timm and torchvision do when they score ImageNet. By default images are turned
    upright."""
    count_links: bool = False
    """Count an image once per link or hard link to it. By default it counts once."""
    device: str = "cpu"
    """cpu, cuda, or auto: one accelerator per process if there are any."""


def make_model(flags: ModelFlags) -> nn.Module:
    """The model of the flags, in eval mode, on their device."""
    if flags.threads:
        torch.set_num_threads(flags.threads)
    reason = unsupported_reason(flags.model) if flags.pretrained and ":" not in flags.model else None
    if reason is not None:  # before anything is downloaded
        raise UnsupportedModelError(reason)
    model = create_model(
        flags.model,
        pretrained=flags.pretrained,
        checkpoint=flags.checkpoint,
        img_size=flags.img_size,
        num_classes=flags.num_classes,
        resample_positions=flags.resample_positions,
    )
    return model.to(distributed.device_of(getattr(flags, "device", "cpu")))


def make_dataset(
    flags: DataFlags, model: nn.Module, *, labels: bool = True
) -> ImageDataset | StreamingImageDataset | InMemoryDataset:
    """The images of the flags, prepared as the model expects them; without `labels`, folders need not be classes."""
    own = embedded_images(flags)
    if own is not None:
        count = flags.limit or len(own)
        return InMemoryDataset(own.images[:count], own.labels[:count])
    transform = transform_of(flags.model, model)
    if transform is not None:
        changed = [name for name in ("crop_pct", "interpolation") if getattr(flags, name)]
        if changed:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise GTPError(f"{flags.model} preprocesses images with its own transform; remove {names}")
    settings = data_settings(flags, labels=labels)
    return open_images(model, dataclasses.replace(settings, transform=transform))


def read_images(flags: DataFlags, model: nn.Module, count: int, fewest: int) -> tuple[torch.Tensor, list[str]]:
    """Some images, evenly spread over the data set (whose order is often by class), and what could not be read."""
    dataset = evenly_spaced_images(make_dataset(flags, model, labels=False), count)
    images, problems = first_images(dataset, count, batch_size=32, workers=flags.workers)
    if len(images) < fewest and problems:
        raise GTPError(
            f"only {len(images)} images could be read, and {len(problems)} not, e.g. {problems[0]}; repair or "
            "replace these"
        )
    if not len(images):
        raise GTPError("there are no images in this data set; give a different --data-dir or --split")
    return images, problems


def embedded_images(flags: DataFlags) -> InMemoryDataset | None:
    """The images inside the package where the flags name none, which only their model can take; else None."""
    if flags.data_dir is not None or flags.dataset:
        return None
    if flags.model != bundled.NAME:
        raise GTPError(f"{flags.model} needs images: give --data-dir, a folder with one folder for each class")
    images, classes = bundled.sample_images()
    return InMemoryDataset(bundled.normalise(images), classes)


def data_settings(flags: DataFlags, *, labels: bool = True) -> DataSettings:
    """The data set and the preprocessing of the flags."""
    return DataSettings(
        data_dir=flags.data_dir or Path(),
        dataset=flags.dataset,
        split=flags.split,
        img_size=flags.img_size,
        crop_pct=flags.crop_pct,
        interpolation=flags.interpolation,
        ignore_exif=flags.ignore_exif,
        count_links=flags.count_links,
        limit=flags.limit,
        labels=labels,
    )


def check_weights(flags: ModelFlags) -> None:
    """Refuse unknown models, and random weights, which make accuracy meaningless."""
    require_known_model(flags.model)
    real = flags.pretrained or flags.checkpoint is not None or has_own_weights(flags.model)
    if not real:
        raise GTPError(f"{flags.model} has random weights; give --pretrained or --checkpoint FILE")
