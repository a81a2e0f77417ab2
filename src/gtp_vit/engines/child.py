"""Run an exported file in a process of its own, which may die: python -m gtp_vit.engines.child FILE PRECISION ARRAYS.

ARRAYS is a file of numpy arrays; the outputs are written back to it, under the same names.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from gtp_vit.engines import engine_of
from gtp_vit.engines.engine import Array
from gtp_vit.errors import GTPError


def outputs_of(path: Path, precision: str, inputs: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a file for several inputs; raises GTPError if the engine fails or crashes."""
    arrays = path.with_name("arrays.npz")
    np.savez(arrays, **inputs)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "gtp_vit.engines.child", str(path), precision, str(arrays)]
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


def _main(path: Path, precision: str, arrays: Path) -> None:
    run = engine_of(path).load(path, precision, 0, None)
    with np.load(arrays) as given:
        found = {name: run(given[name]) for name in given.files}
    np.savez(arrays, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
