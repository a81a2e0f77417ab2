"""Images for an exported file, prepared as the file says, whatever else would want them differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gtp_vit.data.dataset import ImageDataset, InMemoryDataset, StreamingImageDataset
from gtp_vit.data.open import DataSettings, open_with_transform
from gtp_vit.data.transforms import make_transform
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.errors import GTPError
from gtp_vit.models import bundled
from gtp_vit.models.sources import preprocessing_of, transform_of

Transform = Callable[[Any], Tensor]  # of a picture


def open_for_file(
    file: ExportedFile, settings: DataSettings, model: nn.Module | None = None, name: str = ""
) -> ImageDataset | StreamingImageDataset:
    """Images from files.

    Args:
        file: says how it wants them.
        settings: where they are; a crop_pct or interpolation there goes before what the file says.
        model: what the file was made from, if it is here: its processor is used where timm has no words for it.
        name: of the model.
    """
    metadata = file.metadata
    classes = metadata.output.width if settings.labels and metadata.output.kind == "classes" else 0
    shape = (metadata.channels, *metadata.size)
    words = ("crop_pct", "interpolation")
    changes = {word: value for word in words if (value := getattr(settings, word))}
    return open_with_transform(settings, transform_for_file(file, changes, model, name), shape, classes)


def bundled_for_file(file: ExportedFile, images: InMemoryDataset) -> InMemoryDataset:
    """The images inside the package, if they are prepared as the file wants them."""
    words = file.metadata.preprocessing
    if (words.mean, words.std) != ((bundled.MEAN,), (bundled.STD,)) or file.metadata.size != images.images.shape[2:]:
        raise GTPError(
            f"{file.name} expects other preprocessing than the images of {bundled.NAME}; give --data-dir, "
            "a folder with one folder for each class"
        )
    return images


def transform_from_metadata(file: ExportedFile, changes: dict[str, Any]) -> Transform | None:
    """From a picture to a tensor, with the user's changes; None if the file has no words of timm's for it."""
    import timm.data

    metadata = file.metadata
    if metadata.preprocessing.mean is None:
        return None
    stored = {**metadata.preprocessing.to_dict(), "input_size": (metadata.channels, *metadata.size)}
    return make_transform(timm.data.resolve_data_config(changes, pretrained_cfg=stored))


def check_processor(file: ExportedFile, name: str) -> None:
    """Raise GTPError unless the processor of the model of this name is the one that the file was exported with."""
    settings = json.loads(json.dumps(preprocessing_of(name), default=str))
    if settings != {"processor": file.metadata.preprocessing.processor}:
        raise GTPError(
            f"the processor of {name} preprocesses images differently from the one that {file.name} was exported with; "
            "give back its preprocessor_config.json, or export the file again"
        )


def transform_for_file(
    file: ExportedFile, changes: dict[str, Any], model: nn.Module | None = None, name: str = ""
) -> Transform:
    """From a picture to a tensor as the file says, or with the processor of the model that it was made from."""
    in_words = transform_from_metadata(file, changes)
    if in_words is not None:
        return in_words
    if model is None or file.metadata.preprocessing.processor is None:
        raise GTPError(
            f"{file.name} has preprocessing that timm has no name for; give the model it was "
            f"made from instead, with --engine {file.engine.name}"
        )
    if changes:
        raise GTPError(
            f"{file.name} preprocesses images with its own processor; remove --{next(iter(changes)).replace('_', '-')}"
        )
    check_processor(file, name)
    transform = transform_of(name, model)
    assert transform is not None  # it has a processor
    return transform
