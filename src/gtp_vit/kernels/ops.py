"""The operators as torch sees them: registered once, native where their tensors fit, the twin everywhere else.

Callers say with `native` which they want, as decided by `kernels.choose`; the twin is called directly, so that
exported programs contain nothing but torch's own operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gtp_vit.kernels import conserving, twins
from gtp_vit.kernels import native as natives

_LIBRARY = torch.library.Library("gtp_vit", "DEF")
_ATTENTION = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? size, float scale, int removed, int queries, bool[] asked,"
    " int heads, int first) -> (Tensor, Tensor)"
)
_REDUCE = (
    "reduce(Tensor x, Tensor branch, Tensor scores, Tensor position, Tensor? size, Tensor neighbours, Tensor root,"
    " int removed, float alpha, bool with_size, Tensor? norm_weight, Tensor? norm_bias, float epsilon)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_CONSERVE = (
    "conserve(Tensor x, Tensor branch, Tensor importance, Tensor size, int removed, float floor, bool keep_norm,"
    " Tensor? norm_weight, Tensor? norm_bias, float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_NEIGHBOURS = "neighbours(Tensor similarity, int rows, int columns, int spatial, int semantic) -> (Tensor, Tensor)"


def _register(schema: str, kernel: Any, twin: Any, fake: Any) -> None:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, twin, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"gtp_vit::{name}", fake, lib=_LIBRARY)

    def with_gradients(*arguments: Any) -> Any:
        """Torch's operators differentiate themselves, so the twin runs where a gradient is wanted."""
        wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        if wanted:
            return twin(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.gtp_vit, name).default(*arguments)

    _LIBRARY.impl(name, with_gradients, "Autograd")


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Any,
    scale: float,
    removed: int,
    queries: int,
    asked: Any,
    heads: int,
    first: int,
) -> tuple[Tensor, Tensor]:
    fits = natives.PROBLEM is None and natives.can_attend(q, k, v, removed, queries, asked)
    kernel = natives.attention if fits else twins.attention
    return kernel(q, k, v, size, scale, removed, queries, asked, heads, first)


