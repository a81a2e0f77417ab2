"""Checks of operators' numbers, for other callers of torch.ops.gtp_vit.*.

The package never makes numbers on which native code and its reference differ; other callers may, and get an error.
Refused are lists that name a cell twice, sizes that are none, and what is not finite where it has no meaning. NaN among
features, scores, similarities and distances has one. Features whose squares overflow are not looked for.

Programs that the package compiles or exports call the overload `trusted` of each operator, which does not come here. Of
a compiled DeiT-Ti at batch 1 these checks were 10 % of the time with GTP and 4 % with GTP+ and ToMe on a busy machine.
Kinds and shapes have been checked before, and gradients are off.
"""

from __future__ import annotations

import math

from torch import Tensor

from gtp_vit.kernels.arguments import (
    AttentionInputs,
    ClusterInputs,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPReduceInputs,
    NeighboursInputs,
)
from gtp_vit.kernels.checks import refuse

MAX_EXACT_SIZE = 1e15  # of a size or a weight: its square is still far from overflow
MAX_CACHED_ENTRIES = 2**20  # entries; longer lists are looked at again each time
_good_graph: tuple[Tensor, Tensor] | None = (
    None  # lists and roots that were found good: all layers of a pass share them
)


def _check_finite(operator: str, **settings: float) -> None:
    for name, value in settings.items():
        if not math.isfinite(value):
            refuse(operator, f"{name} must be a finite number", **{name: value})


def _within(numbers: Tensor, low: float, high: float) -> bool:
    """Are all of these in low ... high? NaN is not."""
    if numbers.numel() == 0:
        return True
    least, most = numbers.aminmax()
    return bool(low <= least.item() and most.item() <= high)


def _extremes(numbers: Tensor) -> list[float]:
    """The smallest and the largest, for a message."""
    return [float(bound) for bound in numbers.aminmax()]


def attention(inputs: AttentionInputs) -> None:
    """Some key of each image has a size: else there is nothing to attend to."""
    size, scale = inputs.size, inputs.scale
    if not math.isfinite(scale):
        refuse("attention", "scale must be a finite number", scale=scale)
    if size is None or size.is_meta or size.numel() == 0:
        return
    least, most = size.aminmax(dim=1)
    if not (
        least.amin().item() >= 0 and _within(most, 1e-44, MAX_EXACT_SIZE)
    ):  # float32 has nothing between that and 0
        expected = f"sizes must be in 0 ... {MAX_EXACT_SIZE:g}, and in each image one must be more than 0"
        refuse("attention", expected, sizes=_extremes(size))


def gtp_reduce(inputs: GTPReduceInputs) -> None:
    """No cell is twice among the tokens or in a list of neighbours: one implementation would count it twice."""
    position, size, neighbours, root = inputs[3:7]
    alpha, epsilon = inputs.alpha, inputs.epsilon
    if not (-MAX_EXACT_SIZE <= alpha <= MAX_EXACT_SIZE and math.isfinite(epsilon)):
        refuse(
            "gtp_reduce", f"alpha must be at most {MAX_EXACT_SIZE:g}, and epsilon finite", alpha=alpha, epsilon=epsilon
        )
    if position.is_meta:
        return
    patches = neighbours.shape[1]
    _check_graph(neighbours, root, patches)
    if not _within(position, 0, patches - 1):
        raise IndexError("gtp_vit.gtp_reduce: position has an entry that is not a cell of the grid")
    if not (position.diff(dim=1) > 0).all():  # the package has them in order
        _check_once("position", position, patches)
    if size is not None and not _within(size, -MAX_EXACT_SIZE, MAX_EXACT_SIZE):
        refuse("gtp_reduce", f"sizes must be at most {MAX_EXACT_SIZE:g}", sizes=_extremes(size))


def _check_graph(neighbours: Tensor, root: Tensor, patches: int) -> None:
    global _good_graph
    good = _good_graph
    if (
        good is not None
        and good[0].device == neighbours.device
        and good[1].dtype == root.dtype
        and good[0].equal(neighbours)
        and good[1].equal(root)
    ):
        return
    if not _within(neighbours, 0, patches):
        raise IndexError("gtp_vit.gtp_reduce: neighbours has an entry that is not a cell of the grid")
    _check_once("neighbours", neighbours, patches)
    if not _within(root, 0, 1):
        refuse("gtp_reduce", "root must be in 0 ... 1, degree^-1/2 of each cell", root=_extremes(root))
    if neighbours.numel() <= MAX_CACHED_ENTRIES:
        _good_graph = neighbours.clone(), root.clone()


def _check_once(name: str, cells: Tensor, patches: int) -> None:
    ordered = cells.sort(dim=-1).values
    later = ordered[..., 1:]
    twice = (later == ordered[..., :-1]) & (later < patches)  # M0 fills short lists
    if twice.any():
        refuse("gtp_reduce", f"no cell may be twice in a row of {name}", cell=int(later[twice][0]))


def gtp_plus_merge(inputs: GTPPlusMergeInputs) -> None:
    """Features are averaged by sizes, which therefore must not be 0."""
    _check_finite("gtp_plus_merge", importance_floor=inputs.importance_floor, epsilon=inputs.epsilon)
    if inputs.size is not None:
        _check_sizes("gtp_plus_merge", inputs.size)


def gtp_plus_merge_by_probe(inputs: GTPPlusMergeByProbeInputs) -> None:
    """As in `gtp_plus_merge`; a token is protected, or it is not."""
    probe, size, protected = inputs[2:5]
    _check_finite("gtp_plus_merge_by_probe", importance_floor=inputs.importance_floor, epsilon=inputs.epsilon)
    if probe.is_meta:
        return
    _check_sizes("gtp_plus_merge_by_probe", size)
    if not _within(probe, -MAX_EXACT_SIZE, MAX_EXACT_SIZE):
        refuse("gtp_plus_merge_by_probe", f"the probe must be at most {MAX_EXACT_SIZE:g}", probe=_extremes(probe))
    if protected is not None and not ((protected == 0) | (protected == 1)).all():
        refuse("gtp_plus_merge_by_probe", "protected must be 0 or 1", protected=_extremes(protected))


def _check_sizes(operator: str, size: Tensor) -> None:
    if not size.is_meta and not _within(size, 1e-30, MAX_EXACT_SIZE):
        refuse(operator, f"sizes must be in 1e-30 ... {MAX_EXACT_SIZE:g}", sizes=_extremes(size))


def neighbours(inputs: NeighboursInputs) -> None:
    """NaN is similar to nobody; infinities are no cosines."""
    similarity = inputs.similarity
    if not similarity.is_meta and similarity.isinf().any():
        refuse("neighbours", "similarities must be finite, or NaN", similarity="an infinite one")


def cluster(inputs: ClusterInputs) -> None:
    """Distances are symmetric up to rounding; to a token of NaN they all are NaN."""
    distance = inputs.distance
    if distance.is_meta:
        return
    if distance.isinf().any():
        refuse("cluster", "distances must be finite, or NaN", distance="an infinite one")
    if not distance.isclose(distance.transpose(1, 2), rtol=1e-4, atol=1e-5, equal_nan=True).all():
        refuse("cluster", "distances must be symmetric", distance=distance)
