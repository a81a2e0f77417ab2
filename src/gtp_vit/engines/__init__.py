"""Engines: exporting a model to a file for one, checked against torch, and running such files.

engine.py says what an engine is; each has a file of its own and a line in ENGINES. export.py makes files,
exported_file.py reads them.
"""

from __future__ import annotations

from pathlib import Path

from gtp_vit.engines.aotinductor import AOTInductor
from gtp_vit.engines.coreml import CoreML
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.executorch import ExecuTorch
from gtp_vit.engines.litert import LiteRT
from gtp_vit.engines.onnxruntime import OnnxRuntime
from gtp_vit.engines.openvino import OpenVINO
from gtp_vit.errors import GTPError, SettingError, check_name

ENGINES: dict[str, Engine] = {
    "onnxruntime": OnnxRuntime(),
    "openvino": OpenVINO(),
    "aotinductor": AOTInductor(),
    "litert": LiteRT(),
    "executorch": ExecuTorch(),
    "coreml": CoreML(),
}
TORCH = "torch"  # what flags and settings call a model that is not exported


def engine_of(path: Path) -> Engine:
    """The engine that runs this file, by the ending of its name."""
    for engine in ENGINES.values():
        if path.name.endswith(engine.suffix):
            return engine
    endings = " or ".join(f"{engine.suffix} ({engine.name})" for engine in ENGINES.values())
    raise SettingError(f"{path.name} does not say which engine it is for; end its name in {endings}")


def formats() -> dict[str, Engine]:
    """The engines by the formats of their files."""
    return {engine.format: engine for engine in ENGINES.values()}


def engine_names() -> tuple[str, ...]:
    """Names of torch and of the engines."""
    return (TORCH, *ENGINES)


def is_exported(name: str) -> bool:
    """Does this name a file for an engine, rather than a model?"""
    return name.endswith(tuple(engine.suffix for engine in ENGINES.values()))


def precisions() -> list[str]:
    """Every precision that some engine has."""
    return list(dict.fromkeys(name for engine in ENGINES.values() for name in engine.precisions))


def check_precision(engine: Engine, precision: str) -> None:
    """Raise if an engine has no such precision, or is not installed."""
    check_name("precision", precision, precisions())
    if precision not in engine.precisions:
        raise SettingError(f"{engine.name} has no {precision} on a CPU; give {' or '.join(engine.precisions)}")
    engine.check_installed()


def check_runs(engine: Engine) -> None:
    """Raise if the files of an engine cannot run on this machine."""
    reason = engine.cannot_run()
    if reason is not None:
        raise GTPError(f"{reason}; here its files can only be made")
