"""Small tensor operations used all over the library.

Decisions about tokens are made in float32: half precision would give ties, and edges to the wrong tokens.

Shapes: B batch, N tokens, M scored tokens, K kept, P removed, D anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def counts_launches(tensor: Tensor) -> bool:
    """Is it on a device where each call of an operator costs a launch, however small? Not where a program is exported.

    Other accelerators run the same operators as a CPU: MPS lacks some of those that save launches.
    """
    return (tensor.is_cuda or tensor.is_xpu) and not is_exporting()


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """A context that switches autocast off on the tensor's device."""
    device = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(device):  # a device without data has no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision converted to float32, in which the native kernels compute; other dtypes unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_wrapped(tensor: Tensor) -> bool:
    """Is it of a class of another library, around plain tensors, such as a weight quantised by torchao?

    Products with it work. It may not have slices and views, or not under torch.inference_mode.
    """
    return hasattr(type(tensor), "__tensor_flatten__")


def is_quantized(weight: Tensor) -> bool:
    """Does a quantising library such as torchao hold its numbers, in a class that can give them back?"""
    return is_wrapped(weight) and type(weight).dequantize is not Tensor.dequantize


def dequantized(weight: Tensor) -> Tensor:
    """The numbers of a weight, quantised or not."""
    return weight.dequantize() if is_quantized(weight) else weight


def rescale(vectors: Tensor, like: Tensor | None = None) -> Tensor:
    """Vectors [..., C], each times the power of two that brings the largest entry of `like` (itself) between 0.5 and 1.

    A norm of entries like 1e30 or 1e-30 would overflow, or vanish. A power of two rounds nothing, so directions of
    ordinary vectors keep every bit. What is zero or not finite stays so.
    """
    if not vectors.shape[-1]:
        return vectors
    largest = (vectors if like is None else like).abs().amax(dim=-1, keepdim=True)
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 0.5)).exponent
    half = exponent // 2  # in two steps: one factor alone may be too large itself
    return torch.ldexp(torch.ldexp(vectors, -half), half - exponent)


def is_exporting() -> bool:
    """Is torch.export or torch.jit.trace recording a program? It should contain operators that every engine has."""
    if torch._C._get_tracing_state() is not None:
        return True
    exporting = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7
    if exporting is not None:
        return bool(exporting())
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def argsort_descending(scores: Tensor) -> Tensor:
    """Places of the scores [B, M] from the largest to the smallest; of equal ones the earlier comes first."""
    if not is_exporting():
        return scores.sort(dim=-1, descending=True, stable=True).indices
    # Engines have no stable sort, and which of equal values a topk takes is undefined: so it gets ranks, all different.
    before = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool, device=scores.device).tril(-1)
    own, others = scores.unsqueeze(-1), scores.unsqueeze(-2)
    rank = ((others > own) | ((others == own) & before)).sum(dim=-1)
    return rank.topk(rank.shape[-1], dim=-1, largest=False).indices


def argsort_ascending(scores: Tensor) -> Tensor:
    """Places of the scores [B, M] from the smallest to the largest; of equal ones the earlier comes first."""
    return argsort_descending(-scores) if is_exporting() else scores.sort(dim=-1, stable=True).indices


def sorted_ascending(numbers: Tensor) -> Tensor:
    """Numbers [B, K], none of them twice, in ascending order."""
    if is_exporting() or counts_launches(numbers):  # engines have no sort, and on a GPU a topk is one launch less
        return numbers.topk(numbers.shape[-1], dim=-1, largest=False).values
    return numbers.sort(dim=-1).values


def with_prefix_rows(index: Tensor, prefix: int) -> Tensor:
    """Rows of the prefix tokens and of the image tokens at `index` [B, K] in the whole sequence, [B, prefix + K]."""
    rows = F.pad(index + prefix, (prefix, 0))
    if prefix > 1:
        rows[:, :prefix] = torch.arange(prefix, device=index.device)
    return rows


