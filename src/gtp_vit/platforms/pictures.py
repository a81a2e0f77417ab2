"""One cell of a column of images, prepared as the model wants it, or the reason why it cannot be."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gtp_vit.core.backbone import Transform
from gtp_vit.data.image_file import decode, load_picture
from gtp_vit.data.items import NO_LABEL, Item
from gtp_vit.data.stores import read_in_store, url_of
from gtp_vit.errors import InputError, first_line, short_repr

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = "image"  # of all of them: the row says which one it is


def prepared(index: int, value: object, transform: Transform, *, ignore_exif: bool = False) -> Item:
    """An image of any kind as the model takes it."""
    try:
        return Item(index, transform(picture_of(value, ignore_exif=ignore_exif)), NO_LABEL, NAME, "")
    except Exception as error:  # decoders raise many exception types
        return Item(index, torch.zeros(0), NO_LABEL, NAME, first_line(error))


def picture_of(value: object, *, ignore_exif: bool = False) -> Image:
    """A cell as an RGB picture; raises many exception types."""
    from PIL import Image

    if hasattr(value, "as_py"):  # Arrow's scalars, which LanceDB gives
        value = value.as_py()
    if isinstance(value, Mapping):  # as Hugging Face's data sets store images
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if value is None or (isinstance(value, float) and math.isnan(value)):  # pandas writes NaN
        raise InputError("null")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), ignore_exif=ignore_exif)
    if isinstance(value, str) and (url := url_of(value)) is not None:
        return _decode(read_in_store(*url.rsplit("/", 1)), ignore_exif=ignore_exif)
    if isinstance(value, (str, Path)):
        return load_picture(value, ignore_exif=ignore_exif)
    if isinstance(value, Image.Image):
        return decode(value, ignore_exif=ignore_exif)
    if isinstance(value, np.ndarray):
        return decode(_from_array(value), ignore_exif=ignore_exif)
    raise InputError(f"a {type(value).__name__}; give bytes, a path, a PIL image, or a uint8 array")


def _decode(content: bytes, *, ignore_exif: bool) -> Image:
    from PIL import UnidentifiedImageError

    if not content:
        raise InputError("zero bytes")
    try:
        return decode(io.BytesIO(content), ignore_exif=ignore_exif)
    except UnidentifiedImageError as error:  # its text has an address in memory, which differs from run to run
        raise InputError(f"no picture that Pillow knows begins with {short_repr(content[:8])}") from error


def _from_array(array: np.ndarray) -> Image:
    from PIL import Image

    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4) or 0 in array.shape:
        raise InputError(
            f"an array of {array.dtype} {list(array.shape)}; give uint8 [height, width] or [height, width, 1, 3 or 4]"
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and channels == 1 else array)
