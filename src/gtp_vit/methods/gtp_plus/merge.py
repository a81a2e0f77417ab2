"""GTP+'s arithmetic: merge the tokens that cost least into the most similar more important ones that stay.

Importance is given (`gtp_plus_merge`: attention), or a probe predicts it from the tokens (`gtp_plus_merge_by_probe`).
These are put in the order of their importance, so that "more important than" is "before", and only the half of the
similarities that can matter is computed. Each of the two is an operator with a reference implementation, a native
kernel and a portable form.

Shapes: B batch, N tokens, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels import Checks, Operator, Ops, checks, native, triton_set, value_checks
from gtp_vit.kernels.arguments import GTPPlusMergeByProbeInputs, GTPPlusMergeInputs, GTPPlusMergeResult
from gtp_vit.methods.gtp_plus import lean
from gtp_vit.tensors import at_least_float32, batch_index, full_precision, select_rows, split_by_score, with_prefix_rows


class MergeInputs(NamedTuple):
    """The arguments of merging."""

    x: Tensor  # features with the attention branch, [B, N, C]
    importance: Tensor  # of the image tokens, [B, M]
    size: Tensor | None  # of the image tokens, [B, M]; None = one each
    weight: Tensor | None  # features are averaged by it, [B, M]; None = by size
    protected: Tensor | None  # 1 for image tokens that neither leave nor receive, [B, M]
    removed: int
    importance_floor: float
    preserve_norm: bool


NUM_ROW_BLOCKS = 8  # strips of the lower triangle, which then are 9/16 of the square
# With a probe features are averaged by size times (importance + WEIGHT_FLOOR) to the power WEIGHT_POWER.
WEIGHT_FLOOR, WEIGHT_POWER = 0.1, 0.75


def row_blocks(tokens: int) -> list[tuple[int, int]]:
    """First and last row of each strip.

    >>> row_blocks(20)
    [(0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 18), (18, 20)]
    """
    height = math.ceil(tokens / NUM_ROW_BLOCKS)
    return [(first, min(first + height, tokens)) for first in range(0, tokens, height)]


def num_similarities(tokens: int) -> int:
    """The number of pairs of tokens that are compared."""
    return sum((last - first) * last for first, last in row_blocks(tokens))


def earlier_similarity(unit: Tensor) -> Tensor:
    """Cosines of every token with those before it, [B, M, M]; -2, less than any, elsewhere."""
    count = unit.shape[1]
    rows = [
        F.pad(unit[:, first:last] @ unit[:, :last].transpose(1, 2), (0, count - last))
        for first, last in row_blocks(count)
    ]
    before = torch.ones(count, count, dtype=torch.bool, device=unit.device).tril(-1)
    return torch.cat(rows, dim=1).masked_fill(~before, -2.0)


def relative_importance(importance: Tensor, protected: Tensor | None) -> Tensor:
    """Importance in units of the mean of the tokens that are not protected, [B, M]."""
    if protected is None:
        return importance / importance.mean(dim=1, keepdim=True)
    free = 1 - protected
    total = torch.where(protected > 0, 0.0, importance).sum(dim=1, keepdim=True)
    return importance / (total / free.sum(dim=1, keepdim=True))


def merge_cost(similarity: Tensor, importance: Tensor, size: Tensor, importance_floor: float) -> Tensor:
    """The cost of merging each token into an earlier one, [B, M]; infinite for the first.

    (relative importance + floor) times the least (1 - cosine) sqrt(s s' / (s + s')) over the tokens before it: how much
    it matters, times how far two clusters of these sizes move when they become one (Ward's criterion).
    """
    pair = size.unsqueeze(2) * size.unsqueeze(1) / (size.unsqueeze(2) + size.unsqueeze(1))
    apart = (1 - similarity).clamp(min=0).square() * pair
    compared = (similarity > -1.5) & (apart >= 0)  # False for NaN, which is similar to no token
    nearest = torch.where(compared, apart, torch.inf).amin(dim=2).sqrt()
    return (importance + importance_floor) * nearest


def importance_of_units(unit: Tensor, probe: Tensor, size: Tensor) -> Tensor:
    """Root of size times the squared sensitivity that the probe predicts of unit vectors [B, M, C]: [B, M].

    The probe's output is the logarithm of the latter, up to a number that is the same for all tokens of an image.
    """
    predicted = (unit @ probe.unsqueeze(1)).squeeze(2)  # as a product of matrices, which torch counts
    return (0.5 * (predicted - predicted.mean(dim=1, keepdim=True))).exp() * size.sqrt()


def merge_by_cost(inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
    """Merge the tokens that cost least into their most similar more important ones."""
    total = at_least_float32(inputs.x) + at_least_float32(inputs.branch)
    size = torch.ones_like(inputs.importance) if inputs.size is None else inputs.size
    return _with_layer_norm(inputs, _merge(_merge_inputs(inputs, total, inputs.importance, size)))


def merge_by_cost_with_probe(inputs: GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    """`merge_by_cost` by the importance that a probe predicts, which also weighs the averages."""
    size, protected = inputs.size, inputs.protected
    total = at_least_float32(inputs.x) + at_least_float32(inputs.branch)
    with torch.no_grad(), full_precision(total):
        image = total[:, -size.shape[1] :].float()
        unit = image / image.norm(dim=2, keepdim=True).clamp(min=1e-12)
        importance, weight = importance_and_weight(unit, inputs.probe, size, protected)
    return _with_layer_norm(inputs, _merge(_merge_inputs(inputs, total, importance, size, weight, protected)))


def _merge_inputs(
    inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs,
    total: Tensor,
    importance: Tensor,
    size: Tensor | None,
    weight: Tensor | None = None,
    protected: Tensor | None = None,
) -> MergeInputs:
    settings = (inputs.removed, inputs.importance_floor, inputs.preserve_norm)
    return MergeInputs(total, importance, size, weight, protected, *settings)


def importance_and_weight(unit: Tensor, probe: Tensor, size: Tensor, protected: Tensor | None) -> tuple[Tensor, Tensor]:
    """A probe's prediction for unit vectors [B, M, C], and the weights to average their features with, both [B, M]."""
    importance = importance_of_units(unit, probe, size)
    return importance, size * (relative_importance(importance, protected) + WEIGHT_FLOOR).pow(WEIGHT_POWER)


def _merge(inputs: MergeInputs) -> GTPPlusMergeResult:
    """Everything but the LayerNorm."""
    x, importance, size, weight, protected, removed, floor, keep_norm = inputs
    assert size is not None
    by_size = weight is None
    weight = size if weight is None else weight
    prefix = x.shape[1] - importance.shape[1]
    image = x[:, prefix:]
    with torch.no_grad(), full_precision(image):
        features = image.float()
        length = features.norm(dim=2).clamp(min=1e-12)
        order = importance.sort(dim=1, descending=True, stable=True).indices
        # As the kernel divides: of one channel all cosines are 1 or -1, and rounding alone decides between them.
        similarity = earlier_similarity(select_rows(features * (1 / length.unsqueeze(2)), order))
        ranked = None
        if protected is not None:
            ranked = protected.gather(1, order)
            similarity = similarity.masked_fill(ranked.unsqueeze(1) > 0, -2.0)
        matters = relative_importance(importance.gather(1, order), ranked)
        cost = merge_cost(similarity, matters, size.gather(1, order), floor)
        if ranked is not None:
            cost = cost.masked_fill(ranked > 0, torch.inf)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.zeros_like(order).scatter(1, order, places)
        keep, drop = split_by_score(cost.gather(1, rank), removed)
        stays = torch.zeros_like(cost, dtype=torch.bool).scatter(1, rank.gather(1, keep), True)
        offered = select_rows(similarity, rank.gather(1, drop))
        offered = offered.masked_fill(~stays.unsqueeze(1) | offered.isnan(), -2.0)
        highest, best = offered.amax(dim=2), offered.argmax(dim=2)
        slot = torch.zeros_like(order).scatter(1, keep, places[:, : keep.shape[1]])
        # A token has no receiver only if there is NaN; the first kept token then takes it.
        target = torch.where(highest > -1.5, slot.gather(1, order.gather(1, best)), 0)
        own, incoming = weight.gather(1, keep), weight.gather(1, drop)
        both = own.scatter_add(1, target, incoming)
        share = incoming / both.gather(1, target)
        new_size = both if by_size else size.gather(1, keep).scatter_add(1, target, size.gather(1, drop))
    merged = image.gather(1, keep.unsqueeze(2).expand(-1, -1, x.shape[2])) * (own / both).unsqueeze(2).to(x.dtype)
    moved = image.gather(1, drop.unsqueeze(2).expand(-1, -1, x.shape[2])) * share.unsqueeze(2).to(x.dtype)
    merged = merged.scatter_add(1, target.unsqueeze(2).expand_as(moved), moved)
    if keep_norm:
        longest = length.gather(1, keep).scatter_reduce(1, target, length.gather(1, drop), "amax")
        factor = torch.where(both > own, longest / merged.float().norm(dim=2).clamp(min=1e-12), 1.0)
        merged = merged * factor.unsqueeze(2).to(x.dtype)
    return GTPPlusMergeResult(torch.cat([x[:, :prefix], merged], dim=1), x.new_empty(0), new_size, keep, drop, target)


def _with_layer_norm(
    inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs, merged: GTPPlusMergeResult
) -> GTPPlusMergeResult:
    """The results, features rounded once, with those after the LayerNorm that follows."""
    x = merged.x.to(inputs.x.dtype)
    return merged._replace(x=x, normed=inputs.norm.apply(x))


def merge_by_cost_lean(inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
    """`merge_by_cost` in few operators, for accelerators; without gradients."""
    x = inputs.x + inputs.branch
    with torch.no_grad(), full_precision(x):
        unit, length = lean.directions(x[:, -inputs.importance.shape[1] :])
        return lean.merge(inputs, x, unit, length, inputs.importance, None)


def merge_by_cost_with_probe_lean(inputs: GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    """`merge_by_cost_with_probe`, as `merge_by_cost_lean` is made."""
    x, size, protected = inputs.x + inputs.branch, inputs.size, inputs.protected
    with torch.no_grad(), full_precision(x):
        unit, length = lean.directions(x[:, -size.shape[1] :])
        importance, weight = importance_and_weight(unit, inputs.probe, size, protected)
        return lean.merge(inputs, x, unit, length, importance, weight, protected)


def merge_by_cost_portable(inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
    """`merge_by_cost` in few operators that every engine has and runs fast; without the LayerNorm.

    An engine pays for every pass over an array, so nothing is cut out or put together: prefix tokens are in all the
    arrays, as tokens that no other goes to. Merging is a product with a matrix of zeros and ones. Of equally important
    tokens any may count as the more important.
    """
    with full_precision(inputs.x):
        total = at_least_float32(inputs.x) + at_least_float32(inputs.branch)
        length = total.norm(dim=2).clamp(min=1e-12)
        merge_inputs = _merge_inputs(inputs, total, inputs.importance, inputs.size)
        merged = _merge_portable(merge_inputs, total / length.unsqueeze(2), length)
    return merged._replace(x=merged.x.to(inputs.x.dtype))


def merge_by_cost_with_probe_portable(inputs: GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    """`merge_by_cost_with_probe`, as `merge_by_cost_portable` is made."""
    size, protected = inputs.size, inputs.protected
    with full_precision(inputs.x):
        total = at_least_float32(inputs.x) + at_least_float32(inputs.branch)
        length = total.norm(dim=2).clamp(min=1e-12)
        unit = total / length.unsqueeze(2)
        importance, weight = importance_and_weight(unit[:, -size.shape[1] :], inputs.probe, size, protected)
        merge_inputs = _merge_inputs(inputs, total, importance, size, weight, protected)
        merged = _merge_portable(merge_inputs, unit, length)
    return merged._replace(x=merged.x.to(inputs.x.dtype))


def _merge_portable(inputs: MergeInputs, unit: Tensor, length: Tensor) -> GTPPlusMergeResult:
    """The result of `_merge`, computed from unit vectors and lengths of all tokens."""
    x, importance, size, weight, protected, removed, floor, keep_norm = inputs
    count, prefix = importance.shape[1], x.shape[1] - importance.shape[1]
    left = count - removed
    ranked, order = importance.topk(count, dim=1)
    numbers = batch_index(order)
    unit = select_rows(unit, order + prefix, numbers)
    # cosine - 1 of every token with the more important ones, which are before it; far below that elsewhere
    one = torch.ones(count, count, dtype=x.dtype, device=x.device)
    near = unit @ unit.transpose(1, 2) - (one + 1e4 * one.triu())
    stuck = None if protected is None else protected.gather(1, order)
    if stuck is not None:
        near = near - 1e4 * stuck.unsqueeze(1)
    if size is None:  # all pairs have the same factor, which changes no decision
        apart = -near.amax(dim=2)
    else:  # s s' / (s + s') is 1 / (1 / s + 1 / s')
        smallness = 1 / size.gather(1, order)
        apart = (near * near / (smallness.unsqueeze(2) + smallness.unsqueeze(1))).amin(dim=2).sqrt()
    cost = (relative_importance(ranked, stuck) + floor) * apart
    if stuck is not None:
        cost = cost + 1e4 * stuck
    by_cost = cost.topk(count, dim=1).indices  # one topk, so that no token is in both, whatever is equal
    stay, go = by_cost[:, :left], by_cost[:, left:]
    keep, place = order.gather(1, stay).topk(left, dim=1, largest=False)  # in ascending order
    drop = order.gather(1, go)
    offered = select_rows(near, go, numbers).transpose(1, 2)
    target = select_rows(offered, stay.gather(1, place), numbers).argmax(dim=1)  # of [B, K, P]
    rows = with_prefix_rows(keep, prefix)
    goes = (target.unsqueeze(1) + prefix == torch.arange(prefix + left, device=x.device)[:, None]).to(x.dtype)
    own, incoming, new_size = _merge_weights(size, rows, drop, goes, prefix)
    both = new_size
    if weight is not None:
        own, incoming, both = _merge_weights(weight, rows, drop, goes, prefix)
    merged = select_rows(x, rows, numbers) * (own / both).unsqueeze(2)
    merged = merged + (incoming / both.unsqueeze(2)) @ select_rows(x, drop + prefix, numbers)
    if keep_norm:
        longest = (goes * length.gather(1, drop + prefix).unsqueeze(1)).amax(dim=2)
        longest = torch.maximum(length.gather(1, rows), longest)
        factor = torch.where(both > own, longest / merged.norm(dim=2).clamp(min=1e-12), 1.0)
        merged = merged * factor.unsqueeze(2)
    return GTPPlusMergeResult(merged, x.new_empty(0), new_size[:, prefix:].float(), keep, drop, target)


def _merge_weights(
    weight: Tensor | None, rows: Tensor, drop: Tensor, goes: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the tokens in `rows`, of what each receives [B, c + K, P], and of both together."""
    if weight is None:
        own, incoming = torch.ones((), dtype=goes.dtype, device=goes.device), goes
    else:
        own = F.pad(weight, (prefix, 0), value=1.0).gather(1, rows)
        incoming = goes * weight.gather(1, drop).unsqueeze(1)
    return own, incoming, own + incoming.sum(dim=2)


def _flops(inputs: GTPPlusMergeInputs) -> int:
    """Operations of the reference's strips; the kernel's tiles follow the triangle more closely."""
    return 2 * inputs.x.shape[0] * inputs.x.shape[2] * num_similarities(inputs.importance.shape[1])


gtp_plus_merge = Operator(
    "gtp_plus_merge",
    GTPPlusMergeInputs,
    GTPPlusMergeResult,
    {
        Ops.TORCH: merge_by_cost,
        Ops.NATIVE: native.gtp_plus_merge,
        Ops.PORTABLE: merge_by_cost_portable,
        Ops.TRITON: triton_set.gtp_plus_merge,
        Ops.LEAN: merge_by_cost_lean,
    },
    Checks(
        *(checks.check_gtp_plus_merge, checks.supports_gtp_plus_merge, value_checks.gtp_plus_merge),
        supports_triton=triton_set.takes_tokens,
    ),
    fake=native.gtp_plus_merge_results,
    flops=_flops,
)


def _merge_by_probe_on_gpu(inputs: GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    return triton_set.gtp_plus_merge_by_probe(inputs, WEIGHT_FLOOR, WEIGHT_POWER)


def _flops_by_probe(inputs: GTPPlusMergeByProbeInputs) -> int:
    """The same, and a product of the probe with every image token."""
    count = inputs.size.shape[1]
    return 2 * inputs.x.shape[0] * inputs.x.shape[2] * (num_similarities(count) + count)


gtp_plus_merge_by_probe = Operator(
    "gtp_plus_merge_by_probe",
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeResult,
    {
        Ops.TORCH: merge_by_cost_with_probe,
        Ops.NATIVE: native.gtp_plus_merge_by_probe,
        Ops.PORTABLE: merge_by_cost_with_probe_portable,
        Ops.TRITON: _merge_by_probe_on_gpu,
        Ops.LEAN: merge_by_cost_with_probe_lean,
    },
    Checks(
        checks.check_gtp_plus_merge_by_probe,
        checks.supports_gtp_plus_merge_by_probe,
        value_checks.gtp_plus_merge_by_probe,
        supports_triton=triton_set.takes_tokens,
    ),
    fake=native.gtp_plus_merge_results,
    flops=_flops_by_probe,
)
