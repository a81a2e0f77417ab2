"""Engines: exporting a model to ONNX Runtime and OpenVINO, and running it there.

A model becomes ONNX first (program.py); each engine makes its own file of that (ort.py, ov.py). export.py does all of
it and checks the result.
"""

from __future__ import annotations

from pathlib import Path

from gtp_vit.engines.engine import Engine, check_installed
from gtp_vit.engines.onnxruntime import OnnxRuntime
from gtp_vit.engines.openvino import OpenVINO
from gtp_vit.errors import BadSetting, check_name

_EVERY: tuple[Engine, ...] = (OnnxRuntime(), OpenVINO())
ENGINES = {engine.name: engine for engine in _EVERY}
FORMATS = {engine.format: engine for engine in _EVERY}
PRECISIONS = ("f32", "bf16", "int8")


def engine_of(path: Path) -> Engine:
    """The engine that runs this file, by the ending of its name."""
    for engine in ENGINES.values():
        if path.suffix == engine.suffix:
            return engine
    endings = " or ".join(f"{engine.suffix} ({engine.name})" for engine in ENGINES.values())
    raise BadSetting(f"{path.name} does not say which engine it is for; end its name in {endings}")


def is_exported(name: str) -> bool:
    """Does this name a file for an engine, rather than a model?"""
    return Path(name).suffix in {engine.suffix for engine in ENGINES.values()}


def check_precision(engine: Engine, precision: str) -> None:
    """Raise if an engine has no such precision, or is not installed."""
    check_name("precision", precision, PRECISIONS)
    if precision not in engine.precisions:
        raise BadSetting(f"{engine.name} has no {precision} on a CPU; give {' or '.join(engine.precisions)}")
    check_installed(engine)
