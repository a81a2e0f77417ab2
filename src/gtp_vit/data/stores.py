"""Images in a store behind a URL, s3://, gs://, hf://, memory:// and whatever else fsspec knows."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gtp_vit.data.image_file import IMAGE_EXTENSIONS
from gtp_vit.data.image_folder import SPLIT_SYNONYMS
from gtp_vit.data.reader import OpenedImage, Reader
from gtp_vit.errors import GTPError, first_line


def url_of(path: str | Path) -> str | None:
    """The URL that a path is, None if it is none; pathlib makes one slash of the two after the colon."""
    if isinstance(path, Path) and path.exists():
        return None
    match = re.match(r"([a-z][a-z0-9+.]+):/{1,2}(?!/)", str(path))
    return None if match is None else f"{match[1]}://{str(path)[match.end() :]}"


def list_store(url: str, includes: Callable[[str], bool]) -> dict[str, int]:
    """Names, below a URL or of it itself, of the files that `includes` accepts, with their sizes."""
    filesystem, root = _opened(url)
    try:
        listed = filesystem.find(root, detail=True)
    except Exception as error:  # stores raise errors of many classes; credentials that are missing are one
        raise GTPError(f"{url} cannot be listed: {first_line(error)}") from error
    root = root.rstrip("/")
    names = ((path[len(root) :].lstrip("/") or posixpath.basename(path), info) for path, info in listed.items())
    return {name: int(info.get("size") or -1) for name, info in names if includes(name)}


def open_in_store(url: str, name: str) -> IO[bytes]:
    """A file below a URL, or of the URL itself; each process has connections of its own."""
    filesystem, root = _opened(url)
    path = root if posixpath.basename(root) == name and filesystem.isfile(root) else f"{root.rstrip('/')}/{name}"
    return filesystem.open(path, "rb")


def _opened(url: str):  # type: ignore[no-untyped-def]  # fsspec has no types
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise GTPError(f"{url} needs a library: {first_line(error)}; pip install 'gtp-vit[stores]'") from error
    except Exception as error:
        raise GTPError(f"{url} cannot be opened: {first_line(error)}") from error


def read_in_store(url: str, name: str) -> bytes:
    """All bytes of a file; several requests for parts of a picture would take longer."""
    with open_in_store(url, name) as file:
        return file.read()


def write_in_store(url: str, content: bytes) -> None:
    """A file of a store, whole or not at all where the store can do that, as object stores can."""
    filesystem, path = _opened(url)
    try:
        filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
        filesystem.pipe_file(path, content)
    except Exception as error:  # stores raise errors of many classes
        raise GTPError(f"{url} cannot be written: {first_line(error)}") from error


class Content(io.BytesIO):
    """The bytes of an image; decoders put the name of a file into their errors, which an address in memory is none."""

    def __repr__(self) -> str:
        return f"of {len(self.getbuffer())} bytes"


class StoreReader(Reader):
    """All pictures below a URL; classes, names and order are those of a folder on a disk."""

    def __init__(self, url: str, split: str = "") -> None:
        from timm.utils.misc import natural_key

        sizes = list_store(url, lambda name: posixpath.splitext(name)[1].lower() in IMAGE_EXTENSIONS)
        part = _part_of(sizes, split.partition("[")[0])
        self.url = f"{url.rstrip('/')}/{part}" if part else url
        self.sizes = {name[len(part) + bool(part) :]: size for name, size in sizes.items() if name.startswith(part)}
        self.names = sorted(self.sizes, key=natural_key)
        classes = sorted({_class_of(name) for name in self.names}, key=natural_key)
        self.class_to_idx = {name: label for label, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def open(self, index: int) -> OpenedImage:
        name = self.names[index]
        return OpenedImage(name, Content(read_in_store(self.url, name)), self.class_to_idx[_class_of(name)])

    def listing(self, count: int) -> Iterator[str]:
        for name in self.names[:count]:
            yield f"{name} {self.sizes[name]} {self.class_to_idx[_class_of(name)]}"


def _part_of(names: dict[str, int], split: str) -> str:
    """The folder of a split, if there is one."""
    synonyms = next((words for words in SPLIT_SYNONYMS if split in words), ())
    folders = {name.partition("/")[0] for name in names if "/" in name}
    return next((word for word in (split, *synonyms) if word and word in folders), "")


def _class_of(name: str) -> str:
    return posixpath.basename(posixpath.dirname(name))
