"""upload: a picture that somebody sent, upright and as 8-bit RGB, or a clear reason why not.

Nothing is decoded before its size is known, and only formats that Pillow decodes by itself are tried: no other program
is started, as some formats would need.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from gtp_vit.data.image_file import MAX_PIXELS, check_is_file, check_pixels, decode, orientation_transpose
from gtp_vit.errors import GTPError, InputError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20 * 2**20
MAX_ASPECT_RATIO = 100  # times as long as wide; resizing the short side of a longer one would need any amount of memory
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


def read_upload(path: str | Path) -> tuple[Image, list[str]]:
    """The picture in a file, and sentences on what was done to it."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]  # AVIF is not in every build of Pillow
    try:
        check_is_file(path)
        if Path(path).stat().st_size > MAX_BYTES:
            raise InputError(f"the file is larger than {MAX_BYTES // 2**20} MB; make the picture smaller")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is stricter
            warnings.filterwarnings("ignore", "Corrupt EXIF data")  # they turn nothing
            with Image.open(path, formats=formats) as image:
                check_pixels(image)
                _check_shape(*image.size)
                return _decoded(image)
    except Image.DecompressionBombError as error:
        raise InputError(
            f"the picture has far more than {MAX_PIXELS // 10**6} million pixels, the most that is read here; make it "
            "smaller"
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(f"this file is not a readable image; send one of {', '.join(formats)}") from error
    except GTPError:
        raise
    except Exception as error:  # decoders raise errors of many classes
        raise InputError(f"the picture cannot be read: {first_line(error)}") from error


def _check_shape(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InputError(
            f"the picture has {width:,} x {height:,} pixels, more than {MAX_ASPECT_RATIO} times as long as wide; cut a "
            "part out"
        )


def _decoded(image: Image) -> tuple[Image, list[str]]:
    """The first frame of an open picture, upright, and what was done to get there."""
    notes = []
    frames, mode, turn = getattr(image, "n_frames", 1), image.mode, orientation_transpose(image)
    if frames > 1 and image.format != "MPO":  # of a camera's MPO the others are previews
        notes.append(f"It has {frames} frames; this is the first.")
    picture = decode(image)
    if turn or orientation_transpose(image):  # TIFF forgets it when it is decoded, PNG may not know it before
        notes.append("It was turned upright, as its EXIF data say.")
    if mode == "CMYK":
        notes.append("Its colours (CMYK) were converted to RGB.")
    if mode.startswith("I"):
        notes.append("Its 16 bits of grey were scaled to 8.")
    if min(picture.size) < 8:
        notes.append(f"It has only {picture.width} x {picture.height} pixels.")
    return picture, notes
