"""Building the native library, and naming it after the hash of its sources.

Both setup.py, which builds it, and native.py, which loads it, ask here. A library of different sources or flags has a
different name, so it is never loaded; no Python version is in the name, because the library does not use Python.

    python src/gtp_vit/kernels/sources.py avx2      # prints the name
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "cpp"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wno-psabi",
)
INSTRUCTION_SETS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}


def fingerprint(folder: Path = FOLDER) -> str:
    """A short hash of the C++ files in `folder` and of the flags they are compiled with."""
    digest = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS)).encode())
    for path in sorted(folder.glob("*.[ch]*")):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)} ".encode() + text)
    return digest.hexdigest()[:12]


def library(instruction_set: str, folder: Path = FOLDER) -> str:
    """The file name of the library that these sources make."""
    return f"_{instruction_set}.{fingerprint(folder)}.so"


def libraries(folder: Path) -> list[Path]:
    """All libraries in `folder`, whatever they were built from."""
    return sorted(path for name in INSTRUCTION_SETS for path in folder.glob(f"_{name}.*"))


if __name__ == "__main__":
    print(library(sys.argv[1]))
