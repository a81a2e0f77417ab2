"""folders: which files of a folder of images are taken for pictures, and what is said about the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from gtp_vit.inputs import pictures
from gtp_vit.runs import distributed


def how_to_read(dataset: str) -> dict[str, str]:
    """timm's own choice is .png, .jpg and .jpeg, and streams in 8 bits before we see them."""
    if not dataset:
        return {"input_key": ";".join(pictures.ENDINGS)}
    return {"input_img_mode": ""} if dataset.startswith(("wds/", "hfids/")) else {}


def name_others(folder: Path) -> None:
    """A word about files that are not taken for pictures; hidden ones are nobody's pictures."""
    others = [
        os.path.join(below, name)
        for below, _, names in os.walk(folder, followlinks=True)
        for name in names
        if not name.startswith(".") and os.path.splitext(name)[1].lower() not in pictures.ENDINGS
    ]
    if others and distributed.is_first():
        warnings.warn(
            f"not read in {folder}, because it is not taken for a picture: {os.path.relpath(min(others), folder)}"
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
