"""folders: which files of a folder are read as pictures, and a warning about the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from gtp_vit.inputs import pictures
from gtp_vit.runs import distributed


def how_to_read(dataset: str) -> dict[str, str]:
    """Options for timm, which by itself reads .png, .jpg and .jpeg only, and cuts streams to 8 bits."""
    if not dataset:
        return {"input_key": ";".join(pictures.ENDINGS)}
    return {"input_img_mode": ""} if dataset.startswith(("wds/", "hfids/")) else {}


def name_others(folder: Path) -> None:
    """Warn about files that are not read as pictures, other than hidden ones."""
    others = [
        os.path.join(below, name)
        for below, _, names in os.walk(folder, followlinks=True)
        for name in names
        if not name.startswith(".") and os.path.splitext(name)[1].lower() not in pictures.ENDINGS
    ]
    if others and distributed.is_first():
        warnings.warn(
            f"not read in {folder}, because it does not look like a picture: {os.path.relpath(min(others), folder)}"
            + (f", and {len(others) - 1} more like it" if len(others) > 1 else ""),
            stacklevel=3,
        )


def empty_classes(folder: Path, found: Iterable[str]) -> list[str]:
    """Class folders without images, which timm leaves out."""
    classes = set(found)
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [
        path.name for path in below if path.name not in classes and not any(file.is_dir() for file in path.iterdir())
    ]
