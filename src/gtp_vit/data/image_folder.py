"""The pictures of a folder with the classes that its folders stand for, and warnings about what is left out.

Names, classes and order are timm's; but timm follows every link, which makes 41 of each picture where one leads up.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gtp_vit.data.image_file import IMAGE_EXTENSIONS, check_is_file
from gtp_vit.data.reader import OpenedImage, Reader, list_files
from gtp_vit.data.walk import Walk, describe_duplicates, duplicates_among
from gtp_vit.errors import GTPError
from gtp_vit.runs import distributed

# What timm takes for each other where a split is named.
SPLIT_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class FolderReader(Reader):
    """All pictures below a folder."""

    def __init__(self, root: Path, *, count_links: bool = False) -> None:
        from timm.utils.misc import natural_key

        self.root: Path = root
        walk = Walk(root, _is_picture, count_links=count_links)
        _warn_about_duplicates(walk.duplicates, root, count_links=count_links)
        _warn_about_unreadable_folders(walk.unreadable_folders, root)
        classes = [_class_of(path, root) for path in walk.paths]
        self.class_to_idx = {name: index for index, name in enumerate(sorted(set(classes), key=natural_key))}
        labels = (self.class_to_idx[name] for name in classes)
        samples = zip(walk.paths, labels, strict=True)
        self.samples = sorted(samples, key=lambda sample: natural_key(sample[0]))

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return os.path.relpath(self.samples[index][0], self.root)

    def open(self, index: int) -> OpenedImage:
        path, label = self.samples[index]
        check_is_file(path)  # opening a pipe would wait
        return OpenedImage(self.name(index), open(path, "rb"), label)

    def listing(self, count: int) -> Iterator[str]:
        return list_files(self.samples[:count], self.root)

    def warn_about_skipped_files(self) -> None:
        """Warn about files that are not read as pictures, other than hidden ones."""
        others = Walk(self.root, lambda name: not name.startswith(".") and not _is_picture(name)).paths
        if others:
            more = f", and {len(others) - 1} more like it" if len(others) > 1 else ""
            name = os.path.relpath(min(others), self.root)
            _warn(f"not read in {self.root}, because it does not look like a picture: {name}{more}")


def split_folder(folder: Path, split: str) -> Path:
    """The folder of a split, as timm finds it; the folder itself, if it has no splits."""
    name = split.partition("[")[0]
    synonyms = next((names for names in SPLIT_SYNONYMS if name in names), ())
    return next(
        (folder / subfolder for subfolder in (name, *synonyms) if subfolder and (folder / subfolder).exists()), folder
    )


def check_no_loop(folder: Path, dataset: str) -> None:
    """Raise where another library would walk through a folder whose links lead back: two of them take it for ever."""
    if dataset.startswith(("wds/", "hfds/", "hfids/", "tfds/")) or not folder.is_dir():
        return
    loops = Walk(folder, lambda name: False, count_links=True).duplicates
    if loops:
        raise GTPError(
            f"{min(loops)} is a link to a folder above it, which {dataset} would follow again and again; delete the "
            "link, or remove --dataset"
        )


def find_duplicates(paths: Iterable[str | Path], root: Path, *, count_links: bool) -> Mapping[str, str]:
    """The files of a list that an earlier name leads to already, with a warning; none with `count_links`."""
    duplicates = {} if count_links else duplicates_among(os.fspath(path) for path in paths)
    _warn_about_duplicates(duplicates, root, count_links=count_links)
    return duplicates


def empty_class(folder: Path, classes: Iterable[str]) -> str | None:
    """The first class folder without images, which timm leaves out."""
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    unused = (path for path in below if path.name not in classes)
    return next((path.name for path in unused if not any(entry.is_dir() for entry in path.iterdir())), None)


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def _class_of(path: str, root: Path) -> str:
    """The name of the folder that a picture is in; empty for those in the root."""
    folder = os.path.dirname(path)
    return "" if folder == os.fspath(root) else os.path.basename(folder)


def _warn_about_duplicates(duplicates: Mapping[str, str], root: Path, *, count_links: bool) -> None:
    if duplicates:
        _warn(describe_duplicates(duplicates, root) + ("" if count_links else " (--count-links counts every name)"))


def _warn_about_unreadable_folders(folders: list[str], root: Path) -> None:
    if folders:
        more = f", and {len(folders) - 1} more folders like it" if len(folders) > 1 else ""
        _warn(
            f"not opened in {root}, so that pictures may be missing: {os.path.relpath(min(folders), root)}{more}; give "
            "yourself the permission to read it"
        )


def _warn(text: str) -> None:
    if distributed.is_rank_zero():
        warnings.warn(text, stacklevel=4)
