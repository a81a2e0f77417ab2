"""One picture from a file, as 8-bit RGB, or a clear reason why not."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from gtp_vit.errors import GTPError, InputError, first_line

if TYPE_CHECKING:
    from PIL import Image

# Of one picture, which then takes 267 MB as RGB. A small file can claim any number, and Pillow warns a little above.
MAX_PIXELS = 89_000_000
# Files with these endings are read as pictures. Those that this Pillow cannot decode are reported as unreadable.
IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".psd", ".avif", ".heic", ".heif", ".jxl", ".svg"),
)
# Formats of which some versions of Pillow open 16 bits of grey as 32-bit integers.
SIXTEEN_BITS_AS_INTEGERS = ("PNG", "PPM")
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF's tags, and a value of the second
ORIENTATION = 0x0112  # EXIF's tag


def check_is_file(path: str | Path) -> None:
    """Raise if it is not a regular file: opening a pipe waits for a writer, and a device may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise GTPError("it is not a file but a folder, pipe, socket or device")


def open_picture(path: Path, *, ignore_exif: bool = False) -> Image.Image:
    """A picture that the user named, or a clear error."""
    if not path.exists():
        raise GTPError(f"there is no picture {path}")
    try:
        return load_picture(path, ignore_exif=ignore_exif)
    except Exception as error:
        raise GTPError(f"{path} cannot be read: {first_line(error)}") from error


def load_picture(path: str | Path, *, ignore_exif: bool = False) -> Image.Image:
    """The first picture of a file; raises many exception types."""
    check_is_file(path)
    with open(path, "rb") as file:
        return decode(file, ignore_exif=ignore_exif)


def decode(file: IO[bytes] | Image.Image, *, ignore_exif: bool = False) -> Image.Image:
    """An RGB picture, of a file or of a picture of any mode; decompression bombs and truncated pictures raise.

    It is turned upright as its EXIF data say, or with `ignore_exif` left as it is stored, as timm and torchvision read
    pictures. TIFF files are upright in both cases, as Pillow turns them by itself.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is stricter
        warnings.filterwarnings("ignore", "Corrupt EXIF data")  # they turn nothing
        image = file if isinstance(file, Image.Image) else Image.open(file)
        check_pixels(image)
        image.load()  # before EXIF is asked for: in some files it comes last
        picture = _to_eight_bits(image).convert("RGB")
        turn = None if ignore_exif else orientation_transpose(image)
        if turn is None:
            return picture
        picture = picture.transpose(turn)
        # Else whoever looks at the picture's EXIF again, as some transforms do, would turn it twice.
        for key in ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"):
            picture.info.pop(key, None)
        return picture


def check_pixels(image: Image.Image) -> None:
    """Raise InputError for an open picture that is too large to be decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise InputError(
            f"{image.width:,} x {image.height:,} pixels are more than {MAX_PIXELS // 10**6} million; make it smaller"
        )


def orientation_transpose(image: Image.Image) -> Image.Transpose | None:
    """The transposition, as Pillow names it, that turns an open picture upright; None if it is.

    EXIF data that cannot be read turn nothing: such files are in every large data set.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            orientation = image.getexif().get(ORIENTATION)
    except Exception:  # of many types
        return None
    turns = Image.Transpose
    turn_by_orientation = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }
    return turn_by_orientation.get(orientation) if isinstance(orientation, int) else None


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """A picture with its grey values scaled to 8 bits; Pillow clips them at 255, so nearly all would be white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS_AS_INTEGERS):
        tags = getattr(image, "tag_v2", {})  # of TIFF
        white = 2 ** tags.get(BITS, (16,))[0] - 1  # some have 12 bits
        scaled = np.rint(np.asarray(image).astype(np.float64) * (255 / white)).astype(np.uint8)
        return Image.fromarray(255 - scaled if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else scaled)
    if image.mode in ("I", "F"):
        raise GTPError(
            f"its grey values ({'32-bit integers' if image.mode == 'I' else 'floating-point numbers'}) do not say what "
            "is white; convert it to 8 or 16 bits"
        )
    return image
