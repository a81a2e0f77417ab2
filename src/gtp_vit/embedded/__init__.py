"""The model and images that ship with the package, so that every command runs without a network: see MODEL_CARD.md."""

from __future__ import annotations

from typing import Any

from torch import Tensor

NAME = "fashion_vit"
SIZES = {
    "img_size": 28,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 64,
    "depth": 12,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}
MEAN, STD = 0.286, 0.353  # of the training images


def normalise(images: Tensor) -> Tensor:
    """uint8 [B, 28, 28] -> float [B, 1, 28, 28] as the model takes it."""
    return ((images.float() / 255 - MEAN) / STD).unsqueeze(1)


def create(pretrained: bool = True) -> Any:
    """The embedded model, a timm VisionTransformer with a class token and 14 x 14 patches."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**SIZES)
