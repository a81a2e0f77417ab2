"""Rotary positions: queries and keys of an image token are rotated by angles that belong to its grid cell.

A model computes sines and cosines of all cells once a forward pass; the rows of the tokens that are left are looked up
by `Tokens.cell`.

Shapes: B batch, N tokens, c prefix tokens, M image tokens, M0 patches, H heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gtp_vit.core.tokens import Tokens
from gtp_vit.tensors import is_exporting, with_prefix_rows

METHODS_READ_ROTATED_KEYS = True  # do methods that compare keys see them rotated? Measured: benchmarks/rotary_keys.py


def keys_for_methods(keys: Tensor) -> Tensor | None:
    """`QKV.method_keys` for keys that are not rotated yet."""
    return None if METHODS_READ_ROTATED_KEYS else keys


class RotaryTable(NamedTuple):
    """Sines and cosines of all places in the sequence, and the cells of all patches; a backbone's
    `Tokens.position_table`."""

    # [R, 2 D], or [depth, H, R, 2 D] if each layer has its own: sines, then cosines, as timm has them. R = c + M0 + 1:
    # prefix tokens are not rotated (sine 0, cosine 1), then the cells, then a row for tokens in no cell: none either.
    rows: Tensor
    cells: Tensor  # `Tokens.cell` of the embedded tokens: while it is that very tensor, all are there and in order

    @classmethod
    def from_cells(cls, rows: Tensor, prefix: int, cells: Tensor) -> RotaryTable:
        """From sines and cosines of the cells alone, [..., M0, 2 D]."""
        half = rows.shape[-1] // 2
        still = torch.cat([rows.new_zeros(half), rows.new_ones(half)])
        before, after = (still.expand(*rows.shape[:-2], count, -1) for count in (prefix, 1))
        return cls(torch.cat([before, rows, after], dim=-2), cells)

    def for_image_tokens(self, layer: int, tokens: Tokens) -> Tensor:
        """Sines and cosines of the image tokens, [B or 1, H or 1, M, 2 D]."""
        rows = self._rows_of_layer(layer)
        if tokens.cell is self.cells:
            return rows[None, :, tokens.prefix : -1]
        return _gather_rows(rows, tokens.cell + tokens.prefix)

    def for_all_tokens(self, layer: int, tokens: Tokens) -> Tensor:
        """Sines and cosines of all tokens, [B or 1, H or 1, N, 2 D]."""
        rows = self._rows_of_layer(layer)
        if tokens.cell is self.cells:
            return rows[None, :, :-1]
        return _gather_rows(rows, with_prefix_rows(tokens.cell, tokens.prefix))

    def _rows_of_layer(self, layer: int) -> Tensor:
        """[1 or H, R, 2 D]."""
        return self.rows[layer] if self.rows.ndim == 4 else self.rows.unsqueeze(0)


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [1 or H, R, 2 D] at `index` [B, N], as [B, 1 or H, N, 2 D]."""
    return rows.index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)


def rotate(x: Tensor, rows: Tensor, half: bool) -> Tensor:
    """Pairs of channels of x [B, H, N, D] rotated by angles whose sines and cosines are rows [B or 1, 1 or H, N, 2 D].

    A pair is two neighbouring channels, or, if `half`, one of the first and one of the second half.
    """
    sine, cosine = rows.chunk(2, dim=-1)
    width = x.shape[-1] // 2
    one, other = (slice(width), slice(width, None)) if half else (slice(0, None, 2), slice(1, None, 2))
    if is_exporting():  # engines have no writing in place
        first = x[..., one] * cosine[..., one] - x[..., other] * sine[..., one]
        second = x[..., other] * cosine[..., other] + x[..., one] * sine[..., other]
        return torch.cat([first, second], dim=-1) if half else torch.stack([first, second], dim=-1).flatten(-2)
    out = x * cosine
    out[..., one].addcmul_(x[..., other], sine[..., one], value=-1)
    out[..., other].addcmul_(x[..., one], sine[..., other])
    return out
