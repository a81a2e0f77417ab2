"""view: what a model sees of a picture, as a tensor and as a picture that people can look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from gtp_vit.data.dataset import DataSettings, OneChannel, make_transform, preparation
from gtp_vit.models.sources import transform_of


class Seen(NamedTuple):
    """A picture as a model gets it."""

    picture: Any  # what is left of it after resizing and cropping
    tensor: Tensor  # [channels, height, width], ready for the model


def view_of(
    name: str, model: nn.Module, *, img_size: int | None = None, crop_pct: float | None = None
) -> Callable[[Any], Seen]:
    """From a picture to what the model of this name sees of it, prepared as its weights want."""
    transform = transform_of(name, model)
    if transform is None:
        settings = DataSettings(data_dir=Path(), img_size=img_size, crop_pct=crop_pct)
        transform = make_transform(preparation(model, settings))
    return view_through(transform)


def view_through(transform: Any) -> Callable[[Any], Seen]:
    """From a picture to what a transform makes of it."""
    from torchvision import transforms

    steps = getattr(getattr(transform, "transform", transform), "transforms", ())
    geometry = transforms.Compose([step for step in steps if "Resize" in str(step) or "Crop" in str(step)])

    def view(picture: Any) -> Seen:
        tensor = transform(picture)
        shown = picture.convert("L") if isinstance(transform, OneChannel) else picture
        # Where a transform does not show its steps, the picture is drawn from its result.
        return Seen(geometry(shown) if steps else as_picture(tensor), tensor)

    return view


def as_picture(image: Tensor) -> Any:
    """A prepared image [channels, height, width] as a picture: its values from the smallest to the largest."""
    from PIL import Image

    low, high = image.amin(), image.amax()
    shades = ((image - low) / (high - low).clamp(min=1e-6) * 255).round().byte()
    return Image.fromarray(shades.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
