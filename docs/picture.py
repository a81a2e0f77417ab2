"""Draws docs/picture.png: which patches of a drawn image are left after some layers. Needs GTP_VIT_DATA for weights.

GTP_VIT_DATA=... python docs/picture.py
"""

import os
from pathlib import Path

import timm
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from gtp_vit import GTP, patch, trace

LAYERS = (0, 3, 6, 9, 11)
CELL, GAP = 16, 12


def scene() -> Image.Image:
    """A sailing boat: something to keep, and much sky and sea to summarise."""
    image = Image.new("RGB", (224, 224))
    draw = ImageDraw.Draw(image)
    for y in range(224):
        share = y / 224
        sky = (int(120 + 90 * share), int(170 + 50 * share), 235)
        sea = (20, int(90 + 40 * (1 - share)), int(140 + 30 * (1 - share)))
        draw.line([(0, y), (224, y)], fill=sky if y < 140 else sea)
    draw.ellipse([176, 22, 206, 52], fill=(255, 225, 120))
    draw.polygon([(60, 152), (164, 152), (146, 178), (78, 178)], fill=(120, 60, 30))
    draw.line([(112, 152), (112, 40)], fill=(70, 40, 20), width=4)
    draw.polygon([(116, 46), (116, 144), (172, 144)], fill=(250, 250, 245))
    draw.polygon([(108, 56), (108, 144), (66, 144)], fill=(215, 60, 50))
    for x in range(-10, 224, 34):
        draw.arc([x, 188, x + 30, 204], 200, 340, fill=(190, 215, 235), width=2)
    return image


def main() -> None:
    weights = Path(os.environ["GTP_VIT_DATA"]) / "assets/weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    model = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(weights))
    image = scene()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    found = trace(patch(model, GTP(propagate=14)), transform(image)[None])
    panels = [image] + [only(image, found.layers[layer].kept[0]) for layer in LAYERS]
    labels = ["image, 196 patches"] + [f"after layer {n}: {found.layers[n].kept.shape[1]}" for n in LAYERS]
    width = len(panels) * (224 + GAP) - GAP
    canvas = Image.new("RGB", (width, 224 + 22), "white")
    draw = ImageDraw.Draw(canvas)
    for index, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        left = index * (224 + GAP)
        canvas.paste(panel, (left, 0))
        draw.text((left + 4, 229), label, fill="black")
    canvas.save(Path(__file__).parent / "picture.png", optimize=True)


def only(image: Image.Image, kept: torch.Tensor) -> Image.Image:
    """The image with all patches that were removed faded out."""
    faded = Image.blend(image, Image.new("RGB", image.size, "white"), 0.85)
    for cell in kept.tolist():
        box = (cell % 14 * CELL, cell // 14 * CELL, cell % 14 * CELL + CELL, cell // 14 * CELL + CELL)
        faded.paste(image.crop(box), box)
    return faded


if __name__ == "__main__":
    main()
