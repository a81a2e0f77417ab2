"""Features of blocks that a caller has chosen, as timm and open_clip return them.

Shapes: B batch, M image tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gtp_vit.core.loop import run
from gtp_vit.core.restoring import restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import SettingError


class Intermediates(NamedTuple):
    """Features after some blocks of a patched model."""

    images: list[Tensor]  # [B, M, C], or [B, C, rows, columns]
    prefixes: list[Tensor]  # [B, prefix, C]
    last: Tokens  # after the last block that was run


def intermediates(
    model: Any,
    images: Tensor,
    indices: int | Sequence[int] | None,
    norm: nn.Module | None,
    *,
    stop_early: bool,
    output_fmt: str,
) -> Intermediates:
    """Run a patched model and collect the features of all tokens that remain after the chosen blocks, or were restored.

    `norm` is applied to them; with `stop_early` no block behind the last of them is run.
    """
    if output_fmt not in ("NCHW", "NLC"):
        raise SettingError(f"output_fmt is {output_fmt!r}; it must be 'NCHW' or 'NLC'")
    chosen = block_indices(len(model.reduction.backbone.blocks(model)), indices)
    layers: list[Tokens] = []
    depth = max(chosen) + 1 if stop_early else None
    last = run(model, images, layers=depth, observe=layers.append, restore=model.reduction.restore)
    features = [restore_patches(layers[index + 1]) for index in chosen]  # layers[0] is the embedding
    features = features if norm is None else [norm(states) for states in features]
    of_images = [feature[:, last.prefix :] for feature in features]
    if output_fmt == "NCHW":
        of_images = [to_grid(image, last.grid) for image in of_images]
    return Intermediates(of_images, [feature[:, : last.prefix] for feature in features], last)


def block_indices(depth: int, indices: int | Sequence[int] | None) -> list[int]:
    """The last n blocks for an int, all for None, else the listed ones; negative ones count from the end."""
    if indices is None:
        return list(range(depth))
    listed = list(range(depth - indices, depth)) if isinstance(indices, int) else [int(index) for index in indices]
    wrong = [index for index in listed if not -depth <= index < depth]
    if wrong or not listed:
        raise SettingError(f"indices {indices!r} do not fit; the model has blocks 0 to {depth - 1}")
    return sorted({index % depth for index in listed})


def to_grid(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, M, C] -> [B, C, rows, columns], possible only while all tokens are there."""
    rows, columns = grid
    if image.shape[1] != rows * columns:
        raise SettingError(
            f"output_fmt 'NCHW' needs all {rows * columns} image tokens, but {image.shape[1]} remain after this "
            "block; patch with restore=True, which gives every patch a feature, or use output_fmt='NLC'"
        )
    return image.unflatten(1, (rows, columns)).permute(0, 3, 1, 2).contiguous()
