"""A Hugging Face data set whose labels may be missing, with a name for every image; read through timm's reader."""

from __future__ import annotations

import io
import os
from typing import Any

from gtp_vit.data.image_file import check_is_file
from gtp_vit.errors import GTPError


class Rows:
    """Rows of a data set that timm has opened, with the interface of its readers.

    timm's own reads a row a second time for the name of its image, and fails where there is no column of labels.
    """

    def __init__(self, reader: Any) -> None:
        self.dataset, self.root = reader.dataset, reader.root
        self.image_key, self.class_to_idx = reader.image_key, reader.class_to_idx
        self.label_key = reader.label_key if reader.label_key in self.dataset.column_names else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.named(place)[1:]

    def named(self, place: int) -> tuple[str, Any, Any]:
        """Name, image as a file, label."""
        row: Any = self.dataset[place]
        image = row[self.image_key] or {}
        path: Any = image.get("path")
        data: Any = image.get("bytes")
        name = os.path.basename(path or "") or f"image {place}"
        if not data and not path:
            raise GTPError("the row has no image")
        if not data:
            check_is_file(path)  # opening a pipe would wait
        file: Any = io.BytesIO(data) if data else open(path, "rb")  # noqa: SIM115
        return name, file, None if self.label_key is None else row[self.label_key]
