"""Features of blocks that a caller has chosen, as timm and open_clip return them.

Shapes: B batch, M image tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gtp_vit.errors import BadSetting


def block_indices(depth: int, indices: int | Sequence[int] | None) -> list[int]:
    """The last n blocks for an int, all for None, else the listed ones; negative ones count from the end."""
    if indices is None:
        return list(range(depth))
    listed = list(range(depth - indices, depth)) if isinstance(indices, int) else [int(index) for index in indices]
    wrong = [index for index in listed if not -depth <= index < depth]
    if wrong or not listed:
        raise BadSetting(f"indices {indices!r} do not fit; the model has blocks 0 to {depth - 1}")
    return sorted({index % depth for index in listed})


def to_grid(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, M, C] -> [B, C, rows, columns], possible only while all tokens are there."""
    rows, columns = grid
    if image.shape[1] != rows * columns:
        raise BadSetting(
            f"output_fmt 'NCHW' needs all {rows * columns} image tokens, but {image.shape[1]} remain after this "
            "block; patch with restore=True, which gives every patch a feature, or use output_fmt='NLC'"
        )
    return image.unflatten(1, (rows, columns)).permute(0, 3, 1, 2).contiguous()
