"""Do the operators on a device take the same tokens as the reference, and are their bits the same in every run?

Fixed seeds, values that tie, zeros, NaN and a layer that all tokens but one leave, in three dtypes. Where Triton
kernels can run they are compared with the reference operators on the same device; these with themselves on a CPU.

Shapes: B batch, N tokens, M image tokens, C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gtp_vit import kernels
from gtp_vit.core.merging import average, match
from gtp_vit.core.tokens import Tokens
from gtp_vit.kernels import Ops, triton_set
from gtp_vit.kernels.arguments import (
    AttentionInputs,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPReduceInputs,
    NeighboursInputs,
    NormParams,
)
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge, gtp_plus_merge_by_probe

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIFFERENT = 0.005  # share of tokens, where products are in half precision or of another library
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # of features of a few units
RUNS = 10
PREFIX = 2
EXACT = ("ties", "zeros")  # cosines and sums of these are exact in every precision


class Sizes(NamedTuple):
    """Sizes of the operands."""

    side: int = 14  # of the patch grid
    channels: int = 384
    removed: int = 13


OF_DEIT_S = Sizes()


@dataclass(frozen=True)
class Equality:
    """One operator, compared in one case and dtype."""

    operator: str
    dtype: str
    case: str
    against: str  # what it was compared with
    different_tokens: float  # share of the integers it returns
    largest_error: float  # of features and statistics, in images whose tokens are the same
    same_bits: bool  # in all runs
    passed: bool


Operands = tuple[object, ...]
Run = Callable[[Ops, Operands], tuple[Tensor, ...]]


def compare_operators(
    device: torch.device,
    *,
    sizes: Sizes = OF_DEIT_S,
    runs: int = RUNS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Equality]:
    """All operators in all cases and dtypes on this device; Triton kernels where they can run, else the reference."""
    with torch.no_grad():
        todo = [(*case, dtype) for case in _cases(sizes) for dtype in DTYPES]
        rows = []
        for number, (operator, case, run, operands, dtype) in enumerate(todo):
            here = _to(operands, device, dtype)
            reference = run(Ops.TORCH, here)
            exact = case in EXACT
            if triton_set.why_not(device, dtype) is None:
                outputs = [run(Ops.TRITON, here) for _ in range(runs)]
                strict = exact or dtype == torch.float32
                rows.append(_compare(operator, dtype, case, "reference on this device", outputs, reference, strict))
            outputs = [reference]
            on_cpu = run(Ops.TORCH, _to(operands, torch.device("cpu"), dtype))
            rows.append(_compare(f"{operator}, reference", dtype, case, "reference on a CPU", outputs, on_cpu, exact))
            if progress is not None:
                progress(number + 1, len(todo))
    return rows


def _compare(
    operator: str,
    dtype: torch.dtype,
    case: str,
    against: str,
    outputs: list[tuple[Tensor, ...]],
    reference: tuple[Tensor, ...],
    strict: bool,
) -> Equality:
    """`strict`: no token may differ."""
    first = [tensor.cpu() for tensor in outputs[0]]
    expected = [tensor.cpu() for tensor in reference]
    choices = [place for place, tensor in enumerate(expected) if tensor.dtype == torch.int64]
    batch = first[choices[0]].shape[0] if choices else 0
    equal = torch.ones(batch, dtype=torch.bool)
    changed = total = 0
    for place in choices:
        other = first[place] != expected[place]
        equal &= ~other.flatten(1).any(dim=1)
        changed, total = changed + int(other.sum()), total + other.numel()
    error = 0.0
    for place, (own, theirs) in enumerate(zip(first, expected, strict=True)):
        if place in choices or not own.numel():
            continue
        if choices:
            own, theirs = own[equal], theirs[equal]
        apart = (own.float() - theirs.float()).abs().nan_to_num(0.0, posinf=float("inf"))
        if not torch.equal(own.isnan(), theirs.isnan()):
            apart = torch.full((1,), float("inf"))
        error = max(error, float(apart.max())) if apart.numel() else error
    same_bits = all(
        torch.equal(own.nan_to_num(7.0), again.nan_to_num(7.0))
        for output in outputs[1:]
        for own, again in zip(outputs[0], output, strict=True)
    )
    share = changed / total if total else 0.0
    passed = share <= (0.0 if strict else MAX_DIFFERENT) and error <= TOLERANCE[dtype] and same_bits
    return Equality(operator, str(dtype).removeprefix("torch."), case, against, share, error, same_bits, passed)


def _to(operands: Operands, device: torch.device, dtype: torch.dtype) -> Operands:
    """Features in this dtype; what decides about them stays in float32. Features are the tensors of three and four
    dimensions, and the norm's."""

    def move(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        features = value.is_floating_point() and (value.dim() > 2 or getattr(value, "is_norm", False))
        return value.to(device, dtype if features else None)

    return tuple(map(move, operands))


def _cases(sizes: Sizes) -> Iterator[tuple[str, str, Run, Operands]]:
    """operator, case, how it is run, operands."""
    for case in ("random", "ties", "zeros", "NaN", "all but one"):
        yield "gtp_plus_merge", case, _gtp_plus, _merge_operands(case, sizes)
    for case in ("random", "all but one"):
        yield "gtp_plus_merge_by_probe", case, _gtp_plus_by_probe, _probe_operands(case, sizes)
    for case in ("random", "ties", "NaN", "all but one"):
        yield "gtp_reduce", case, _gtp, _reduce_operands(case, sizes)
    yield "attention statistics", "random", _statistics, _attention_operands(sizes)
    for case in ("random", "ties"):
        yield "tome", case, _tome, _tome_operands(case, sizes)


def _tokens(case: str, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features and attention branch [B, N, C]: tokens of some kinds, as in images; of exact ones where values tie."""
    count, channels = sizes.side**2 + PREFIX, sizes.channels
    kinds = torch.randn(24, channels, generator=generator)
    exact = case in EXACT
    if exact:  # 16 entries of 1 or -1: length 4, so that unit vectors, cosines and their sums have no rounding
        places = torch.rand(24, channels, generator=generator).argsort(dim=1) < 16
        kinds = torch.where(places, kinds.sign(), 0.0)
    x = kinds[torch.randint(0, 24, (2, count), generator=generator)]
    noise, branch = torch.randn(2, 2, count, channels, generator=generator).unbind(0)
    x, branch = (x, torch.zeros_like(x)) if exact else (x + 0.5 * noise, 0.2 * branch)
    if case == "zeros":
        x[:, 5:9] = 0
    if case == "NaN":
        x[0, 7] = torch.nan
    return x, branch


def _norm(channels: int, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    weight = torch.rand(channels, generator=generator) + 0.5
    bias = torch.randn(channels, generator=generator)
    weight.is_norm = bias.is_norm = True  # type: ignore[attr-defined]
    return weight, bias, 1e-6


def _merge_operands(case: str, sizes: Sizes) -> Operands:
    generator = torch.Generator().manual_seed(0)
    x, branch = _tokens(case, sizes, generator)
    count = sizes.side**2
    importance = torch.rand(2, count, generator=generator).softmax(dim=1)
    if case == "zeros":
        importance[:, ::2], importance[:, 1::4] = 0.0, -0.0
    size = torch.randint(1, 5, (2, count), generator=generator).float()
    removed = count - 1 if case == "all but one" else sizes.removed
    return (x, branch, importance, size, removed, 0.5, True, *_norm(sizes.channels, generator))


def _probe_operands(case: str, sizes: Sizes) -> Operands:
    generator = torch.Generator().manual_seed(1)
    x, branch = _tokens(case, sizes, generator)
    count = sizes.side**2
    protected = torch.zeros(2, count)
    protected[:, [0, count // 2]] = 1
    removed = count - 3 if case == "all but one" else sizes.removed
    probe = 3 * torch.randn(sizes.channels, generator=generator)
    size = torch.randint(1, 5, (2, count), generator=generator).float()
    return (x, branch, probe, size, protected, removed, 0.5, True, *_norm(sizes.channels, generator))


def _reduce_operands(case: str, sizes: Sizes) -> Operands:
    generator = torch.Generator().manual_seed(2)
    x, branch = _tokens(case, sizes, generator)
    count = sizes.side**2
    similarity = torch.rand(2, count, count, generator=generator)
    semantic = min(8, count - 1)
    lists, root = operators.neighbours(Ops.TORCH, NeighboursInputs(similarity, sizes.side, sizes.side, 8, semantic))
    scores = torch.rand(2, count, generator=generator)
    if case == "ties":
        scores = (4 * scores).round()
    size = torch.randint(1, 5, (2, count + PREFIX), generator=generator).float()
    removed = count - 1 if case == "all but one" else sizes.removed
    cells = torch.arange(count).repeat(2, 1)
    return (x, branch, scores, cells, size, lists, root, removed, 0.2, True, *_norm(sizes.channels, generator))


def _attention_operands(sizes: Sizes) -> Operands:
    generator = torch.Generator().manual_seed(3)
    count, heads = sizes.side**2 + PREFIX, max(1, sizes.channels // 64)
    q, k, v = torch.randn(3, 2, heads, count, min(64, sizes.channels), generator=generator).unbind(0)
    size = torch.randint(1, 5, (2, count), generator=generator).float()
    return q, k, v, size, 0.125, 0, count, [True, True, True], 2, PREFIX


def _tome_operands(case: str, sizes: Sizes) -> Operands:
    generator = torch.Generator().manual_seed(4)
    x, branch = _tokens(case, sizes, generator)
    count, heads = sizes.side**2, max(1, sizes.channels // 64)
    keys = _tokens(case, sizes._replace(channels=min(64, sizes.channels)), generator)[0][:, PREFIX:]
    size = torch.randint(1, 5, (2, count), generator=generator).float()
    return (x, branch, size, keys[:, None].expand(-1, heads, -1, -1), sizes.removed, *_norm(sizes.channels, generator))


def _gtp_plus(ops: Ops, operands: Operands) -> tuple[Tensor, ...]:
    return gtp_plus_merge(ops, GTPPlusMergeInputs(*operands))  # type: ignore[arg-type]


def _gtp_plus_by_probe(ops: Ops, operands: Operands) -> tuple[Tensor, ...]:
    return gtp_plus_merge_by_probe(ops, GTPPlusMergeByProbeInputs(*operands))  # type: ignore[arg-type]


def _gtp(ops: Ops, operands: Operands) -> tuple[Tensor, ...]:
    return operators.gtp_reduce(ops, GTPReduceInputs(*operands))  # type: ignore[arg-type]


def _statistics(ops: Ops, operands: Operands) -> tuple[Tensor, ...]:
    return kernels.attention(ops, AttentionInputs(*operands))  # type: ignore[arg-type]


def _tome(ops: Ops, operands: Operands) -> tuple[Tensor, ...]:
    x, branch, size, keys, removed, *norm = operands
    assert isinstance(x, Tensor)
    assert isinstance(branch, Tensor)
    assert isinstance(keys, Tensor)
    assert isinstance(size, Tensor)
    assert isinstance(removed, int)
    following = NormParams(*norm)  # type: ignore[arg-type]
    if ops is Ops.TRITON:
        return triton_set.merge_similar((x, branch, size), keys, removed, True, following)
    pairs = match(keys.float().mean(dim=1), PREFIX, removed, True)
    weights, retain, new_size = average(pairs, size)
    cell = torch.zeros(size.shape, dtype=torch.int64, device=x.device)
    tokens = Tokens(x.float() + branch.float(), cell, PREFIX, (1, size.shape[1]))
    merged = tokens.merge(pairs.keep, pairs.drop, weights, new_size, retain).x.to(x.dtype)
    return merged, following.apply(merged), new_size, *pairs


def worst_of(rows: list[Equality]) -> list[Equality]:
    """One row for each operator, dtype and comparison: the worst of its cases."""
    table: dict[tuple[str, str, str], Equality] = {}
    for row in rows:
        key = (row.operator, row.dtype, row.against)
        old = table.get(key)
        if old is None:
            table[key] = dataclasses.replace(row, case="all")
            continue
        table[key] = dataclasses.replace(
            old,
            different_tokens=max(old.different_tokens, row.different_tokens),
            largest_error=max(old.largest_error, row.largest_error),
            same_bits=old.same_bits and row.same_bits,
            passed=old.passed and row.passed,
        )
    return list(table.values())
