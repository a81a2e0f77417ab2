"""Patch features as pictures, unreduced and restored side by side, and how many patches keep their segment.

Colours are the first three principal components of the unreduced model's features. Segments are k-means clusters of
these; a restored feature belongs to the nearest of the same centres.

Shapes: M0 patches, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtp_vit.report.tokens import CELL, SPACE

SEGMENTS = 5


def feature_panels(image: Any, unreduced: Tensor, restored: Tensor, grid: tuple[int, int]) -> Any:
    """The image, and both models' features of it, [M0, C] each, as colours (above) and as segments (below)."""
    from PIL import Image, ImageDraw

    rows, columns = grid
    size = (columns * CELL, rows * CELL)
    canvas = Image.new("RGB", (3 * (size[0] + SPACE) - SPACE, 2 * size[1] + SPACE + 20), "white")
    draw = ImageDraw.Draw(canvas)
    canvas.paste(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), (0, 20))
    for index, (name, features) in enumerate((("unreduced", unreduced), ("restored", restored)), start=1):
        left = index * (size[0] + SPACE)
        draw.text((left + 2, 4), name, fill="black")
        maps = (colours(unreduced, features), shades(segments(unreduced, features)))
        for place, map_ in enumerate(maps):
            small = Image.fromarray((255 * map_).byte().unflatten(0, grid).numpy())
            canvas.paste(small.resize(size, Image.Resampling.NEAREST), (left, 20 + place * (size[1] + SPACE)))
    return canvas


def colours(base: Tensor, features: Tensor) -> Tensor:
    """The first three principal components of `base` in `features`, from 0 to 1, [M0, 3]."""
    mean = base.mean(dim=0)
    _, _, directions = torch.linalg.svd(base - mean, full_matrices=False)
    axes = directions[:3].T
    axes = axes * axes.sum(dim=0).sign().where(axes.sum(dim=0) != 0, torch.ones(axes.shape[1]))  # the same in every run
    known = (base - mean) @ axes
    low, high = known.amin(dim=0), known.amax(dim=0)
    return (((features - mean) @ axes - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


def segments(base: Tensor, features: Tensor, count: int = SEGMENTS) -> Tensor:
    """The k-means segment of each feature, [M0]; the centres are those of `base`, and the same in every run."""
    unit = base / base.norm(dim=1, keepdim=True).clamp(min=1e-12)
    places = [int((unit @ unit.mean(dim=0)).argmin())]
    while len(places) < min(count, len(unit)):
        places.append(int((unit @ unit[places].T).amax(dim=1).argmin()))
    centres = unit[places]
    for _ in range(20):
        nearest = (unit @ centres.T).argmax(dim=1)
        sums = torch.zeros_like(centres).index_add(0, nearest, unit)
        empty = sums.norm(dim=1, keepdim=True) == 0
        centres = torch.where(empty, centres, sums / sums.norm(dim=1, keepdim=True).clamp(min=1e-12))
    return (features @ centres.T).argmax(dim=1)


def shades(segment: Tensor) -> Tensor:
    """A colour for each segment, [M0, 3]."""
    angle = 2 * torch.pi * segment.float().unsqueeze(1) / SEGMENTS
    return 0.55 + 0.35 * torch.cos(angle - torch.tensor([0.0, 2.1, 4.2]))


def same_segment_percent(unreduced: Tensor, restored: Tensor) -> float:
    """Share of the patches whose restored feature is in the segment of the unreduced one, in percent."""
    same = segments(unreduced, unreduced) == segments(unreduced, restored)
    return 100 * float(same.float().mean())
