"""An exported file in the place of a model: what it says of itself, and the float model that it was made from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gtp_vit.cli.flags import Chosen
from gtp_vit.cli.model_flags import DataFlags, ModelFlags, check_reading, data_settings, embedded_images
from gtp_vit.data.dataset import ImageFiles, ImageStream, InMemory
from gtp_vit.data.open import open_pictures
from gtp_vit.data.transforms import make_transform
from gtp_vit.engines import check_precision, engine_of
from gtp_vit.engines.description import Description
from gtp_vit.engines.metadata import file_fingerprint, read_about
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError
from gtp_vit.methods import method_from_dict
from gtp_vit.models import bundled
from gtp_vit.models.factory import has_own_weights
from gtp_vit.models.sources import preparation_of, transform_of
from gtp_vit.patching import host_of
from gtp_vit.profiling.macs import macs
from gtp_vit.runs.fingerprint import tensors_fingerprint

Flags = TypeVar("Flags", bound=ModelFlags)


@dataclass(frozen=True)
class ExportedFile:
    """A file for an engine, and its description."""

    path: Path
    about: Description

    def settings(self) -> dict[str, Any]:
        """What decides its outputs, for results and journals."""
        about = self.about
        own = {"method": about.method, "precision": about.precision, "engine": about.engine}
        return {**own, "file": file_fingerprint(self.path)}


def named_file(flags: ModelFlags, chosen: Chosen | None, words: Sequence[str]) -> ExportedFile:
    """The exported file that the flags name in place of a model."""
    path = Path(flags.model)
    wrong = [word for word in words if word.partition("=")[0] in ("--method", "--img-size", "--num-classes")]
    settings = frozenset() if chosen is None else chosen.given
    if wrong or settings:
        given = wrong[0] if wrong else f"--{min(settings).replace('_', '-')}"
        raise GTPError(f"{path.name} has its own method and sizes; leave out {given}")
    device = getattr(flags, "device", "cpu")
    if device != "cpu":
        raise GTPError(f"--device is {device}; exported files run on a CPU, leave it out")
    return ExportedFile(path, read_about(path))


def from_file(flags: Flags, chosen: Chosen | None, words: Sequence[str]) -> tuple[ExportedFile, Flags]:
    """The exported file that the flags name in place of a model, and the flags of the model it was made from."""
    file = named_file(flags, chosen, words)
    path, about = file.path, file.about
    name, weights = about.model, about.weights
    if has_own_weights(name) and name != bundled.NAME:  # of Hugging Face: a name on the hub, or a folder
        if flags.checkpoint is not None:
            name, flags = f"hf:{flags.checkpoint}", dataclasses.replace(flags, checkpoint=None)
        return file, dataclasses.replace(flags, model=name)
    if flags.checkpoint is None and not flags.pretrained and name != bundled.NAME:
        if weights == "timm":
            flags = dataclasses.replace(flags, pretrained=True)
        elif weights and Path(weights).is_file():
            flags = dataclasses.replace(flags, checkpoint=Path(weights))
        else:
            raise GTPError(
                f"{path.name} is compared with the float model it was made from, whose weights "
                f"({weights or 'not named'}) are not here; give --checkpoint FILE or --pretrained"
            )
    return file, _with_sizes(flags, about)


def timed_file(flags: Flags, chosen: Chosen | None, words: Sequence[str]) -> tuple[ExportedFile, Flags]:
    """The exported file that the flags name to be timed, and the flags of its model, whose weights do not matter."""
    file = named_file(flags, chosen, words)
    return file, _with_sizes(flags, file.about)


def _with_sizes(flags: Flags, about: Description) -> Flags:
    """The flags with the model that a file was made from, and its sizes."""
    if has_own_weights(about.model) and about.model != bundled.NAME:
        return dataclasses.replace(flags, model=about.model)
    sizes: dict[str, Any] = _sizes(about.model, about.size, 0 if about.kind in ("features", "tokens") else about.width)
    return dataclasses.replace(flags, model=about.model, **sizes)


def _sizes(name: str, size: Sequence[int], width: int) -> dict[str, int]:
    """Image size and number of classes, for models that can have different ones."""
    if name == bundled.NAME:
        return {}
    if size[0] != size[1]:
        raise GTPError(f"the file takes images of {size[0]} x {size[1]}; only square ones can be evaluated")
    return {"img_size": size[0], "num_classes": width}


def load_file(file: ExportedFile, model: Any, threads: int) -> ExportedModel:
    """The file as a module, if `model` is what it was made from: the same weights, sizes, output and MACs."""
    about = file.about
    check_precision(engine_of(file.path), about.precision)
    found = tensors_fingerprint(model.state_dict())
    if found != about.fingerprint:
        raise GTPError(
            f"{file.path.name} was made from other weights (fingerprint {about.fingerprint}, these: {found}), so "
            "agreement and KL would mean nothing; give the checkpoint that was exported"
        )
    host = host_of(model)
    inputs, output = host.inputs, host.output
    for what, said, has in (
        ("channels", about.channels, inputs.channels),
        ("size of images", list(about.size), list(inputs.size)),
        ("output", [about.kind, about.width], output and [output.kind, output.width]),
        ("MACs unreduced", about.unreduced, macs(model).total),
    ):
        if said != has:
            raise _contradiction(file, what, said, has)
    method = None if about.method is None else method_from_dict(about.method)
    if method is not None and not any(getattr(method, name) for name in method.files):  # its parts may not be here
        counts = [macs(model, method, lossless=lossless).total for lossless in (True, False)]
        if about.exported not in counts:
            raise _contradiction(file, "MACs", about.exported, counts[0])
    return ExportedModel(file.path, about.precision, threads)


def _contradiction(file: ExportedFile, what: str, said: Any, has: Any) -> GTPError:
    return GTPError(
        f"{file.path.name} says that its {what} is {said}, and of {file.about.model} it is {has}; export it again"
    )


def images_of_file(
    flags: DataFlags, file: ExportedFile, *, labels: bool, model: Any = None
) -> InMemory | ImageFiles | ImageStream:
    """The images of the flags, prepared as an exported file says, whatever else would want them differently.

    Args:
        flags: where images are; --crop-pct and --interpolation go before what the file says.
        file: says how it wants them.
        labels: folders are the classes of the file.
        model: what the file was made from, if it is here: its processor is used where timm has no words for it.
    """
    check_reading(flags)
    about = file.about
    own = embedded_images(dataclasses.replace(flags, model=about.model))
    if own is not None:
        words = about.preparation
        if (words.get("mean"), words.get("std")) != ([bundled.MEAN], [bundled.STD]) or about.size != own.images.shape[
            2:
        ]:
            raise GTPError(
                f"{file.path.name} wants its images prepared in another way than those of {bundled.NAME} are; give "
                "--data-dir, a folder with one folder for each class"
            )
        count = flags.limit or len(own)
        return InMemory(own.images[:count], own.labels[:count])
    wanted = about.width if labels and about.kind == "classes" else 0
    shape = (about.channels, *about.size)
    return open_pictures(data_settings(flags, labels=labels), _transform(flags, file, model), shape, wanted)


def preparation_words(file: ExportedFile, changes: dict[str, Any]) -> dict[str, Any] | None:
    """timm's configuration of images for a file, with the user's changes; None if the file does not say it in words."""
    import timm.data

    about = file.about
    if "mean" not in about.preparation:
        return None
    stored = {**about.preparation, "input_size": (about.channels, *about.size)}
    found: dict[str, Any] = timm.data.resolve_data_config(changes, pretrained_cfg=stored)
    return found


def _transform(flags: DataFlags, file: ExportedFile, model: Any) -> Any:
    """From a picture to a tensor, as a file says."""
    name, changes = (
        file.path.name,
        {key: value for key in ("crop_pct", "interpolation") if (value := getattr(flags, key))},
    )
    config = preparation_words(file, changes)
    if config is not None:
        return make_transform(config)
    processor = file.about.preparation.get("processor")
    if model is None or processor is None:
        raise GTPError(
            f"{name} does not say how its images are prepared in words that timm knows; name the model it "
            f"was made from instead, with --engine {engine_of(file.path).name}"
        )
    if changes:
        raise GTPError(
            f"{name} prepares images by its own processor; leave out --{next(iter(changes)).replace('_', '-')}"
        )
    check_processor(file, flags.model)
    return transform_of(flags.model, model)


def check_processor(file: ExportedFile, model: str) -> None:
    """Raise GTPError unless a model's processor is the one that the file was exported with."""
    found = json.loads(json.dumps(preparation_of(model), default=str))
    if found != {"processor": file.about.preparation.get("processor")}:
        raise GTPError(
            f"the processor of {model} prepares images differently from the one that {file.path.name} was exported "
            "with; give back its preprocessor_config.json, or export the file again"
        )
