"""Readers: where the images of a data set are, and which ones, without decoding any.

`ImageDataset` (dataset.py) decodes and prepares what a reader opens. There is one reader for each kind of source:
image_folder.py, tar_reader.py, library_readers.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image


class OpenedImage(NamedTuple):
    """An image that has not been decoded yet."""

    name: str
    file: IO[bytes] | Image
    label: int | None


class Reader:
    """Where images are; a subclass says how to open one."""

    root: Path | None = None  # its files are below, if it has any of its own
    source: str = ""  # data set and split by name, if its files do not say which of their images are read
    class_to_idx: Mapping[str, int] = {}  # names of classes -> labels; empty if it does not know any

    def __len__(self) -> int:
        raise NotImplementedError

    def open(self, index: int) -> OpenedImage:
        """The image at a place; raises many exception types."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The name of an image, also of one that cannot be opened."""
        return f"image {index}"

    @property
    def has_labels(self) -> bool:
        return self.classes is not None

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes that labels count; None if there are none, as in a folder without folders."""
        names = self.class_to_idx
        return None if not names or "" in names else sorted(names, key=lambda name: names[name])

    def listing(self, count: int) -> Iterator[str]:
        """Lines that say which images the first `count` are, for the identity of a run."""
        yield " ".join(word for word in (type(self).__name__, self.source, str(count)) if word)
        yield from files_below(self.root)


def files_below(root: Path | None) -> Iterator[str]:
    """Names and sizes of all files in a folder, or of one file; nothing if it is not on this machine."""
    if root is not None and root != Path():
        paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        yield from list_files(((path, None) for path in paths), root)


def list_files(files: Iterable[tuple[str | Path, int | None]], root: str | Path) -> Iterator[str]:
    """A line for each file with its label, if any: name, size, and where the links on its way lead.

    A link that leads elsewhere is another image, also if that has the same size. Where it leads is said relative to
    where the folder really is, which may be another place on every machine.
    """
    real_root = os.path.realpath(root)
    real_folders: dict[str, str] = {}
    for path, label in files:
        folder, name = os.path.split(path)
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(folder)
        target = os.path.join(real_folders[folder], name)
        linked = real_folders[folder] != os.path.normpath(os.path.join(real_root, os.path.relpath(folder, root)))
        if os.path.islink(target):
            target, linked = os.path.realpath(target), True
        words = [os.path.relpath(path, root), str(_size(path)), *([] if label is None else [str(label)])]
        yield " ".join([*words, *(["->", os.path.relpath(target, real_root)] if linked else [])])


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it will be reported as unreadable
        return -1
