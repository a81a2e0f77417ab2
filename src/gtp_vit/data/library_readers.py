"""Readers around the data sets of other libraries: Hugging Face, torchvision, and timm's own folders."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.data.image_file import check_is_file, load_picture
from gtp_vit.data.image_folder import find_duplicates
from gtp_vit.data.reader import OpenedImage, Reader, list_files
from gtp_vit.errors import GTPError


class HuggingFaceReader(Reader):
    """Rows of a Hugging Face data set that timm has opened, whose labels may be missing.

    timm's own reader reads a row a second time for the name of its image, and fails where there is no column of labels.
    """

    def __init__(self, reader: Any) -> None:
        self.dataset, self.class_to_idx = reader.dataset, reader.class_to_idx
        self.image_key = reader.image_key
        self.label_key = reader.label_key if reader.label_key in self.dataset.column_names else None

    @property
    def has_labels(self) -> bool:
        return self.label_key is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self, index: int) -> OpenedImage:
        row = self.dataset[index]
        image = row[self.image_key] or {}
        path: str | None = image.get("path")
        data: bytes | None = image.get("bytes")
        name = os.path.basename(path or "") or self.name(index)
        label = None if self.label_key is None else row[self.label_key]
        if data:
            return OpenedImage(name, io.BytesIO(data), label)
        if not path:
            raise GTPError("the row has no image")
        check_is_file(path)  # opening a pipe would wait
        return OpenedImage(name, open(path, "rb"), label)

    def listing(self, count: int) -> Iterator[str]:
        yield f"{self.dataset._fingerprint} {count}"


class TorchvisionReader(Reader):
    """A data set of torchvision, of which a folder of images counts each once."""

    has_labels = True

    def __init__(self, dataset: Any, *, source: str = "", ignore_exif: bool = False, count_links: bool = False) -> None:
        self.dataset, self.root, self.source = dataset, Path(getattr(dataset, "root", "")), source
        if hasattr(dataset, "loader"):  # its own waits for pipes, and turns 16-bit grey into white
            dataset.loader = functools.partial(load_picture, ignore_exif=ignore_exif)
        if _is_folder(dataset):
            _leave_out_duplicates(dataset, self.root, count_links=count_links)

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self, index: int) -> OpenedImage:
        return OpenedImage(self.name(index), *self.dataset[index])


class TimmReader(Reader):
    """A reader of timm's, of which a folder of images counts each once."""

    def __init__(self, reader: Any, *, source: str = "", count_links: bool = False) -> None:
        self.reader, self.root, self.class_to_idx = reader, Path(reader.root), reader.class_to_idx
        self.source = source
        self.is_folder = _is_folder(reader)
        if self.is_folder:
            _leave_out_duplicates(reader, self.root, count_links=count_links)

    def __len__(self) -> int:
        return len(self.reader)

    def name(self, index: int) -> str:
        return str(self.reader.filename(index))

    def open(self, index: int) -> OpenedImage:
        if self.is_folder:
            check_is_file(self.reader.filename(index, absolute=True))
        return OpenedImage(self.name(index), *self.reader[index])

    def listing(self, count: int) -> Iterator[str]:
        return list_files(self.reader.samples[:count], self.reader.root) if self.is_folder else super().listing(count)


def _is_folder(source: Any) -> bool:
    """Does it have a list of files with their labels?"""
    samples = getattr(source, "samples", None)
    return isinstance(samples, list) and bool(samples) and isinstance(samples[0][0], (str, os.PathLike))


def _leave_out_duplicates(source: Any, root: Path, *, count_links: bool) -> None:
    duplicates = find_duplicates((path for path, _ in source.samples), root, count_links=count_links)
    source.samples = [sample for sample in source.samples if os.fspath(sample[0]) not in duplicates]
