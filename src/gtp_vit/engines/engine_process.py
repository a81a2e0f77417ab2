"""Run an exported file in a process of its own, which may die.

python -m gtp_vit.engines.engine_process MODULE:CLASS FILE PRECISION THREADS, where CLASS is the engine's. Arrays go
through its standard input and output: a line with the shape as JSON, then 32-bit floats.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO

import numpy as np

from gtp_vit.engines.engine import Array, Engine
from gtp_vit.errors import GTPError


class EngineProcess:
    """A file in a process of its own for as long as it is used: an engine that crashes ends that process only."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        precision: str,
        threads: int = 0,
        *,
        name: str = "",
        advice: str = "export it again",
    ) -> None:
        """Start it and wait until the file is loaded.

        Args:
            engine: runs the file.
            path: the file.
            precision: that it was made for.
            threads: CPU threads; 0 = the engine's choice.
            name: what errors call the file.
            advice: what errors say at their end.
        """
        self.engine, self.name, self.advice = engine.name, name or str(path), advice
        command = engine.command(path, precision, threads)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by _end
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.end = weakref.finalize(self, _end, self.process, [self.requests, self.answers, self.errors], os.getpid())
        self._receive()

    def __call__(self, images: Array) -> Array:
        try:
            _send(self.requests, images)
        except OSError:
            raise self._problem() from None
        return self._receive()

    def peak_megabytes(self) -> float | None:
        """The most memory that the process has had so far; None on systems that do not say it."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return None if match is None else int(match[1]) * 1024 / 1e6

    def _receive(self) -> Array:
        array = _read(self.answers)
        if array is None:
            raise self._problem()
        return array

    def _problem(self) -> GTPError:
        code = self.process.wait()
        if code < 0:
            crash = f"{self.engine} crashed on {self.name} ({signal.Signals(-code).name})"
            return GTPError(f"{crash}; {self.advice}. gtp-vit check shows why")
        self.errors.seek(0)
        last = (self.errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        return GTPError(f"{self.engine} cannot run {self.name}: {last}; {self.advice}")


def _end(process: subprocess.Popen[bytes], streams: list[IO[bytes]], owner: int) -> None:
    """End the process, unless this is a fork of the one that started it."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for stream in streams:
            with contextlib.suppress(BrokenPipeError):  # what could not be sent
                stream.close()


def _send(stream: IO[bytes], array: Array) -> None:
    stream.write(json.dumps(array.shape).encode() + b"\n")
    stream.write(np.ascontiguousarray(array, np.float32).tobytes())
    stream.flush()


def _read(stream: IO[bytes]) -> Array | None:
    """The next array; None if the other side has ended."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    shape = json.loads(line)
    size = 4 * math.prod(shape)
    data = stream.read(size)
    return np.frombuffer(data, np.float32).reshape(shape).copy() if len(data) == size else None


def _serve(engine: Engine, path: Path, precision: str, threads: int) -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an engine prints is no answer
    run = engine.load(path, precision, threads, None)
    _send(answers, np.zeros(0, np.float32))  # it is loaded
    while (images := _read(requests)) is not None:
        _send(answers, run(images))


if __name__ == "__main__":
    module, _, kind = sys.argv[1].partition(":")
    _serve(getattr(importlib.import_module(module), kind)(), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
