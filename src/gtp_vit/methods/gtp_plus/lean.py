"""GTP+'s merging in few torch operators, for accelerators, where every call is a launch; without gradients.

What merge.py gives, with tokens left in their order: "more important than" is a comparison of all pairs instead of a
sort, and one product gives all similarities. Features stay in the model's dtype until they are weighted, as they do in
a block that is not reduced. Of receivers that are exactly equally similar the first in the sequence is taken, where
merge.py takes the most important one.

Shapes: B batch, N tokens, M image tokens, K kept, P removed, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_vit.kernels.arguments import GTPPlusMergeByProbeInputs, GTPPlusMergeInputs, GTPPlusMergeResult
from gtp_vit.tensors import argsort_descending, gather_rows, sorted_ascending

FAR = 1e30  # more than any cosine; times an importance and the root of a size it is still finite


def directions(image: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of tokens [B, M, C] and their lengths [B, M], in float32."""
    image = image.float() if image.dtype == torch.float64 else image  # half precision is converted on the way
    length = torch.linalg.vector_norm(image, dim=2, dtype=torch.float32).clamp_(min=1e-12)
    return image / length.unsqueeze(2), length


def similarity_to_more_important(unit: Tensor, importance: Tensor, protected: Tensor | None) -> Tensor:
    """Cosines of every token with the more important ones that may receive, [B, M, M]; about -FAR elsewhere.

    Of two equally important tokens the earlier counts as the more important. NaN is similar to no token.
    """
    count = unit.shape[1]
    tie = torch.ones(count, count, device=unit.device).triu_()
    unimportant = torch.heaviside((importance.unsqueeze(2) - importance.unsqueeze(1)).float(), tie)
    near = unimportant.baddbmm_(unit, unit.transpose(1, 2), beta=-FAR).nan_to_num_(nan=-FAR)
    return near if protected is None else near.sub_(protected.unsqueeze(1), alpha=FAR)


def cost_of_merging(near: Tensor, importance: Tensor, mean: Tensor, size: Tensor | None, floor: float) -> Tensor:
    """`merge_cost` up to a factor that is the same for all tokens of an image, from what the function above gives."""
    if size is None:
        nearest = 1 - near.amax(dim=2)
    else:
        small = size.reciprocal()
        apart = (small.unsqueeze(2) + small.unsqueeze(1)).rsqrt_()  # the root of s s' / (s + s')
        nearest = torch.addcmul(apart, near, apart, value=-1).amin(dim=2)
    return torch.add(importance, mean, alpha=floor).mul_(nearest)


def merge(
    inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs,
    x: Tensor,
    unit: Tensor,
    length: Tensor,
    importance: Tensor,
    weight: Tensor | None,
    protected: Tensor | None = None,
) -> GTPPlusMergeResult:
    """Everything but the LayerNorm.

    Args:
        inputs: the operator's.
        x: features with the attention branch, [B, N, C].
        unit: directions of the image tokens, [B, M, C].
        length: their lengths, [B, M].
        importance: [B, M].
        weight: features are averaged by it, [B, M]; None = by size.
        protected: 1 for image tokens that neither leave nor receive, [B, M].
    """
    size, removed = inputs.size, inputs.removed
    count, prefix = importance.shape[1], x.shape[1] - importance.shape[1]
    left = count - removed
    near = similarity_to_more_important(unit, importance, protected)
    if protected is None:
        mean = importance.mean(dim=1, keepdim=True)
    else:
        free = 1 - protected
        mean = (importance * free).sum(dim=1, keepdim=True) / free.sum(dim=1, keepdim=True)
    cost = cost_of_merging(near, importance, mean, size, inputs.importance_floor)
    if protected is not None:
        cost = cost.masked_fill_(protected > 0, torch.inf)
    order = argsort_descending(cost)
    keep, drop = sorted_ascending(order[:, :left]), order[:, left:]
    offered = gather_rows(near, drop).gather(2, keep.unsqueeze(1).expand(-1, removed, -1))
    target = offered.max(dim=2).indices
    # Below, the first K rows are those that stay, and what goes is added to them in place.
    places = torch.cat([keep, drop], dim=1)
    sizes = torch.ones_like(importance) if size is None else size.gather(1, places)
    weights = sizes if weight is None else weight.gather(1, places)
    rows = gather_rows(x[:, prefix:], places) * weights.unsqueeze(2)
    into = target.unsqueeze(2).expand(-1, -1, x.shape[2])
    merged = rows[:, :left].scatter_add_(1, into, rows[:, left:])
    new_size = sizes[:, :left].scatter_add_(1, target, sizes[:, left:])
    if inputs.preserve_norm:  # the direction of the sum is that of the mean
        lengths = length.gather(1, places)
        longest = lengths[:, :left].scatter_reduce_(1, target, lengths[:, left:], "amax")
        factor = longest / torch.linalg.vector_norm(merged, dim=2).clamp_(min=1e-12)
    else:
        total = new_size if weight is None else weights[:, :left].scatter_add_(1, target, weights[:, left:])
        factor = total.reciprocal()
    features = x.new_empty(x.shape[0], prefix + left, x.shape[2])
    features[:, :prefix] = x[:, :prefix]
    torch.mul(merged, factor.unsqueeze(2), out=features[:, prefix:])  # rounded once
    return GTPPlusMergeResult(features, inputs.norm.apply(features), new_size, keep, drop, target)
