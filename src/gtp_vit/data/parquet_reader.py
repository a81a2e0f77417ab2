"""Rows of Parquet files with the bytes of an image in each, on a disk or in a store."""

from __future__ import annotations

import bisect
import itertools
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.data.reader import OpenedImage, Reader
from gtp_vit.data.stores import Content, list_store, open_in_store, url_of
from gtp_vit.errors import GTPError, first_line

NAMES, LABELS = ("path", "name", "key", "url", "id"), ("label", "cls")  # columns, the first that is there


class ParquetReader(Reader):
    """Images in a column of bytes, or of Hugging Face's structs of bytes and path, of all files in a folder."""

    def __init__(self, folder: Path, column: str) -> None:
        """Read what the files say of themselves; `column` has the images."""
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise GTPError("Parquet needs pyarrow, which is not installed: pip install 'gtp-vit[parquet]'") from error
        self.url, self.column = url_of(folder) or str(folder.absolute()), column
        if not self.url.partition("://")[1] and not folder.exists():
            raise GTPError(f"there is no folder or file {folder}")
        self.sizes = list_store(self.url, lambda name: name.endswith(".parquet"))
        self.files = sorted(self.sizes)
        self.groups: list[tuple[str, int]] = []  # file and number of every row group
        counts = []
        for name in self.files:
            try:
                with open_in_store(self.url, name) as file:
                    metadata, schema = parquet.read_metadata(file), parquet.read_schema(file)
            except Exception as error:  # the library raises errors of many classes
                raise GTPError(f"{posixpath.join(self.url, name)} is no Parquet file: {first_line(error)}") from error
            if column not in schema.names:
                has = ", ".join(schema.names)
                raise GTPError(f"{posixpath.join(self.url, name)} has no column {column!r}, but {has}")
            self.name_key = next((key for key in NAMES if key in schema.names and key != column), None)
            self.label_key = next((key for key in LABELS if key in schema.names), None)
            self.groups += [(name, number) for number in range(metadata.num_row_groups)]
            counts += [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self.ends = list(itertools.accumulate(counts))
        self._read: tuple[int, list[dict[str, Any]]] = (-1, [])  # the row group that was read last

    @property
    def has_labels(self) -> bool:
        return self.label_key is not None

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def name(self, index: int) -> str:
        return f"row {index}"

    def open(self, index: int) -> OpenedImage:
        row = self._row(index)
        name = self.name(index) if self.name_key is None else str(row[self.name_key])
        image = row[self.column]
        if isinstance(image, dict):
            name = image.get("path") or name
            image = image.get("bytes")
        if image is None:
            raise GTPError("the row has no image")
        if not isinstance(image, bytes):
            raise GTPError(f"column {self.column!r} has {type(image).__name__}; it must have the bytes of images")
        label = None if self.label_key is None else row[self.label_key]
        return OpenedImage(name, Content(image), label if isinstance(label, int) else None)

    def _row(self, index: int) -> dict[str, Any]:
        """A row; the others of its row group are kept, as they are asked for next."""
        from pyarrow import parquet

        group = bisect.bisect_right(self.ends, index)
        if self._read[0] != group:
            file_name, number = self.groups[group]
            columns = [name for name in (self.column, self.name_key, self.label_key) if name is not None]
            with open_in_store(self.url, file_name) as file:
                self._read = group, parquet.ParquetFile(file).read_row_group(number, columns=columns).to_pylist()
        begin = self.ends[group - 1] if group else 0
        return self._read[1][index - begin]

    def listing(self, count: int) -> Iterator[str]:
        yield f"{self.column} {count}"
        for name in self.files:
            yield f"{name} {self.sizes[name]}"
