"""What an engine is: how it makes a file of an ONNX model, and how it runs one.

Nothing in here needs torch: files must run without it, and arrays are numpy's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gtp_vit.engines.graph import Stored
from gtp_vit.errors import GTPError

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Array], Array]  # images -> outputs
METADATA = "gtp_vit"  # the key under which a file describes itself, as JSON
INPUT = "images"


class Engine(Protocol):
    """Makes and runs files of one format."""

    name: str
    format: str
    suffix: str
    precisions: tuple[str, ...]
    needs: tuple[str, ...]  # modules it imports
    extra: str  # pip install gtp-vit[extra]

    def make(
        self, onnx: Path, path: Path, precision: str, images: Array | None, about: str, *, careful: bool = True
    ) -> None:
        """Write the file for an ONNX model of 32-bit floats.

        Args:
            onnx: the model.
            path: the file to write; others may be written beside it.
            precision: one of `precisions`.
            images: [I, channels, height, width] to find the ranges of 8-bit numbers with; for int8 only.
            about: JSON, stored under METADATA.
            careful: try several ways to get to 8 bits and take the most exact; else the first, where time is measured.
        """

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        """A function that runs the file, on this many threads; `batch` = it will always get this many images."""

    def open(self, path: Path) -> Stored:
        """What is stored under METADATA, and the graph; nothing is run."""

    def files(self, path: Path) -> list[Path]:
        """The files that running this one reads, itself first; those that are missing, too."""

    def versions(self) -> dict[str, str]:
        """Versions of the packages that make and run files."""


def check_installed(engine: Engine) -> None:
    """Raise GTPError with the command that installs what is missing."""
    problem = missing(engine)
    if problem is not None:
        raise GTPError(f"{engine.name} {problem}")


def missing(engine: Engine) -> str | None:
    """What an engine lacks on this machine, and the command that installs it; None if it can run."""
    lacking = [name for name in engine.needs if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return f"needs {', '.join(lacking)}, which is not installed: pip install 'gtp-vit[{engine.extra}]'"
