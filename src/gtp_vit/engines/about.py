"""What an exported file says of itself: model, method, preparation of images, classes, versions; as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gtp_vit import __version__, embedded
from gtp_vit.engines import engine_of
from gtp_vit.engines.engine import Engine, check_installed
from gtp_vit.engines.program import OPSET, output_of
from gtp_vit.errors import BadSetting, GTPError, first_line
from gtp_vit.measure.identity import tensors_fingerprint
from gtp_vit.measure.macs import macs
from gtp_vit.patch import host_of, is_patched, tower_of, unpatch

FORMAT = 1


def about(
    model: Any,
    engine: Engine,
    precision: str,
    classes: Sequence[str] | None,
    name: str,
    weights: str,
    preparation: dict[str, Any] | None,
) -> dict[str, Any]:
    """The description of a model that is exported."""
    import timm

    host, plain = host_of(model), unpatch(model)
    inputs, output = host.inputs, output_of(model)
    prepared = preparation or inputs.preparation or {}
    known = class_names(model) if classes is None else list(classes)
    if output.kind == "classes" and known is not None and len(known) != output.width:
        raise BadSetting(f"{len(known)} class names are given, and the model has {output.width} classes; give one each")
    cost = {"unreduced": int(macs(plain)), "exported": int(macs(model))}
    return {
        "format": FORMAT,
        "model": name or inputs.name,
        "weights": {"from": weights, "fingerprint": tensors_fingerprint(plain.state_dict())},
        "method": tower_of(model).reduction.method.to_dict() if is_patched(model) else None,
        "macs": {**cost, "share": round(cost["exported"] / cost["unreduced"], 4)},
        "precision": precision,
        "engine": engine.name,
        "input": {
            "name": "images",
            "layout": "batch, channels, height, width; 32-bit floats; any batch",
            "channels": inputs.channels,
            "size": list(inputs.size),
            **{
                key: prepared[key]
                for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation", "processor")
                if key in prepared
            },
        },
        "output": {
            "name": "logits" if output.kind == "classes" else output.kind,
            "kind": output.kind,
            "width": output.width,
        },
        "classes": known if output.kind == "classes" else None,
        "opset": OPSET,
        "versions": {"gtp-vit": __version__, "torch": torch.__version__, "timm": timm.__version__, **engine.versions()},
    }


def class_names(model: Any) -> list[str] | None:
    """The classes of the embedded model, and of models with the classes of ImageNet; None if they are not known."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    inputs = host_of(model).inputs
    if inputs.name == embedded.NAME:
        return list(embedded.CLASSES)
    if inputs.labels is not None:
        return list(inputs.labels)
    kind, width = output_of(model)
    subset = infer_imagenet_subset(unpatch(model))  # by their number
    if subset is None or kind != "classes":
        return None
    info = ImageNetInfo(subset)
    return [info.index_to_description(index) for index in range(width)]


def read_about(path: Path) -> dict[str, Any]:
    """The description in an exported file; raises GTPError if it has none, or is no such file."""
    engine = engine_of(path)
    check_installed(engine)
    if not path.is_file():
        raise GTPError(f"there is no file {path}; make one with gtp-vit export")
    try:
        text = engine.about(path)
        found = None if text is None else json.loads(text)
    except Exception as error:  # engines raise errors of many classes
        raise GTPError(f"{engine.name} cannot read {path}: {first_line(error)}; export it again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise GTPError(f"{path} was not made by gtp-vit export: it does not say what is in it; export it again")
    return found
