"""Draws the pictures of explanation/how-it-works.md from the model in the package: python docs/make_pictures.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from gtp_vit import create_model, patch, trace
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.kernels.arguments import GTPPlusMergeResult, NormParams
from gtp_vit.methods.gtp_plus.merge import earlier_similarity, merge_cost, relative_importance
from gtp_vit.models import bundled
from gtp_vit.report.plot import line_plot
from gtp_vit.report.tokens import panels

FOLDER = Path(__file__).parent / "pictures"
IMAGE, LAYER = 0, 2  # a boot; the first layer that removes anything
CELL, GAP = 18, 14
COLD, HOT = (246, 247, 249), (0, 121, 140)


def seen_in(fast: Any, images: Tensor) -> dict[str, Tensor]:
    """What one layer of GTP+ decides from, and what it decides, taken from the pass itself."""
    merge, found = fast.reducer.merge, {}

    def looked_at(attention: LayerAttention, removed: int, norm: NormParams) -> GTPPlusMergeResult:
        stats = attention.statistics("class_row", heads="mean")
        attention.statistics = lambda *names, **settings: stats  # they can be asked for only once
        merged = merge(attention, removed, norm)
        if attention.layer == LAYER:
            tokens, importance = attention.tokens, stats.class_row
            features = (tokens.x + attention.branch())[:, -tokens.cell.shape[1] :]
            size = torch.ones_like(importance) if tokens.size is None else tokens.size
            found.update(importance=importance, features=features, size=size, cell=tokens.cell)
            found.update(kept=merged.keep, gone=merged.drop, target=merged.target)
        return merged

    fast.reducer.merge = looked_at
    with torch.inference_mode():
        fast(images)
    del fast.reducer.merge
    return {key: value[0] for key, value in found.items()}


def costs(seen: dict[str, Tensor], floor: float) -> Tensor:
    """The damage of every token, as the method computes it."""
    order = seen["importance"].argsort(descending=True, stable=True)
    unit = torch.nn.functional.normalize(seen["features"][order], dim=-1)
    matters = relative_importance(seen["importance"][order][None], None)
    found = merge_cost(earlier_similarity(unit[None]), matters, seen["size"][order][None], floor)[0]
    return torch.empty_like(found).scatter(0, order, found)


def one_layer(fast: Any, images: Tensor, picture: Image.Image) -> Image.Image:
    """Four panels: the image, importance, damage, and who goes where."""
    seen = seen_in(fast, images)
    cost = costs(seen, fast.reduction.method.importance_floor)
    gone = set(seen["gone"].tolist())
    assert gone == set(cost.argsort()[: len(gone)].tolist()), "the picture would not show what the method does"
    side = 14 * CELL
    canvas = Image.new("RGB", (4 * side + 3 * GAP, side + 24), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(14)
    large = picture.resize((side, side), Image.Resampling.NEAREST)
    finite = cost.clamp(max=cost[cost.isfinite()].quantile(0.95))
    parts = [
        (large, f"layer {LAYER}: {len(cost)} tokens"),
        (heat(seen["importance"] / seen["importance"].max()), "1. importance"),
        (heat(finite / finite.max()), "2. damage if it were merged"),
        (arrows(large, seen), f"3. the {len(gone)} cheapest are merged"),
    ]
    for index, (panel, text) in enumerate(parts):
        left = index * (side + GAP)
        draw.text((left, 2), text, fill="black", font=font)
        canvas.paste(panel, (left, 24))
    return canvas


def heat(values: Tensor) -> Image.Image:
    """A square for each patch; the darker, the larger."""
    panel = Image.new("RGB", (14 * CELL, 14 * CELL))
    draw = ImageDraw.Draw(panel)
    for cell, value in enumerate(values.clamp(0, 1).sqrt().tolist()):
        top, left = CELL * (cell // 14), CELL * (cell % 14)
        colour = tuple(round(cold + value * (hot - cold)) for cold, hot in zip(COLD, HOT, strict=True))
        draw.rectangle([left, top, left + CELL - 1, top + CELL - 1], fill=colour)
    return panel


def arrows(picture: Image.Image, seen: dict[str, Tensor]) -> Image.Image:
    """A line from each patch that goes to the one that takes it."""
    panel = Image.blend(picture.convert("RGB"), Image.new("RGB", picture.size, "white"), 0.6)
    draw = ImageDraw.Draw(panel)
    takers = seen["cell"][seen["kept"]][seen["target"]].tolist()
    for cell, taker in zip(seen["cell"][seen["gone"]].tolist(), takers, strict=True):
        (x, y), (to_x, to_y) = middle(cell), middle(taker)
        draw.line([x, y, to_x, to_y], fill=(209, 73, 91), width=2)
        draw.ellipse([x - 3, y - 3, x + 3, y + 3], outline=(209, 73, 91), fill="white", width=2)
        draw.ellipse([to_x - 4, to_y - 4, to_x + 4, to_y + 4], fill=HOT)
    return panel


def middle(cell: int) -> tuple[int, int]:
    return CELL * (cell % 14) + CELL // 2, CELL * (cell // 14) + CELL // 2


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    stored = bundled.sample_images()[0][IMAGE : IMAGE + 1]
    images, picture = bundled.normalise(stored), Image.fromarray(stored[0].numpy())
    fast = patch(create_model("fashion_vit"))
    one_layer(fast, images, picture).save(FOLDER / "one-layer.png", optimize=True)
    found = trace(fast, images)
    panels(picture, found, (2, 4, 6, 10)).save(FOLDER / "layers.png", optimize=True)
    left = {"image tokens": [(layer, found.layers[layer].kept.shape[1]) for layer in range(len(found.layers))]}
    head, rest = line_plot(left, "after layer", "tokens that are left of 196").split(">", 1)
    style = "<style>text { font: 12px sans-serif; fill: #1d2433 } .grid { stroke: #dfe3ea }</style>"
    paper = '<rect width="100%" height="100%" fill="white"/>'
    (FOLDER / "schedule.svg").write_text(f"{head}>{style}{paper}{rest}\n")


if __name__ == "__main__":
    main()