def _reduce(
    x: Tensor, branch: Tensor, scores: Tensor, position: Tensor, size: Any, neighbours: Tensor, root: Tensor,
    removed: int, alpha: float, with_size: bool, norm_weight: Any, norm_bias: Any, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    fits = natives.PROBLEM is None and natives.can_reduce(
        x, branch, scores, position, size, neighbours, root, removed, norm_weight, norm_bias
    )
    kernel = natives.reduce if fits else twins.reduce
    rest = (removed, alpha, with_size, norm_weight, norm_bias, epsilon)
    return kernel(x, branch, scores, position, size, neighbours, root, *rest)


def _conserve(
    x: Tensor, branch: Tensor, importance: Tensor, size: Tensor, removed: int, floor: float, keep_norm: bool,
    norm_weight: Any, norm_bias: Any, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    fits = natives.PROBLEM is None and natives.can_conserve(
        x, branch, importance, size, removed, norm_weight, norm_bias
    )
    kernel = natives.conserve if fits else conserving.conserve
    return kernel(x, branch, importance, size, removed, floor, keep_norm, norm_weight, norm_bias, epsilon)


def _neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> tuple[Tensor, Tensor]:
    patches = rows * columns
    fits = similarity.is_cpu and similarity.shape[1:] == (patches, patches) and 0 < semantic < patches
    kernel = natives.neighbours if natives.PROBLEM is None and fits else twins.neighbours
    return kernel(similarity, rows, columns, spatial, semantic)


def _fake_attention(
    q: Tensor, k: Tensor, v: Any, size: Any, scale: Any, removed: Any, queries: int, asked: Any, heads: int, first: int
) -> Any:
    batch, num_heads, tokens, depth = k.shape
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    return q.new_empty(batch, queries, num_heads * depth), q.new_empty(sum(asked), *shape, dtype=torch.float32)


def _fake_reduce(
    x: Tensor, branch: Any, scores: Any, position: Tensor, size: Any, neighbours: Any, root: Any, removed: int,
    alpha: Any, with_size: bool, norm_weight: Any, norm_bias: Any, epsilon: Any,
) -> Any:  # fmt: skip
    batch, tokens, channels = x.shape
    left = tokens - removed
    return (
        x.new_empty(batch, left, channels),
        x.new_empty((0,) if norm_weight is None else (batch, left, channels)),
        x.new_empty((batch, left) if with_size else (0,), dtype=torch.float32),
        position.new_empty(batch, position.shape[1] - removed),
    )


def _fake_conserve(
    x: Tensor, branch: Any, importance: Tensor, size: Tensor, removed: int, floor: Any, keep_norm: Any,
    norm_weight: Any, norm_bias: Any, epsilon: Any,
) -> Any:  # fmt: skip
    batch, tokens, channels = x.shape
    left, stay = tokens - removed, importance.shape[1] - removed
    return (
        x.new_empty(batch, left, channels),
        x.new_empty((0,) if norm_weight is None else (batch, left, channels)),
        size.new_empty(batch, stay),
        *(x.new_empty(batch, count, dtype=torch.int64) for count in (stay, removed, removed)),
    )


def _fake_neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> Any:
    batch, patches = similarity.shape[0], rows * columns
    return (
        similarity.new_empty(batch, patches, spatial + semantic, dtype=torch.int64),
        similarity.new_empty(batch, patches, dtype=torch.float32),
    )


_register(_ATTENTION, _attention, twins.attention, _fake_attention)
_register(_REDUCE, _reduce, twins.reduce, _fake_reduce)
_register(_CONSERVE, _conserve, conserving.conserve, _fake_conserve)
_register(_NEIGHBOURS, _neighbours, twins.neighbours, _fake_neighbours)


@register_flop_formula(torch.ops.gtp_vit.attention)
def _attention_flops(
    q: Any, k: Any, v: Any, size: Any, scale: Any, removed: int, queries: int, asked: Any, *_: Any, **__: Any
) -> int:
    batch, heads, tokens, depth = k
    rows = q[2] if removed or asked[0] or asked[1] else queries
    again = int(asked[2] and not (removed or asked[0] or asked[1]))  # the twin computes the class row once more
    return int(2 * batch * heads * depth * tokens * (rows + queries + again))


@register_flop_formula(torch.ops.gtp_vit.reduce)
def _reduce_flops(x: Any, branch: Any, scores: Any, position: Any, size: Any, neighbours: Any, root: Any, removed: int,
                  alpha: Any, with_size: bool, *_: Any, **__: Any) -> int:  # fmt: skip
    """As the twin's dense product; the kernel does only the part of it that the sparse graph needs."""
    return int(2 * x[0] * (x[1] - removed) * removed * (x[2] + int(with_size)))


@register_flop_formula(torch.ops.gtp_vit.conserve)
def _conserve_flops(x: Any, branch: Any, importance: Any, *_: Any, **__: Any) -> int:
    """As the twin's strips; the kernel's tiles follow the triangle more closely."""
    return int(2 * x[0] * x[2] * conserving.similarities(importance[1]))


def _unobserved() -> bool:
    """May a native kernel be called directly? Torch's dispatcher takes as long as a small kernel.

    Not if something wants to see the operator: compile, export, the FLOP counter and other dispatch modes.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def attention(native: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    """twins.attention, by the native kernel if `native`."""
    if not native:
        return twins.attention(*arguments)
    return _attention(*arguments) if _unobserved() else torch.ops.gtp_vit.attention.default(*arguments)


def reduce(native: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """twins.reduce, by the native kernel if `native`."""
    if not native:
        return twins.reduce(*arguments)
    return _reduce(*arguments) if _unobserved() else torch.ops.gtp_vit.reduce.default(*arguments)


def conserve(native: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """conserving.conserve, by the native kernel if `native`."""
    if not native:
        return conserving.conserve(*arguments)
    return _conserve(*arguments) if _unobserved() else torch.ops.gtp_vit.conserve.default(*arguments)


def neighbours(native: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    """twins.neighbours, by the native kernel if `native`."""
    if not native:
        return twins.neighbours(*arguments)
    return _neighbours(*arguments) if _unobserved() else torch.ops.gtp_vit.neighbours.default(*arguments)