def select_rows(x: Tensor, index: Tensor, numbers: Tensor | None = None) -> Tensor:
    """x[b, index[b]] for x [B, N, D] and index [B, K]; `numbers` = those of the batch, if they are known.

    One index_select on the flattened batch is twice as fast as a gather on a CPU, and four launches elsewhere.
    """
    if counts_launches(x):
        return gather_rows(x, index)
    batch, length = x.shape[:2]
    if not is_exporting() and batch == 1:  # no number to add: at batch 1 half of the time went into that
        return x.squeeze(0).index_select(0, index.squeeze(0)).unsqueeze(0)
    numbers = batch_index(index) if numbers is None else numbers
    rows = x.reshape(batch * length, *x.shape[2:]).index_select(0, (index + length * numbers).flatten())
    return rows.unflatten(0, (batch, index.shape[1]))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The same in one call, a gather."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def batch_index(index: Tensor) -> Tensor:
    """0, 1, 2, ... down the batch of `index` [B, K], as [B, 1]."""
    if not is_exporting():
        return torch.arange(index.shape[0], device=index.device).unsqueeze(1)
    # An arange as long as the batch has a shape that an engine finds out again in every pass, with all that depends
    # on it; a cumulative sum has not.
    return (index[:, :1] * 0 + 1).cumsum(dim=0) - 1


def split_by_score(scores: Tensor, removed: int) -> tuple[Tensor, Tensor]:
    """Indices of the tokens that stay, those with the largest scores, and of the `removed` ones; scores [B, M].

    Returns the indices of both, [B, K] and [B, P], each in ascending order. Of equal scores the earlier token stays,
    whatever the batch: a stable sort depends on nothing but the row. NaN counts as large.
    """
    order = argsort_descending(scores)
    left = scores.shape[-1] - removed
    return sorted_ascending(order[:, :left]), sorted_ascending(order[:, left:])


def weighted_merge(
    values: Tensor,
    prefix: int,
    keep: Tensor,
    drop: Tensor,
    weights: Tensor,
    retain: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Each kept token becomes retain * itself + alpha * weights @ the tokens that go. -> [B, c + K, D].

    c prefix tokens, M image tokens.

    Args:
        values: features or sizes of all tokens, [B, c + M, D].
        prefix: number of tokens at the start that stay as they are.
        keep: image tokens that stay, [B, K].
        drop: image tokens that go, [B, P].
        weights: what each kept token takes of each of them, [B, K, P].
        retain: what each kept token keeps of itself, [B, K]; None = all.
        alpha: factor of what is taken.
    """
    if counts_launches(values):
        return _weighted_merge_lean(values, prefix, keep, drop, weights, retain, alpha)
    # Rows of zeros for the prefix tokens are cheaper than cutting the sequence in two and joining it again.
    weights = F.pad(weights, (0, 0, prefix, 0))
    own = select_rows(values, with_prefix_rows(keep, prefix))
    if retain is not None:
        own = own * F.pad(retain, (prefix, 0), value=1.0).unsqueeze(-1).to(own.dtype)
    taken = select_rows(values, drop + prefix)
    with full_precision(own):
        return torch.baddbmm(own, weights.to(own.dtype), taken.to(own.dtype), alpha=alpha)


def _weighted_merge_lean(
    values: Tensor, prefix: int, keep: Tensor, drop: Tensor, weights: Tensor, retain: Tensor | None, alpha: float
) -> Tensor:
    """`weighted_merge` in few calls, for devices where each is a launch: the prefix tokens are cut off and put back."""
    image = values[:, prefix:]
    own, taken = gather_rows(image, keep), gather_rows(image, drop)
    if retain is not None:
        own = own * retain.unsqueeze(-1).to(own.dtype)
    with full_precision(own):
        merged = own.baddbmm_(weights.to(own.dtype), taken, alpha=alpha)  # in place: `own` is in no other's hands
    return torch.cat([values[:, :prefix], merged], dim=1) if prefix else merged
