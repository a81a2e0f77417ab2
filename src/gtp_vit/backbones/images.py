"""Checks of the input images: one clear error instead of one from deep inside the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.errors import BadInput


def check_images(images: Any, first: nn.Conv2d, size: tuple[int, int] | None, patch: tuple[int, int] | None) -> None:
    """Refuse images that do not fit a model.

    Args:
        images: the caller's.
        first: the model's first layer.
        size: the only height and width that it takes; None = any.
        patch: what height and width must be multiples of; None = nothing.
    """
    if not isinstance(images, Tensor):
        raise BadInput(f"images are a {type(images).__name__}; give a float tensor [batch, channels, height, width]")
    shape, channels = tuple(images.shape), first.in_channels
    if images.ndim != 4:
        raise BadInput(f"images have shape {shape}; give [batch, channels, height, width], for one image x[None]")
    if not images.is_floating_point():
        raise BadInput(f"images are {images.dtype}; convert them to float and normalise them as the model expects")
    if shape[1] != channels:
        raise BadInput(f"images have {shape[1]} channels, but the model takes {channels}")
    weight = first.weight
    if images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type):
        raise BadInput(
            f"images are {images.dtype}, but the model is {weight.dtype}; convert one of them, or use autocast"
        )
    if images.device != weight.device:
        raise BadInput(f"images are on {images.device}, but the model is on {weight.device}; move one of them")
    if min(shape[2:]) == 0:
        raise BadInput(f"images are {shape[2]} x {shape[3]}; they have no pixels")
    if size is not None and shape[2:] != size:
        raise BadInput(
            f"images are {shape[2]} x {shape[3]}, but the model takes {size[0]} x {size[1]}; resize them, or create "
            f"the model with img_size={shape[2:]} (or, if it is one of timm's, dynamic_img_size=True)"
        )
    if patch is not None and (shape[2] % patch[0] or shape[3] % patch[1]):
        raise BadInput(f"images are {shape[2]} x {shape[3]}; both must be multiples of the patch size {patch}")
