"""Peak memory of one call, as Linux reports it; each in a process of its own, because nothing is ever given back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def in_a_child(script: str, *words: str) -> float:
    """What `script --child WORDS` prints last."""
    command = [sys.executable, script, "--child", *words]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of(call: Callable[[], object]) -> float:
    """MB that a call adds to this process at its worst moment."""
    ctypes.CDLL(None).malloc_trim(0)  # give back what is free, so that the call has to ask for its memory
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(which: str) -> int:
    """kB of this process."""
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith(which))
