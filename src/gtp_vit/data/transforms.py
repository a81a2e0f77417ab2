"""Transforms from a picture to a tensor, as the weights of a model expect their images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from gtp_vit.errors import GTPError
from gtp_vit.patching import host_of

if TYPE_CHECKING:
    from PIL.Image import Image

Transform: TypeAlias = "Callable[[Image], Tensor]"
TimmSettings: TypeAlias = Mapping[str, Any]  # keywords of timm's functions

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # as timm calls them


def preprocessing_of(model: nn.Module, changes: TimmSettings | None = None) -> dict[str, Any]:
    """The preprocessing of a checkpoint: timm's data configuration of the model, with the user's changes.

    Args:
        model: a supported one.
        changes: crop_pct, interpolation and img_size; what is empty or None changes nothing.
    """
    import timm.data

    inputs = host_of(model).inputs
    if inputs.preprocessing is None:
        raise GTPError(
            f"the preprocessing for the weights of {inputs.name} is unknown; give a function "
            "from a picture to a tensor as transform=..., or name the model to the command: hf:FOLDER_OR_NAME"
        )
    changed = {key: value for key, value in (changes or {}).items() if value}
    config: dict[str, Any] = timm.data.resolve_data_config(changed, pretrained_cfg=inputs.preprocessing)
    if not inputs.any_size:
        config["input_size"] = (inputs.channels, *inputs.size)
    return config


def make_transform(config: TimmSettings, augment: TimmSettings | None = None) -> Transform:
    """timm's transform for evaluation, or with `augment` for training."""
    import timm.data

    grey = len(config["mean"]) == 1
    if grey:  # timm's transforms expect three channels
        config = {**config, "mean": config["mean"] * 3, "std": config["std"] * 3}
    transform = timm.data.create_transform(**config, is_training=augment is not None, **(augment or {}))
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):  # of RandAugment
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
    if augment is not None and max(config["input_size"][1:]) <= 32:
        from torchvision.transforms import RandomCrop

        shift = 0 if augment["scale"][0] == 1 else 4  # as DeiT does with small images, which it never enlarges
        transform.transforms[0] = RandomCrop(config["input_size"][1:], padding=shift)
    return GrayscaleTransform(transform) if grey else transform


def posterize(picture: Image, bits: int, **_: object) -> Image:
    """The picture with the highest bits of each channel; timm asks for none at times, which Pillow refuses since 13."""
    from PIL import Image, ImageOps

    return ImageOps.posterize(picture, bits) if bits else Image.new(picture.mode, picture.size)


class GrayscaleTransform:
    """A transform for models of grey images: from a picture without colours to its one channel."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, picture: Image) -> Tensor:
        return self.transform(picture.convert("L").convert("RGB"))[:1]

    def __repr__(self) -> str:  # part of a run's identity
        return f"GrayscaleTransform({self.transform})"
