"""gtp-vit macs: tokens and MACs of each layer, from the sizes of the model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from torch import Tensor

from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.output import OutputFlags, command, show
from gtp_vit.core.costs import Convention
from gtp_vit.inputs.models import create_model
from gtp_vit.measure.macs import macs, steps_on
from gtp_vit.patch import patch


@dataclass(frozen=True)
class Macs(OutputFlags):
    """Count the multiply-accumulates of a model with and without token reduction, for one image.

    examples:
      gtp-vit macs deit_base_patch16_224 --propagate 8
      gtp-vit macs deit_small_patch16_224 --method evit --keep-rate 0.6 --json
      gtp-vit macs deit_small_patch16_224 --method gtp --propagate 8 --convention torchprofile
    """

    model: tyro.conf.Positional[str] = "deit_small_patch16_224"
    """Name of a timm model."""
    method: str = "gtp_plus"
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does."""
    convention: Convention = "model"
    """model: what torch's counter sees. torchprofile: how the paper counts, norms and the released code included."""
    img_size: int | None = None
    """Height and width of the images, if not the model's own."""
    lossless: bool = True
    """The last block computes only what the head reads."""


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Macs, words)
    model = create_model(flags.model, meta=True, img_size=flags.img_size)
    method = chosen.for_model(model)
    fast = patch(model, method, lossless=flags.lossless)
    before, after = macs(model, convention=flags.convention), macs(fast, convention=flags.convention)
    result = {"unreduced": before.total, method.name: after.total, "parts": after, "settings": method.to_dict()}
    columns, rows = layer_rows(model, fast, flags.convention)
    title = f"{flags.model}, {method.name}"
    show(flags, command("macs", words), title, columns, rows, {"flags": flags, **result})


def layer_rows(
    model: Any, fast: Any, convention: Any = "model", images: Tensor | None = None
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the tokens that go into each layer, and what it costs before and after."""
    before, after = macs(model, convention=convention), macs(fast, convention=convention, images=images)
    vit = fast.reduction.vit
    by_image = images is not None and fast.reducer.adaptive
    every = steps_on(fast, images) if by_image else [fast.reducer.steps(vit.grid)]
    keys = [sum(step.keys for step in layer) / len(every) for layer in zip(*every, strict=True)]

    def row(name: str, count: str, old: int, new: int) -> list[str]:
        share = f"{new / old:.0%}" if old else "-"
        return [name, count, f"{old / 1e6:.1f}", f"{new / 1e6:.1f}", share]

    rows = [row("embedding", str(vit.image_tokens + vit.prefix), before.embed, after.embed)]
    for layer, count in enumerate(keys):
        rows.append(row(f"layer {layer}", f"{count + vit.prefix:g}", before.layers[layer], after.layers[layer]))
    rows.append(row("head", "", before.head, after.head))
    rows.append(row("method", "", before.method, after.method))
    rows.append(row("total", "", before.total, after.total))
    return ["part", "tokens in", "MMACs unreduced", "MMACs reduced", "share"], rows
