"""A small model with images of its own, so that commands run without a network and without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Library
from gtp_vit.errors import GTPError
from gtp_vit.weights import load_weights

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
CLASSES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
MEAN, STD = 0.286, 0.353  # of the training images
FOLDER = Path(__file__).parent / NAME


def create(*, pretrained: bool = True, meta: bool = False) -> Any:
    """The embedded model, a timm VisionTransformer with a class token and 14 x 14 patches, in eval mode."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta" if meta else "cpu"):
        model = VisionTransformer(**SIZES).eval()
    if pretrained and not meta:
        # stored in half the space; the figures of the model card are of these weights
        model.load_state_dict({key: value.float() for key, value in _read("weights.safetensors").items()})
    config = {"architecture": NAME, "input_size": (1, 28, 28), "mean": (MEAN,), "std": (STD,), "num_classes": 10}
    model.pretrained_cfg = config
    return model


class BundledLibrary(Library):
    """The one model inside the package."""

    title, has_weights = "the package", True

    def has_model(self, name: str) -> bool:
        return name == NAME

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        if sizes:
            raise GTPError(f"{name} has its own size and classes; remove {' and '.join(sizes)}")
        model = create(pretrained=checkpoint is None, meta=meta)
        if checkpoint is not None:
            load_weights(model, checkpoint, name)
        return model


BUNDLED = BundledLibrary()


def sample_images() -> tuple[Tensor, Tensor]:
    """Images of Fashion-MNIST's test set, uint8 [I, 28, 28], and their labels [I]."""
    stored = _read("images.safetensors")
    return stored["images"], stored["labels"].long()


def _read(name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if not (FOLDER / name).is_file():
        raise GTPError(
            f"this package was built without the embedded {name}; name a model and give --data-dir, or make it with "
            "training/embedded.py"
        )
    return load_file(FOLDER / name)


def normalise(images: Tensor) -> Tensor:
    """uint8 [B, 28, 28] -> float [B, 1, 28, 28] as the model takes it."""
    return ((images.float() / 255 - MEAN) / STD).unsqueeze(1)
