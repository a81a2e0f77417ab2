"""folders: the pictures of a folder with the classes that folders stand for, and a warning about what is left out.

Names, classes and order are timm's; but timm follows every link, which makes 41 of each picture where one leads up.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gtp_vit.data import image_file
from gtp_vit.data.walk import Walk, each_once, told
from gtp_vit.errors import GTPError
from gtp_vit.runs import distributed

# What timm takes for each other where a split is named.
SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class Folder:
    """All pictures below a folder, with the interface of timm's readers."""

    def __init__(self, root: Path, *, count_links: bool = False) -> None:
        from timm.utils.misc import natural_key

        self.root = root
        walk = Walk(root, _is_picture, count_links=count_links)
        _warn_of_links(walk.again, root, count_links)
        _warn_of_closed(walk.closed, root)
        labels = [_class_of(path, root) for path in walk.paths]
        self.class_to_idx = {name: index for index, name in enumerate(sorted(set(labels), key=natural_key))}
        both = zip(walk.paths, labels, strict=True)
        self.samples = sorted(
            ((path, self.class_to_idx[label]) for path, label in both), key=lambda sample: natural_key(sample[0])
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        path, label = self.samples[place]
        return open(path, "rb"), label

    def filename(self, place: int, *, absolute: bool = False) -> str:
        path = self.samples[place][0]
        return path if absolute else os.path.relpath(path, self.root)


def split_of(folder: Path, split: str) -> Path:
    """The folder of a split, as timm finds it; the folder itself, if it has no splits."""
    wanted = split.partition("[")[0]
    alike = next((names for names in SYNONYMS if wanted in names), ())
    return next((folder / name for name in (wanted, *alike) if name and (folder / name).exists()), folder)


def check_no_loop(folder: Path, dataset: str) -> None:
    """Raise where another library would walk through a folder whose links lead back: two of them take it for ever."""
    if dataset.startswith(("wds/", "hfds/", "hfids/", "tfds/")) or not folder.is_dir():
        return
    loops = Walk(folder, lambda name: False, count_links=True).again
    if loops:
        raise GTPError(
            f"{min(loops)} is a link to a folder above it, which {dataset} would follow again and again; delete the "
            "link, or leave out --dataset"
        )


def tars_once(paths: list[Path], root: Path, *, count_links: bool) -> list[Path]:
    """Each tar file once, though several names lead to it."""
    again = {} if count_links else each_once(map(os.fspath, paths))
    _warn_of_links(again, root, count_links)
    return [path for path in paths if os.fspath(path) not in again]


def leave_out_again(reader: Any, root: Path, *, count_links: bool) -> None:
    """Count a picture once in a list that another library made of a folder."""
    samples = getattr(reader, "samples", None)
    if isinstance(samples, list) and samples and isinstance(samples[0][0], (str, os.PathLike)) and not count_links:
        again = each_once(os.fspath(path) for path, _ in samples)
        if again:
            reader.samples = [sample for sample in samples if os.fspath(sample[0]) not in again]
            _warn_of_links(again, root, count_links)


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in image_file.ENDINGS


def _class_of(path: str, root: Path) -> str:
    """The name of the folder that a picture is in; empty for those in the root."""
    folder = os.path.dirname(path)
    return "" if folder == os.fspath(root) else os.path.basename(folder)


def _warn_of_links(again: dict[str, str], root: Path, count_links: bool) -> None:
    if again and distributed.is_rank_zero():
        remedy = "" if count_links else " (--count-links counts every name)"
        warnings.warn(f"{told(again, root)}{remedy}", stacklevel=3)


def _warn_of_closed(closed: list[str], root: Path) -> None:
    if closed and distributed.is_rank_zero():
        more = f", and {len(closed) - 1} more folders like it" if len(closed) > 1 else ""
        warnings.warn(
            f"not opened in {root}, so that pictures may be missing: {os.path.relpath(min(closed), root)}{more}; give "
            "yourself the permission to read it",
            stacklevel=3,
        )


def how_to_read(dataset: str) -> dict[str, str]:
    """Options for timm, which by itself reads .png, .jpg and .jpeg only, and cuts streams to 8 bits."""
    if not dataset:
        return {"input_key": ";".join(image_file.ENDINGS)}
    return {"input_img_mode": ""} if dataset.startswith(("wds/", "hfids/")) else {}


def name_others(folder: Path) -> None:
    """Warn about files that are not read as pictures, other than hidden ones."""
    others = Walk(folder, lambda name: not name.startswith(".") and not _is_picture(name)).paths
    if others and distributed.is_rank_zero():
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
