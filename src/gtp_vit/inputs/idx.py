"""Images in files like MNIST's (idx3-ubyte, idx1-ubyte, also gzipped), which those of the embedded model come in."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from gtp_vit.errors import GTPError

TRAINING, TEST = "train", "t10k"


def has_idx(folder: Path) -> bool:
    """Is this a folder of such files?"""
    return folder.is_dir() and any(folder.glob("*-images-idx3-ubyte*"))


class IdxReader:
    """Pictures and labels of one split, by number, as timm's readers give them."""

    def __init__(self, folder: Path, split: str) -> None:
        name = TRAINING if split == "train" else TEST
        self.images = _read(folder, f"{name}-images-idx3-ubyte", 3)
        self.labels = _read(folder, f"{name}-labels-idx1-ubyte", 1)
        if len(self.images) != len(self.labels):
            raise GTPError(f"{folder} has {len(self.images)} images and {len(self.labels)} labels of split {split!r}")
        self.class_to_idx = {str(label): label for label in np.unique(self.labels).tolist()}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.fromarray(self.images[index]), int(self.labels[index])


def _read(folder: Path, name: str, dimensions: int) -> Any:
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise GTPError(f"{folder} has no file {name} or {name}.gz")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        sizes = np.frombuffer(content, ">u4", dimensions, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes)
    except (OSError, EOFError, ValueError) as error:
        raise GTPError(f"{path} cannot be read: {error}") from error
