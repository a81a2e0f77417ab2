"""Converters that need another torch than ours: each has an environment of its own, and is never imported here.

A converter is a script that our Python never imports and that does not import this package: two versions of torch in
one process would end it. It reads a program that our torch has saved.
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

READY = "ready"  # a file in an environment whose installation has ended
_NAMES = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
_VERSIONS = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"


@dataclass(frozen=True)
class Converter:
    """A converter's environment."""

    name: str  # of the engine
    requirements: tuple[str, ...]  # as pip takes them
    modules: tuple[str, ...]  # that it must be able to import
    gigabytes: float  # that it takes on disk
    minutes: int  # that installing it takes, about
    script: str  # its file, in this folder

    @property
    def variable(self) -> str:
        """The environment variable that names its Python."""
        return f"GTP_VIT_{self.name.upper()}_PYTHON"

    @property
    def folder(self) -> Path:
        """Where this package installs it."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "gtp-vit" / "-".join((self.name, *self.requirements)).replace("==", "-")

    def python(self) -> Path | None:
        """Its Python; None if there is none."""
        if named := os.environ.get(self.variable):
            return Path(named)
        return _python_of(self.folder) if (self.folder / READY).is_file() else None

    def missing(self) -> str | None:
        """The missing packages, and the command that installs them; None if it can run."""
        python = self.python()
        if python is None:
            return (
                f"needs {' and '.join(self.requirements)} in an environment of their own ({self.gigabytes:g} GB, about "
                f"{self.minutes} minutes): gtp-vit export --format {self.name} --install-converter makes one, or name "
                f"its Python with --converter-python or {self.variable}"
            )
        if not os.access(python, os.X_OK):
            return f"has no Python at {python}; give --converter-python or {self.variable} the path of one that runs"
        try:
            done = subprocess.run(
                [python, "-I", "-c", _NAMES, *self.modules], capture_output=True, text=True, timeout=300, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot use {python}: {error}"
        if done.returncode or done.stdout.strip():
            lacking = ", ".join(done.stdout.split()) or "a Python that starts"
            return f"needs {lacking} for {python}: {python} -m pip install {' '.join(self.requirements)}"
        return None

    def versions(self) -> dict[str, str]:
        """The versions of its packages that are there; those of a Python that was named may be others than ours."""
        python, names = self.python(), [requirement.split("==")[0] for requirement in self.requirements]
        if python is None:
            return {}
        done = subprocess.run([python, "-I", "-c", _VERSIONS, *names], capture_output=True, text=True, check=False)
        versions = zip(names, done.stdout.split(), strict=False)
        return {"torch of the converter" if name == "torch" else name: version for name, version in versions}

    def install(self, progress: Callable[[str], None]) -> None:
        """Make its environment; one that was left half-way is made again, and none is left if it fails."""
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
        """Run the script to its end and return what it printed; raises GTPError with its error."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        if done.returncode:
            raise GTPError(f"the converter of {self.name} {_ending(done)}")
        return done.stdout

    def command(self, *words: str | Path) -> list[str]:
        """The command that runs the script; isolated, so that no package of ours is found there."""
        python = self.python()
        assert python is not None, f"{self.name} was not checked"
        return [str(python), "-I", str(Path(__file__).with_name(self.script)), *map(str, words)]

    def _check_space(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GTPError(f"cannot make {self.folder.parent}: {error.strerror}; set XDG_CACHE_HOME") from error
        free = shutil.disk_usage(self.folder.parent).free / 1e9
        if free < 1.5 * self.gigabytes:  # pip keeps archives while it unpacks them
            raise GTPError(
                f"{self.folder.parent} has {free:.1f} GB free, and {self.name} needs {1.5 * self.gigabytes:.1f}; set "
                "XDG_CACHE_HOME to a folder with more"
            )

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GTPError(f"the environment of {self.name} could not be made: {_ending(done)}; nothing was left")


def _python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a process that did not end well."""
    if done.returncode < 0:
        return f"was ended by signal {-done.returncode}"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return f"stopped: {lines[-1].strip() if lines else f'code {done.returncode}, no message'}"
