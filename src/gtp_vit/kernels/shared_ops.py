"""The operators that several methods share, and GTP's."""

from __future__ import annotations

from torch import Tensor

from gtp_vit.kernels import checks, native, reference, value_checks
from gtp_vit.kernels.dispatch import Operator, Ops

Shape = tuple[int, ...]


def _attention_flops(q: Shape, k: Shape, removed: int, queries: int, asked: list[bool]) -> int:
    batch, heads, tokens, depth = k
    whole_map = removed or asked[0] or asked[1]
    again = int(asked[2] and not whole_map)  # the twin computes the class row once more
    return 2 * batch * heads * depth * tokens * ((q[2] if whole_map else queries) + queries + again)


def _reduce_flops(x: Shape, removed: int, with_size: bool) -> int:
    """Operations of the twin's dense product; the kernel does only what the sparse graph needs."""
    return 2 * x[0] * (x[1] - removed) * removed * (x[2] + int(with_size))


attention: Operator[tuple[Tensor, Tensor]] = Operator(
    "attention",
    reference.attention,
    {Ops.NATIVE: native.attention},
    check=checks.check_attention,
    fits=checks.fits_attention,
    fake=native.attention_results,
    flops=_attention_flops,
    check_values=value_checks.attention,
)
reduce: Operator[tuple[Tensor, Tensor, Tensor, Tensor]] = Operator(
    "reduce",
    reference.reduce,
    {Ops.NATIVE: native.reduce},
    check=checks.check_reduce,
    fits=checks.fits_reduce,
    fake=native.reduce_results,
    flops=_reduce_flops,
    whole=("scores", "position", "neighbours"),  # scores may be ranks; the others are cells
    check_values=value_checks.reduce,
)
neighbours: Operator[tuple[Tensor, Tensor]] = Operator(
    "neighbours",
    reference.neighbours,
    {Ops.NATIVE: native.neighbours},
    check=checks.check_neighbours,
    fits=checks.fits_neighbours,
    fake=native.neighbours_results,
    check_values=value_checks.neighbours,
)
