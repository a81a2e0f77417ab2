"""Flags about engines: which one, in which precision; and a file for one in the place of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from torch import nn

from gtp_vit.cli.flags import MethodChoice
from gtp_vit.cli.model_flags import DataFlags, ModelFlags, data_settings, embedded_images
from gtp_vit.cli.parser import Choices
from gtp_vit.data.dataset import ImageDataset, InMemoryDataset, StreamingImageDataset
from gtp_vit.engines import ENGINES, TORCH, check_precision, engine_names, precisions
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.file_images import bundled_for_file, open_for_file
from gtp_vit.errors import GTPError
from gtp_vit.models import bundled
from gtp_vit.models.factory import has_own_weights

Flags = TypeVar("Flags", bound=ModelFlags)


@dataclass(frozen=True)
class EngineFlags:
    """Where models run."""

    engine: Annotated[str, Choices(engine_names)] = TORCH
    """What runs the models: torch, or an engine, for which they are exported first; gtp-vit check lists them."""
    precision: Annotated[str, Choices(precisions)] = "f32"
    """Precision in the engine."""


def check_engine(engine: str, precision: str, device: str) -> None:
    """Refuse what does not exist, is not installed, or makes no sense."""
    if engine != TORCH:
        check_precision(ENGINES[engine], precision)
        if device != "cpu":
            raise GTPError(f"--device is {device}; {engine} runs on a CPU here; remove it")
    elif precision != "f32":
        raise GTPError(f"--precision is {precision}, which is for engines; give --engine, or in torch --dtype")


def exported_file_of(
    flags: ModelFlags, choice: MethodChoice | None, arguments: Sequence[str], *own: str
) -> ExportedFile:
    """The exported file that the flags name in place of a model; `own` are more flags that it answers itself."""
    path = Path(flags.model)
    wrong = [word for word in arguments if word.partition("=")[0] in ("--method", "--img-size", "--num-classes", *own)]
    wrong += [f"--{name.replace('_', '-')}" for name in sorted(choice.given_settings if choice else ())]
    if wrong:
        raise GTPError(f"{wrong[0].partition('=')[0]} was fixed when {path.name} was exported; remove it")
    device = getattr(flags, "device", "cpu")
    if device != "cpu":
        raise GTPError(f"--device is {device}; exported files run on a CPU; remove it")
    return ExportedFile.read(path)


def flags_of_source(flags: Flags, file: ExportedFile) -> Flags:
    """The flags of the model that a file was made from, with its weights, to be compared with it."""
    name, weights = file.metadata.model, file.metadata.weights
    if has_own_weights(name) and name != bundled.NAME:  # of Hugging Face: a name on the hub, or a folder
        if flags.checkpoint is not None:
            name, flags = f"hf:{flags.checkpoint}", dataclasses.replace(flags, checkpoint=None)
        return dataclasses.replace(flags, model=name)
    if flags.checkpoint is None and not flags.pretrained and name != bundled.NAME:
        if weights == "timm":
            flags = dataclasses.replace(flags, pretrained=True)
        elif weights and Path(weights).is_file():
            flags = dataclasses.replace(flags, checkpoint=Path(weights))
        else:
            raise GTPError(
                f"{file.name} is compared with the float model it was made from, whose weights "
                f"({weights or 'not named'}) are not here; give --checkpoint FILE or --pretrained"
            )
    return flags_with_sizes(flags, file)


def flags_with_sizes(flags: Flags, file: ExportedFile) -> Flags:
    """The flags of the model that a file was made from, whose weights do not matter."""
    metadata = file.metadata
    flags = dataclasses.replace(flags, model=metadata.model)
    if has_own_weights(metadata.model):
        return flags
    if metadata.size[0] != metadata.size[1]:
        size = f"{metadata.size[0]} x {metadata.size[1]}"
        raise GTPError(f"the file takes images of {size}; only square ones can be evaluated")
    classes = 0 if metadata.output.kind in ("features", "tokens") else metadata.output.width
    return dataclasses.replace(flags, img_size=metadata.size[0], num_classes=classes)


def images_for_file(
    flags: DataFlags, file: ExportedFile, *, labels: bool, model: nn.Module | None = None
) -> InMemoryDataset | ImageDataset | StreamingImageDataset:
    """The images of the flags, prepared as a file says; --crop-pct and --interpolation go before that."""
    own = embedded_images(dataclasses.replace(flags, model=file.metadata.model))
    if own is None:
        return open_for_file(file, data_settings(flags, labels=labels), model, flags.model)
    own, count = bundled_for_file(file, own), flags.limit or len(own)
    return InMemoryDataset(own.images[:count], own.labels[:count])
