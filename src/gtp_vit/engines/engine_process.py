"""Run an exported file in a process of its own, which may die: python -m gtp_vit.engines.engine_process FILE ...

The words are FILE PRECISION ARRAYS.

ARRAYS is a file of numpy arrays; the outputs are written back to it, under the same names. With `- THREADS` in its
place arrays are read from standard input, one after the other, and answered on standard output.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from gtp_vit.engines import engine_of
from gtp_vit.engines.engine import Array
from gtp_vit.errors import GTPError


def outputs_of(path: Path, precision: str, inputs: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a file for several inputs; raises GTPError if the engine fails or crashes."""
    arrays = path.with_name("arrays.npz")
    np.savez(arrays, **inputs)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "gtp_vit.engines.engine_process", str(path), precision, str(arrays)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    engine = engine_of(path).name
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise GTPError(f"{engine} crashed on the exported file ({name}); nothing was written. gtp-vit check shows why")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GTPError(f"{engine} cannot run the exported file: {last}; nothing was written")
    with np.load(arrays) as found:
        outputs = {name: found[name] for name in inputs}
    arrays.unlink()
    return outputs


class Running:
    """A file in a process of its own for as long as it is used: an engine that crashes ends that process only.

    Arrays go through its standard input and output: a line with the shape as JSON, then 32-bit floats.
    """

    def __init__(self, path: Path, precision: str, threads: int) -> None:
        self.path, self.engine = path, engine_of(path).name
        command = [sys.executable, "-m", "gtp_vit.engines.engine_process", str(path), precision, "-", str(threads)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by _end
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        weakref.finalize(self, _end, self.process, self.errors, os.getpid())
        self._receive()  # it says that the file is loaded

    def __call__(self, images: Array) -> Array:
        try:
            _send(self.process.stdin, images)
        except OSError:
            raise self._problem() from None
        return self._receive()

    def _receive(self) -> Array:
        found = _read(self.process.stdout)
        if found is None:
            raise self._problem()
        return found

    def _problem(self) -> GTPError:
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return GTPError(f"{self.engine} crashed on {self.path} ({name}). gtp-vit check shows why")
        self.errors.seek(0)
        last = (self.errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        return GTPError(f"{self.engine} cannot run {self.path}: {last}; export it again")


def _end(process: Any, errors: Any, owner: int) -> None:
    """End the process, unless this is a fork of the one that started it."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, errors):
            with contextlib.suppress(BrokenPipeError):  # what could not be sent
                stream.close()


def _send(stream: Any, array: Array) -> None:
    stream.write(json.dumps(array.shape).encode() + b"\n")
    stream.write(np.ascontiguousarray(array, np.float32).tobytes())
    stream.flush()


def _read(stream: Any) -> Array | None:
    """The next array; None if the other side has ended."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    shape = json.loads(line)
    size = 4 * math.prod(shape)
    data = stream.read(size)
    return np.frombuffer(data, np.float32).reshape(shape).copy() if len(data) == size else None


def _serve(path: Path, precision: str, threads: int) -> None:
    given, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an engine prints is no answer
    run = engine_of(path).load(path, precision, threads, None)
    _send(answers, np.zeros(0, np.float32))
    while (images := _read(given)) is not None:
        _send(answers, run(images))


def _main(path: Path, precision: str, arrays: Path) -> None:
    run = engine_of(path).load(path, precision, 0, None)
    with np.load(arrays) as given:
        found = {name: run(given[name]) for name in given.files}
    np.savez(arrays, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[3] == "-":
        _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]))
    else:
        _main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
