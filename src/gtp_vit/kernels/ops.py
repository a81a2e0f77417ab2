"""The operators as torch sees them: registered once, native where their tensors fit, the twin everywhere else.

Callers say with `native` which they want, as decided by `kernels.choose`; the twin is called directly, so that
exported programs contain nothing but torch's own operators. On every way in, checks.py looks at the arguments first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gtp_vit.kernels import checks, conserving, twins
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


def _register(schema: str, kernel: Any, twin: Any, fake: Any, check: Any) -> None:
    name = schema.split("(", 1)[0]

    def checked_twin(*arguments: Any) -> Any:
        check(*arguments)
        return _by_twin(name, twin, arguments)

    def checked_fake(*arguments: Any) -> Any:
        check(*arguments)
        return _by_twin(name, fake, arguments)

    def with_gradients(*arguments: Any) -> Any:
        """Torch's operators differentiate themselves, so the twin runs where a gradient is wanted."""
        wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        if wanted:
            return checked_twin(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.gtp_vit, name).default(*arguments)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, checked_twin, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"gtp_vit::{name}", checked_fake, lib=_LIBRARY)
    _LIBRARY.impl(name, with_gradients, "Autograd")


def _by_twin(operator: str, twin: Any, arguments: Any) -> Any:
    checks.check_kinds(operator, arguments)
    return twin(*arguments)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, size: Any, scale: float, removed: int, queries: int, asked: Any, heads: int,
    first: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    arguments = (q, k, v, size, scale, removed, queries, asked, heads, first)
    checks.check_attention(*arguments)
    fits = natives.PROBLEM is None and checks.fits_attention(q, k, v, size, queries)
    return natives.attention(*arguments) if fits else _by_twin("attention", twins.attention, arguments)


def _reduce(
    x: Tensor, branch: Tensor, scores: Tensor, position: Tensor, size: Any, neighbours: Tensor, root: Tensor,
    removed: int, alpha: float, with_size: bool, norm_weight: Any, norm_bias: Any, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = (norm_weight, norm_bias)
    tensors = (x, branch, scores, position, size, neighbours, root)
    arguments = (*tensors, removed, alpha, with_size, *norm, epsilon)
    checks.check_reduce(*arguments)
    fits = natives.PROBLEM is None and checks.fits_reduce(*tensors, *norm)
    return natives.reduce(*arguments) if fits else _by_twin("reduce", twins.reduce, arguments)


def _conserve(
    x: Tensor, branch: Tensor, importance: Tensor, size: Tensor, removed: int, floor: float, keep_norm: bool,
    norm_weight: Any, norm_bias: Any, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = (norm_weight, norm_bias)
    arguments = (x, branch, importance, size, removed, floor, keep_norm, *norm, epsilon)
    checks.check_conserve(*arguments)
    fits = natives.PROBLEM is None and checks.fits_conserve(x, branch, importance, size, removed, *norm)
    return natives.conserve(*arguments) if fits else _by_twin("conserve", conserving.conserve, arguments)


def _neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> tuple[Tensor, Tensor]:
    arguments = (similarity, rows, columns, spatial, semantic)
    checks.check_neighbours(*arguments)
    fits = natives.PROBLEM is None and checks.fits_neighbours(similarity)
    return natives.neighbours(*arguments) if fits else _by_twin("neighbours", twins.neighbours, arguments)


def _fake_attention(
    q: Tensor, k: Tensor, v: Any, size: Any, scale: Any, removed: Any, queries: int, asked: Any, heads: int, first: int
) -> Any:
    batch, num_heads, tokens, depth = k.shape
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    return v.new_empty(batch, queries, num_heads * depth), q.new_empty(sum(asked), *shape, dtype=torch.float32)


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


_register(_ATTENTION, _attention, twins.attention, _fake_attention, checks.check_attention)
_register(_REDUCE, _reduce, twins.reduce, _fake_reduce, checks.check_reduce)
_register(_CONSERVE, _conserve, conserving.conserve, _fake_conserve, checks.check_conserve)
_register(_NEIGHBOURS, _neighbours, twins.neighbours, _fake_neighbours, checks.check_neighbours)


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
        checks.check_attention(*arguments)
        return twins.attention(*arguments)
    return _attention(*arguments) if _unobserved() else torch.ops.gtp_vit.attention.default(*arguments)


def reduce(native: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """twins.reduce, by the native kernel if `native`."""
    if not native:
        checks.check_reduce(*arguments)
        return twins.reduce(*arguments)
    return _reduce(*arguments) if _unobserved() else torch.ops.gtp_vit.reduce.default(*arguments)


def conserve(native: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """conserving.conserve, by the native kernel if `native`."""
    if not native:
        checks.check_conserve(*arguments)
        return conserving.conserve(*arguments)
    return _conserve(*arguments) if _unobserved() else torch.ops.gtp_vit.conserve.default(*arguments)


def neighbours(native: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    """twins.neighbours, by the native kernel if `native`."""
    if not native:
        checks.check_neighbours(*arguments)
        return twins.neighbours(*arguments)
    return _neighbours(*arguments) if _unobserved() else torch.ops.gtp_vit.neighbours.default(*arguments)
