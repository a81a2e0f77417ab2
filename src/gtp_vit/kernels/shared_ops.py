"""The operator that all methods share: attention with its statistics. A method's own operators are in its file."""

from __future__ import annotations

from torch import Tensor

from gtp_vit.kernels import checks, native, reference
from gtp_vit.kernels.dispatch import Operator, Ops

Shape = tuple[int, ...]


def _attention_flops(q: Shape, k: Shape, removed: int, queries: int, asked: list[bool]) -> int:
    batch, heads, tokens, depth = k
    whole_map = removed or asked[0] or asked[1]
    again = int(asked[2] and not whole_map)  # the twin computes the class row once more
    return 2 * batch * heads * depth * tokens * ((q[2] if whole_map else queries) + queries + again)


attention: Operator[tuple[Tensor, Tensor]] = Operator(
    "attention",
    reference.attention,
    {Ops.NATIVE: native.attention},
    check=checks.check_attention,
    fits=checks.fits_attention,
    fake=native.attention_results,
    flops=_attention_flops,
    check_values=checks.check_values_attention,
)
