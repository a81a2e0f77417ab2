"""Programs for ONNX that were traced once: tracing a model of two layers takes seconds, and it seldom changes.

They lie in build/traces, under a hash of the sources and the versions that they come from.
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from torch import nn

from gtp_vit.engines.program import Program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/traces"
ROOMS = ("backbones", "core", "engines", "kernels", "methods", "models", "paper", "testing")
FILES = ("patching.py", "tensors.py", "weights.py")
LIBRARIES = ("torch", "timm", "transformers", "open-clip-torch", "onnx", "onnxscript")


@functools.cache
def origin() -> bytes:
    """A hash of all that a traced program depends on, but the model."""
    source = ROOT / "src/gtp_vit"
    paths = [path for room in ROOMS for path in (source / room).rglob("*.py")] + [source / name for name in FILES]
    parts = [path.read_bytes() for path in sorted(paths)]
    for name in LIBRARIES:
        try:
            parts.append(metadata.version(name).encode())
        except metadata.PackageNotFoundError:
            parts.append(b"")
    return hashlib.sha256(b"\0".join(parts)).digest()


def traced(name: str, make: Callable[[], nn.Module]) -> Path:
    """The program of the model that `make` makes, which is the same whenever it has this name."""
    key = hashlib.sha256(origin() + name.encode()).hexdigest()[:24]
    path = FOLDER / f"{key}.onnx"
    if not path.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            Program(make(), Path(folder)).onnx.replace(path)
    return path
