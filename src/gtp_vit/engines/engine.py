"""The interface of an engine: writing a file of a model, running one, and the facts that other parts report.

A new engine is a file with a subclass of Engine, and a line in ENGINES: flags, help, errors, cards, `gtp-vit check` and
the documentation read it from there. Nothing in here needs torch: files must run without it, and arrays are numpy's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from gtp_vit.engines.converter import Converter
from gtp_vit.engines.graph import StoredFile
from gtp_vit.errors import GTPError

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

Array = NDArray[np.float32]
Run = Callable[[Array], Array]  # images -> outputs
METADATA = "gtp_vit"  # the key under which a file describes itself, as JSON
INPUT = "images"
OPSET = 18  # of ONNX


@dataclass(frozen=True)
class Precision:
    """A precision of a file: what making it needs, and how far from torch its outputs may be."""

    max_kl: float
    min_cosine: float
    exact: bool = False  # most images must be as torch has them
    eight_bits: bool = False  # of the products with weights
    needs_images: bool = False  # to find the ranges of its numbers


F32 = Precision(max_kl=0.01, min_cosine=0.999, exact=True)
BF16 = Precision(max_kl=0.5, min_cosine=0.9)
INT8 = Precision(max_kl=0.5, min_cosine=0.9, eight_bits=True, needs_images=True)
INT8_DYNAMIC = Precision(max_kl=0.5, min_cosine=0.9, eight_bits=True)  # ranges of features are found in each pass


@dataclass(frozen=True)
class UsageExample:
    """A few lines of a program that runs a file."""

    language: str  # as Markdown calls it
    code: str
    note: str = ""  # e.g. that it was not run here


class Engine(ABC):
    """Makes and runs files of one format."""

    name: ClassVar[str]
    title: ClassVar[str]  # as its makers write it
    format: ClassVar[str]  # its files, as --format calls them
    suffix: ClassVar[str]
    precisions: ClassVar[Mapping[str, Precision]]
    packages: ClassVar[tuple[str, ...]]  # what it imports
    extra: ClassVar[str]  # pip install gtp-vit[extra]
    batch: ClassVar[int | None] = None  # images that its files take at a time; None = any number
    metadata_place: ClassVar[str] = f"in its metadata, under the key `{METADATA}`"  # as cards say it
    converter: ClassVar[Converter | None] = None  # what makes its files, if that needs another torch

    @abstractmethod
    def convert(
        self,
        program: Program,
        path: Path,
        precision: str,
        images: Array | None,
        metadata: str,
        *,
        tune_smoothing: bool = True,
    ) -> None:
        """Write the file of a model; it may do so in another Python, from a file that `program` has written.

        Args:
            program: the model as ONNX, as a program of torch.export, or as a file of one: whatever is asked for.
            path: the file to write; `sidecars` may be written beside it.
            precision: one of `precisions`.
            images: [I, channels, height, width] to find the ranges of 8-bit numbers with; None if none were given.
            metadata: JSON, which `open` must return.
            tune_smoothing: try several ways to get to 8 bits and take the most exact; else the first, where time is
                measured.
        """

    @abstractmethod
    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        """A function that runs the file on any number of images, also where it takes `batch` of them at a time.

        Args:
            path: the file.
            precision: that it was made for.
            threads: CPU threads; 0 = the engine's choice.
            batch: it will always get this many images; None = any number.
        """

    @abstractmethod
    def open(self, path: Path) -> StoredFile:
        """The metadata of a file, and its graph; nothing is run."""

    @abstractmethod
    def examples(self, file: str, precision: str) -> Sequence[UsageExample]:
        """Code that runs a file of this name, from `images` to `outputs`; the first is in Python."""

    def sidecars(self, path: Path) -> list[Path]:
        """Files that `convert` may write beside this one."""
        return []

    def files(self, path: Path) -> list[Path]:
        """The files that running this one reads, itself first; those that are missing, too."""
        return [path, *self.sidecars(path)]

    def cannot_run(self) -> str | None:
        """Why its files can be made but not run on this machine; None if they can run."""
        return None

    def problem(self) -> str | None:
        """A known problem of this engine on this machine, and its remedy; None if there is none."""
        return None

    def versions(self) -> dict[str, str]:
        """Versions of what makes and runs files."""
        return {name: importlib.metadata.version(name) for name in self.packages}

    def missing(self) -> str | None:
        """The missing packages, and the command that installs them; None if it can run."""
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not lacking:
            return None
        return f"needs {', '.join(lacking)}, which is not installed: pip install 'gtp-vit[{self.extra}]'"

    def command(self, path: Path, precision: str, threads: int) -> list[str]:
        """The command that runs a file in a process of its own, as engine_process.py says."""
        kind = type(self)
        words = (f"{kind.__module__}:{kind.__qualname__}", str(path), precision, str(threads))
        return [sys.executable, "-m", "gtp_vit.engines.engine_process", *words]

    def check_converter(self) -> None:
        """Raise GTPError with the command that installs it if its files cannot be made here."""
        missing = None if self.converter is None else self.converter.missing()
        if missing is not None:
            raise GTPError(f"{self.name} {missing}")

    def check_installed(self) -> None:
        """Raise GTPError with the command that installs what is missing."""
        missing = self.missing()
        if missing is not None:
            raise GTPError(f"{self.name} {missing}")

    def status(self) -> str:
        """Its versions and its problem here, or what it lacks."""
        missing = self.missing()
        if missing is not None:
            return missing
        problem = self.problem()
        versions = ", ".join(f"{name} {version}" for name, version in self.versions().items())
        return versions if problem is None else f"{versions}; {problem}"
