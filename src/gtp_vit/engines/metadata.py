"""The description of a model that is exported, and of a file that was: made, stored, read and checked here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gtp_vit.engines import engine_of
from gtp_vit.engines.description import WORDS, Description, described, preparation_problem
from gtp_vit.engines.engine import Engine, check_installed
from gtp_vit.engines.onnx_export import OPSET, output_of
from gtp_vit.errors import BadSetting, GTPError, first_line
from gtp_vit.models import bundled
from gtp_vit.patching import host_of, is_patched, tower_of, unpatch
from gtp_vit.profiling.macs import macs
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.version import __version__


def about(
    model: Any,
    engine: Engine,
    precision: str,
    classes: Sequence[str] | None,
    name: str,
    weights: str,
    preparation: dict[str, Any] | None,
) -> Description:
    """The description of a model that is exported."""
    import timm

    host, plain = host_of(model), unpatch(model)
    inputs, output = host.inputs, output_of(model)
    known = class_names(model) if classes is None else list(classes)
    if output.kind == "classes" and known is not None and len(known) != output.width:
        raise BadSetting(f"{len(known)} class names are given, and the model has {output.width} classes; give one each")
    return Description(
        model=name or inputs.name,
        weights=weights,
        fingerprint=tensors_fingerprint(plain.state_dict()),
        method=tower_of(model).reduction.method.to_dict() if is_patched(model) else None,
        unreduced=int(macs(plain)),
        exported=int(macs(model)),
        precision=precision,
        engine=engine.name,
        channels=inputs.channels,
        size=inputs.size,
        preparation=_stored_preparation(preparation, inputs),
        kind=output.kind,
        width=output.width,
        classes=tuple(known) if output.kind == "classes" and known is not None else None,
        opset=OPSET,
        versions={"gtp-vit": __version__, "torch": torch.__version__, "timm": timm.__version__, **engine.versions()},
    )


def _stored_preparation(given: dict[str, Any] | None, inputs: Any) -> dict[str, Any]:
    """The words of a preparation that a file keeps; empty if it is not known."""
    words = {
        word: value
        for word, value in (given or inputs.preparation or {}).items()
        if word in WORDS and value is not None
    }
    words = json.loads(json.dumps(words, default=str))  # as it will be read back
    problem = preparation_problem(words, inputs.channels)
    if problem is None:
        return words
    if given is not None:
        raise BadSetting(f"preparation: {problem}")
    return {}  # e.g. three means of weights for colours, and a model that was made for grey images


def class_names(model: Any) -> list[str] | None:
    """The classes of the embedded model, and of models with the classes of ImageNet; None if they are not known."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    inputs = host_of(model).inputs
    if inputs.name == bundled.NAME:
        return list(bundled.CLASSES)
    if inputs.labels is not None:
        return list(inputs.labels)
    kind, width = output_of(model)
    subset = infer_imagenet_subset(unpatch(model))  # by their number
    if subset is None or kind != "classes":
        return None
    info = ImageNetInfo(subset)
    return [info.index_to_description(index) for index in range(width)]


def read_about(path: Path) -> Description:
    """The description of an exported file, which its graph does not contradict; raises GTPError for any other file."""
    engine = engine_of(path)
    check_installed(engine)
    if not path.is_file():
        raise GTPError(f"there is no file {path}; make one with gtp-vit export")
    try:
        stored = engine.open(path)
        found = None if stored.about is None else json.loads(stored.about)
    except Exception as error:  # engines raise errors of many classes
        raise GTPError(f"{engine.name} cannot read {path}: {first_line(error)}; export it again") from error
    if not isinstance(found, dict) or "format" not in found:
        raise GTPError(f"{path} was not made by gtp-vit export: it does not say what is in it; export it again")
    try:
        made = described(found, engine)
        problem = made.refusal(stored.graph())
    except GTPError as error:
        raise GTPError(f"the description in {path} is not right: {first_line(error)}; export it again") from error
    except Exception as error:
        raise GTPError(f"the graph in {path} cannot be read: {first_line(error)}; export it again") from error
    if problem is not None:
        raise GTPError(f"{path} is not what it says: {problem}; export it again")
    return made


def file_fingerprint(path: Path) -> str:
    """A hash of an exported file and of all files that running it reads, whatever their names."""
    digest = hashlib.sha256()
    for each in engine_of(path).files(path):
        digest.update(_digest_of(each))
    return digest.hexdigest()[:16]


def _digest_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    if path.is_file():  # what is missing the engine will name
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
    return digest.digest()
