"""The graph of a file, whatever its metadata say: inputs, outputs, multiply-accumulates, 8-bit numbers.

Nothing in here needs torch. Each engine fills a Graph from its own format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Port:
    """An input or an output."""

    name: str | None  # None = the format has no names for it
    type: str  # as numpy calls it
    shape: tuple[int | None, ...] | None  # None = any size; None as a whole = not even the rank is known

    def __str__(self) -> str:
        sizes = "any shape" if self.shape is None else ", ".join("any" if n is None else str(n) for n in self.shape)
        return f"{self.name!r}: {self.type} [{sizes}]"


@dataclass(frozen=True)
class Graph:
    """The graph of a file."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    macs: int  # of its products and convolutions for one image; 0 = a shape is not known, so they cannot be counted
    eight_bits: bool  # are some of its products in 8 bits?


@dataclass(frozen=True)
class StoredFile:
    """A file that was opened: its metadata, and its graph when that is asked for."""

    metadata: str | None  # JSON; None = there is none
    graph: Callable[[], Graph]


Shape = Sequence[int | None] | None


def product_macs(left: Shape, out: Shape, *, transposed: bool = False) -> int | None:
    """MACs of a matrix product from the shapes of its left factor and its result; None if one is not known.

    >>> product_macs((1, 4, 8), (1, 4, 16))
    512
    """
    left, out = _of_one_image(left), _of_one_image(out)
    if left is None or out is None or len(left) < 1 + transposed or None in (*left, *out):
        return None
    inner = left[-2] if transposed else left[-1]
    return math.prod((*out, inner))  # type: ignore[arg-type]


def convolution_macs(weight: Shape, out: Shape) -> int | None:
    """MACs of a convolution from the shapes of its weight and its result; None if one is not known.

    >>> convolution_macs((16, 3, 4, 4), (1, 16, 7, 7))
    37632
    """
    out = _of_one_image(out)
    if weight is None or out is None or None in (*weight, *out):
        return None
    return math.prod((*out, *weight[1:]))  # type: ignore[arg-type]


def _of_one_image(shape: Shape) -> Shape:
    """The shape with a first size that is not known as 1: it is the batch, which some operators hide."""
    return (1, *shape[1:]) if shape and shape[0] is None else shape


def total_macs(parts: Sequence[int | None]) -> int:
    """The sum; 0 if one of them is not known."""
    return 0 if None in parts else sum(part for part in parts if part is not None)
