"""tokens: what is left of an image after each layer and where the rest went, as pictures, a table and a sentence.

Shapes: M0 patches of the image.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gtp_vit.profiling.trace import Trace
from gtp_vit.report.page import picture
from gtp_vit.report.results import Table

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 16  # pixels of a patch in a picture
SPACE = 10


def default_layers(depth: int) -> tuple[int, ...]:
    """The layers that are drawn by default."""
    return depth // 4, depth // 2, 3 * depth // 4, depth - 1


def panels(image: Image, trace: Trace, layers: Sequence[int], which: int = 0) -> Image:
    """The image, and for each layer what is left of it (above) and to which token each patch belongs (below).

    Args:
        image: a PIL image of the patches that the model saw.
        found: the trace of a batch.
        layers: which layers to draw.
        which: which image of the batch.
    """
    from PIL import Image, ImageDraw

    rows, columns = trace.grid
    size = (columns * CELL, rows * CELL)
    image = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    width = (len(layers) + 1) * (size[0] + SPACE) - SPACE
    canvas = Image.new("RGB", (width, 2 * size[1] + SPACE + 20), "white")
    draw = ImageDraw.Draw(canvas)
    canvas.paste(image, (0, 20))
    draw.text((2, 4), f"{rows} x {columns} patches", fill="black")
    for index, layer in enumerate(layers):
        left = (index + 1) * (size[0] + SPACE)
        stay, sizes = trace.layers[layer].kept[which], trace.layers[layer].sizes
        draw.text((left + 2, 4), f"layer {layer}: {len(stay)}", fill="black")
        own = None if sizes is None else sizes[which]
        canvas.paste(fade_removed(image, stay, trace.grid, own), (left, 20))
        canvas.paste(groups(image, trace.layers[layer].owners[which], trace.grid), (left, 20 + size[1] + SPACE))
    return canvas


def token_picture(image: Image, trace: Trace, caption: str) -> str:
    """The patches left of an image after some of the layers, as part of a page."""
    return picture(png(panels(image, trace, default_layers(len(trace.layers)))), caption)


def prepared_picture(pixels: Tensor) -> Image:
    """An image as the model gets it, [1 or 3, H, W], as a picture: from its darkest to its brightest value."""
    from PIL import Image

    pixels = pixels.float().cpu()
    pixels = (pixels - pixels.amin()) / (pixels.amax() - pixels.amin()).clamp(min=1e-6)
    return Image.fromarray((255 * pixels.expand(3, -1, -1)).byte().permute(1, 2, 0).numpy())


def fade_removed(image: Image, cells: Tensor, grid: tuple[int, int], size: Tensor | None = None) -> Image:
    """The image with all patches that were removed faded out, and the sizes of tokens that stand for several."""
    from PIL import Image, ImageDraw

    faded = Image.blend(image, Image.new("RGB", image.size, "white"), 0.85)
    draw = ImageDraw.Draw(faded)
    sizes = [1.0] * len(cells) if size is None else size.tolist()
    for cell, number in zip(cells.tolist(), sizes, strict=True):
        if cell < grid[0] * grid[1]:
            box = _box(cell, grid)
            faded.paste(image.crop(box), box)
            if number >= 1.5:
                draw.text((box[0] + 2, box[1] + 2), f"{number:.0f}", "white", stroke_width=1, stroke_fill="black")
    return faded


def groups(image: Image, owner: Tensor, grid: tuple[int, int]) -> Image:
    """Each patch in the colour of the token that stands for it, [M0]; white if none does."""
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", image.size, "white")
    draw = ImageDraw.Draw(canvas)
    counts = torch.bincount(owner[owner >= 0], minlength=1)
    for cell, token in enumerate(owner.tolist()):
        if token >= 0:
            draw.rectangle(_box(cell, grid), fill=(225, 228, 233) if counts[token] == 1 else _colour(token))
    return canvas


def _box(cell: int, grid: tuple[int, int]) -> tuple[int, int, int, int]:
    left, top = cell % grid[1] * CELL, cell // grid[1] * CELL
    return left, top, left + CELL, top + CELL


def _colour(number: int) -> tuple[int, int, int]:
    """A colour for a token; neighbouring numbers get very different ones."""
    red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, 0.45 + 0.25 * (number * 0.7548 % 1), 0.6)
    return int(255 * red), int(255 * green), int(255 * blue)


def png(drawn: Image) -> bytes:
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def token_table(trace: Trace) -> Table:
    """Tokens, largest size and losses of each layer."""
    rows = []
    for number, layer in enumerate(trace.layers):
        largest = "1" if layer.sizes is None else f"{layer.sizes.max().item():.2f}"
        counts = [str(number), str(layer.kept.shape[1]), str(layer.removed.shape[1])]
        rows.append([*counts, largest, f"{layer.lost.mean():.0%}"])
    return ["layer", "tokens left", "removed", "largest size", "lost, % of removed"], rows


def lost_fraction_text(trace: Trace) -> str:
    return f"Of all removed tokens, {trace.lost().mean():.0%} reached no other token: their information is lost."
