"""Draws docs/picture.png: which patches of a photo are left after some layers. Needs GTP_VIT_DATA for the weights.

GTP_VIT_DATA=... python docs/picture.py

The photo, docs/pictures/coffee.jpg, is in the public domain (CC0), from scikit-image's sample images.
"""

import os
from pathlib import Path

import timm
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file

from gtp_vit import patch, trace

DOCS = Path(__file__).parent
LAYERS = (3, 5, 7, 9)
PATCH, GRID, GAP, SCALE = 16, 14, 16, 1.25


def main() -> None:
    weights = Path(os.environ["GTP_VIT_DATA"]) / "assets/weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    model = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(weights))
    photo = Image.open(DOCS / "pictures/coffee.jpg")
    config = timm.data.resolve_data_config({}, model=model) | {"crop_pct": 1.0}
    images = timm.data.create_transform(**config)(photo)[None]
    fast = patch(model)  # GTP+ at 65 % of the MACs
    assert model(images).argmax() == fast(images).argmax()
    layers = trace(fast, images).layers
    panels = [("all 196 patches", photo)]
    panels += [(f"after {n + 1} layers: {layers[n].kept.shape[1]}", faded(photo, layers[n].kept[0])) for n in LAYERS]
    side = round(photo.width * SCALE)
    canvas = Image.new("RGB", (len(panels) * (side + GAP) - GAP, side + 26), "white")
    draw = ImageDraw.Draw(canvas)
    for index, (label, panel) in enumerate(panels):
        left = index * (side + GAP)
        canvas.paste(panel.resize((side, side), Image.Resampling.LANCZOS), (left, 0))
        draw.text((left + 2, side + 6), label, fill="black", font=ImageFont.load_default(15))
    canvas.quantize(192, dither=Image.Dither.NONE).save(DOCS / "picture.png", optimize=True)


def faded(photo: Image.Image, kept: torch.Tensor) -> Image.Image:
    """The photo with all patches faded whose tokens are gone."""
    image = Image.blend(photo, Image.new("RGB", photo.size, "white"), 0.82)
    for cell in kept.tolist():
        top, left = cell // GRID * PATCH, cell % GRID * PATCH
        box = (left, top, left + PATCH, top + PATCH)
        image.paste(photo.crop(box), box)
    return image


if __name__ == "__main__":
    main()
