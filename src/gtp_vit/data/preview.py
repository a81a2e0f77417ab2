"""A preview: what a model sees of a picture, as a tensor and as a picture that people can look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor, nn

from gtp_vit.data.transforms import GrayscaleTransform, Transform, make_transform, preprocessing_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Preview(NamedTuple):
    """A picture as a model gets it."""

    picture: Image  # what is left of it after resizing and cropping
    tensor: Tensor  # [channels, height, width], ready for the model


PreviewTransform: TypeAlias = "Callable[[Image], Preview]"


def preview_transform(
    model: nn.Module, transform: Transform | None = None, *, img_size: int | None = None, crop_pct: float | None = None
) -> PreviewTransform:
    """From a picture to what a model sees of it: by `transform`, or else prepared by timm as the weights want."""
    if transform is None:
        transform = make_transform(preprocessing_of(model, {"img_size": img_size, "crop_pct": crop_pct}))
    return preview_through(transform)


def preview_through(transform: Transform) -> PreviewTransform:
    """From a picture to what a transform makes of it."""
    from torchvision import transforms

    steps = getattr(getattr(transform, "transform", transform), "transforms", ())
    geometry = transforms.Compose([step for step in steps if "Resize" in str(step) or "Crop" in str(step)])

    def view(picture: Image) -> Preview:
        tensor = transform(picture)
        shown = picture.convert("L") if isinstance(transform, GrayscaleTransform) else picture
        # Where a transform does not show its steps, the picture is drawn from its result.
        return Preview(geometry(shown) if steps else to_picture(tensor), tensor)

    return view


def to_picture(image: Tensor) -> Image:
    """A prepared image [channels, height, width] as a picture: its values from the smallest to the largest."""
    from PIL import Image

    low, high = image.amin(), image.amax()
    shades = ((image - low) / (high - low).clamp(min=1e-6) * 255).round().byte()
    return Image.fromarray(shades.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
