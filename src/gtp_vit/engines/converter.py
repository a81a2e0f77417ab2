"""Converters that need another version of torch than ours: each runs in a Python environment of its own.

A converter is a script. Our Python never imports it, and it never imports this package, because two versions of torch
in one process end it. The script reads a program that our torch has saved.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gtp_vit.errors import GTPError

READY = "ready"  # an empty file that marks an environment as completely installed
_PRINT_MISSING = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
_PRINT_VERSIONS = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"


@dataclass(frozen=True)
class Converter:
    """A converter: its script, and the environment that runs it."""

    name: str  # name of its engine
    requirements: tuple[str, ...]  # packages, as pip takes them
    modules: tuple[str, ...]  # modules that the script imports
    gigabytes: float  # size of the environment on disk
    minutes: int  # about how long the installation takes
    script: str  # name of the script's file, in this folder

    @property
    def variable(self) -> str:
        """Name of the environment variable with the path of a Python to use."""
        return f"GTP_VIT_{self.name.upper()}_PYTHON"

    @property
    def folder(self) -> Path:
        """The folder of the environment that `install` creates."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "gtp-vit" / "-".join((self.name, *self.requirements)).replace("==", "-")

    def python(self) -> Path | None:
        """The Python that runs the script: of the variable, or of the installed environment; None without either."""
        if path := os.environ.get(self.variable):
            return Path(path)
        return _python_of(self.folder) if (self.folder / READY).is_file() else None

    def missing(self) -> str | None:
        """Why the script cannot run, and what to do; None if it can."""
        python = self.python()
        if python is None:
            return (
                f"needs {' and '.join(self.requirements)} in an environment of their own ({self.gigabytes:g} GB, about "
                f"{self.minutes} minutes): gtp-vit export --format {self.name} --install-converter makes one, or name "
                f"its Python with --converter-python or {self.variable}"
            )
        if not os.access(python, os.X_OK):
            return f"has no Python at {python}; set --converter-python or {self.variable} to the path of a Python"
        try:
            process = subprocess.run(
                [python, "-I", "-c", _PRINT_MISSING, *self.modules],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot use {python}: {error}"
        if process.returncode:
            remedy = f"set --converter-python or {self.variable} to another Python"
            return f"cannot use {python}: it {_ending(process)}; {remedy}"
        if process.stdout.strip():
            missing_modules = ", ".join(process.stdout.split())
            return f"needs {missing_modules} for {python}: {python} -m pip install {' '.join(self.requirements)}"
        return None

    def versions(self) -> dict[str, str]:
        """The installed versions of `requirements`: a Python that the user has named may have others than those."""
        python, names = self.python(), [requirement.split("==")[0] for requirement in self.requirements]
        if python is None:
            return {}
        process = subprocess.run(
            [python, "-I", "-c", _PRINT_VERSIONS, *names], capture_output=True, text=True, check=False
        )
        versions = zip(names, process.stdout.split(), strict=False)
        return {"torch of the converter" if name == "torch" else name: version for name, version in versions}

    def install(self, progress: Callable[[str], None]) -> None:
        """Create the environment, anew if it is incomplete; if that fails, its folder is deleted."""
        if (self.folder / READY).is_file():
            return
        progress(
            f"installing {' and '.join(self.requirements)} into {self.folder}: {self.gigabytes:g} GB, about "
            f"{self.minutes} minutes"
        )
        self._check_space()
        try:
            self._run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
            self._run([str(_python_of(self.folder)), "-m", "pip", "install", "--quiet", *self.requirements])
            (self.folder / READY).touch()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def call(self, *words: str | Path) -> str:
        """Run the script and return its standard output; raises GTPError with its last line of error."""
        process = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        if process.returncode:
            raise GTPError(f"the converter of {self.name} {_ending(process)}")
        return process.stdout

    def command(self, *words: str | Path) -> list[str]:
        """The command that runs the script; -I isolates that Python, so that it cannot import packages of ours."""
        python = self.python()
        assert python is not None, f"{self.name} has no Python: call `missing` first"
        return [str(python), "-I", str(Path(__file__).with_name(self.script)), *map(str, words)]

    def _check_space(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GTPError(
                f"cannot make {self.folder.parent}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
            ) from error
        free = shutil.disk_usage(self.folder.parent).free / 1e9
        if free < 1.5 * self.gigabytes:  # pip keeps archives while it unpacks them
            raise GTPError(
                f"{self.folder.parent} has {free:.1f} GB free, and {self.name} needs {1.5 * self.gigabytes:.1f}; set "
                "XDG_CACHE_HOME to a folder with more space"
            )

    def _run(self, command: list[str]) -> None:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise GTPError(
                f"the installation of the converter of {self.name} {_ending(process)}; its folder was deleted"
            )


def _python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _ending(process: subprocess.CompletedProcess[str]) -> str:
    """The end of an error message about a process that failed."""
    if process.returncode < 0:
        return f"was ended by signal {-process.returncode}"
    lines = [line for line in process.stderr.strip().splitlines() if line.strip()]
    return f"stopped: {lines[-1].strip() if lines else f'code {process.returncode}, no message'}"
