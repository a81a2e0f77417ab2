"""An exported file in the place of a model: what it says of itself, and the float model that it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gtp_vit import embedded
from gtp_vit.cli.flags import Chosen
from gtp_vit.cli.source import ModelFlags
from gtp_vit.engines import check_precision, engine_of
from gtp_vit.engines.about import read_about
from gtp_vit.engines.loaded import ExportedModel, file_fingerprint
from gtp_vit.errors import GTPError
from gtp_vit.inputs.models import has_own_weights
from gtp_vit.measure.identity import tensors_fingerprint

Flags = TypeVar("Flags", bound=ModelFlags)


@dataclass(frozen=True)
class ExportedFile:
    """A file for an engine, and its description."""

    path: Path
    about: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """What decides its outputs, for results and journals."""
        keep = ("method", "precision", "engine")
        return {**{key: self.about[key] for key in keep}, "file": file_fingerprint(self.path)}


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
    name, weights = about["model"], about["weights"]["from"]
    if has_own_weights(name) and name != embedded.NAME:  # of Hugging Face: a name on the hub, or a folder
        if flags.checkpoint is not None:
            name, flags = f"hf:{flags.checkpoint}", dataclasses.replace(flags, checkpoint=None)
        return file, dataclasses.replace(flags, model=name)
    if flags.checkpoint is None and not flags.pretrained and name != embedded.NAME:
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


def _with_sizes(flags: Flags, about: dict[str, Any]) -> Flags:
    """The flags with the model that a file was made from, and its sizes."""
    name, size, output = about["model"], about["input"]["size"], about["output"]
    if has_own_weights(name) and name != embedded.NAME:
        return dataclasses.replace(flags, model=name)
    sizes: dict[str, Any] = _sizes(name, size, 0 if output["kind"] in ("features", "tokens") else output["width"])
    return dataclasses.replace(flags, model=name, **sizes)


def _sizes(name: str, size: Sequence[int], width: int) -> dict[str, int]:
    """Image size and number of classes, for models that can have different ones."""
    if name == embedded.NAME:
        return {}
    if size[0] != size[1]:
        raise GTPError(f"the file takes images of {size[0]} x {size[1]}; only square ones can be evaluated")
    return {"img_size": size[0], "num_classes": width}


def load_file(file: ExportedFile, model: Any, threads: int) -> ExportedModel:
    """The file as a module, if `model` has the weights that it was made from."""
    engine, wanted = engine_of(file.path), file.about["weights"]["fingerprint"]
    check_precision(engine, file.about["precision"])
    found = tensors_fingerprint(model.state_dict())
    if found != wanted:
        raise GTPError(
            f"{file.path.name} was made from other weights (fingerprint {wanted}, these: {found}), so agreement and "
            "KL would mean nothing; give the checkpoint that was exported"
        )
    return ExportedModel(file.path, file.about["precision"], threads)
