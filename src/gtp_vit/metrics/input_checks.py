"""Models and images that a caller gives, refused where no figure could come of them, with the image named."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from gtp_vit.errors import InputError, SettingError, plural

MAX_PIXEL_VALUE = 30  # prepared pixels are a few units; those of 0 to 255 were not scaled


def check_has_weights(model: nn.Module) -> None:
    """Raise SettingError for a model on torch's meta device, which has sizes and no numbers."""
    if any(weight.is_meta for weight in model.parameters()):
        raise SettingError(
            f"{type(model).__name__} is on the meta device, where it has no weights; load them first: "
            "model.to_empty(device='cpu') and load_state_dict, or create it with its weights"
        )


def check_image_tensor(images: object, fewest: int, purpose: str, better: int) -> None:
    """Raise SettingError unless `images` is a tensor of enough images for a purpose, and InputError for bad pixels."""
    if not isinstance(images, Tensor) or images.ndim != 4:
        shape = f" of shape {tuple(images.shape)}" if isinstance(images, Tensor) else ""
        raise SettingError(
            f"images is a {type(images).__name__}{shape}; give one tensor [images, channels, height, width]"
        )
    if len(images) < fewest:
        count = plural(len(images), "image is", "images are")
        raise SettingError(f"{count} too few to {purpose}; give at least {fewest}, better {better}")
    check_pixels(images)


def check_pixels(images: Tensor) -> None:
    """Raise InputError for images without numbers, or with some that are not finite; warn of those that teach
    nothing."""
    if images.is_meta:
        raise InputError("the images are on the meta device, where they have no pixels; give them on the CPU")
    check_finite(images, range(len(images)))
    rows = images.flatten(1)
    if not len(rows):
        return
    flat = (rows.amax(dim=1) == rows.amin(dim=1)).nonzero().flatten().tolist()
    if flat:
        warnings.warn(
            f"{_name_images(flat)} one value in all pixels, from which nothing is learned; leave out", stacklevel=3
        )
    elif len(rows) > 1 and bool((rows == rows[:1]).all()):
        warnings.warn(f"all {len(rows)} images are the same one; give different ones", stacklevel=3)
    wide = (rows.abs().amax(dim=1) > MAX_PIXEL_VALUE).nonzero().flatten().tolist()
    if wide:
        warnings.warn(
            f"{_name_images(wide)} values up to {float(rows.abs().max()):g}; give images as the model expects them, "
            "scaled and with its mean and standard deviation",
            stacklevel=3,
        )


def check_finite(images: Tensor, index: Sequence[int]) -> None:
    """Raise InputError for images with pixels that are not finite; `index` is where each is in the data set."""
    bad = (~images.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        named = _name_images([index[number] for number in bad])
        raise InputError(f"{named} pixels that are not finite; repair or leave out what they were made of")


def _name_images(indices: Sequence[int]) -> str:
    """The places of images, as the begin of a sentence."""
    if len(indices) == 1:
        return f"image {indices[0]} (counted from 0) has"
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"images {', '.join(map(str, indices[:3]))}{more} (counted from 0) have"
