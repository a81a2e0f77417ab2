"""Checks of operators' numbers, for calls through torch's dispatcher (torch.ops.gtp_vit.*, compiled programs).

The package never makes numbers on which native code and its twin would differ; another caller may, and is told. Refused
are lists that name a cell twice, sizes that are none, and what is not finite where it has no meaning. NaN among
features, scores, similarities and distances has one. Features whose squares overflow are not looked for.

Compiled programs come through here a dozen times a forward pass, each time from a cold cache. So there is a short test
that good numbers pass, and what finds out more is done only if they do not: of a compiled DeiT-Ti at batch 1, 3 % of
the time with GTP and 1.5 % with GTP+ and ToMe, and less in a batch. Kinds and shapes have been checked before, and
gradients are off.
"""

from __future__ import annotations

import math

from torch import Tensor

from gtp_vit.kernels.arguments import (
    AttentionInputs,
    ClusterInputs,
    ConserveInputs,
    NeighboursInputs,
    ProbeInputs,
    ReduceInputs,
)
from gtp_vit.kernels.checks import refuse

LARGEST = 1e15  # of a size or a weight: its square is still far from overflow
REMEMBERED = 2**20  # entries; longer lists are looked at again each time
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
    return [float(each) for each in numbers.aminmax()]


def attention(inputs: AttentionInputs) -> None:
    """Some key of each image has a size: else there is nothing to attend to."""
    size, scale = inputs.size, inputs.scale
    if not math.isfinite(scale):
        refuse("attention", "scale must be a finite number", scale=scale)
    if size is None or size.is_meta or size.numel() == 0:
        return
    least, most = size.aminmax(dim=1)
    if not (least.amin().item() >= 0 and _within(most, 1e-44, LARGEST)):  # float32 has nothing between that and 0
        wanted = f"sizes must be in 0 ... {LARGEST:g}, and in each image one must be more than 0"
        refuse("attention", wanted, sizes=_extremes(size))


def reduce(inputs: ReduceInputs) -> None:
    """No cell is twice among the tokens or in a list of neighbours: one implementation would count it twice."""
    position, size, neighbours, root = inputs[3:7]
    alpha, epsilon = inputs.alpha, inputs.epsilon
    if not (-LARGEST <= alpha <= LARGEST and math.isfinite(epsilon)):
        refuse("reduce", f"alpha must be at most {LARGEST:g}, and epsilon finite", alpha=alpha, epsilon=epsilon)
    if position.is_meta:
        return
    patches = neighbours.shape[1]
    _check_graph(neighbours, root, patches)
    if not _within(position, 0, patches - 1):
        raise IndexError("gtp_vit.reduce: position has an entry that is no cell of the grid")
    if not (position.diff(dim=1) > 0).all():  # the package has them in order
        _check_once("position", position, patches)
    if size is not None and not _within(size, -LARGEST, LARGEST):
        refuse("reduce", f"sizes must be at most {LARGEST:g}", sizes=_extremes(size))


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
        raise IndexError("gtp_vit.reduce: neighbours has an entry that is no cell of the grid")
    _check_once("neighbours", neighbours, patches)
    if not _within(root, 0, 1):
        refuse("reduce", "root must be in 0 ... 1, degree^-1/2 of each cell", root=_extremes(root))
    if neighbours.numel() <= REMEMBERED:
        _good_graph = neighbours.clone(), root.clone()


def _check_once(name: str, cells: Tensor, patches: int) -> None:
    ordered = cells.sort(dim=-1).values
    later = ordered[..., 1:]
    twice = (later == ordered[..., :-1]) & (later < patches)  # M0 fills short lists
    if twice.any():
        refuse("reduce", f"no cell may be twice in a row of {name}", cell=int(later[twice][0]))


def conserve(inputs: ConserveInputs) -> None:
    """Features are averaged by sizes, which therefore must not be 0."""
    _check_finite("conserve", floor=inputs.floor, epsilon=inputs.epsilon)
    if inputs.size is not None:
        _check_sizes("conserve", inputs.size)


def conserve_by_probe(inputs: ProbeInputs) -> None:
    """As in `conserve`; a token is protected, or it is not."""
    probe, size, protected = inputs[2:5]
    _check_finite("conserve_by_probe", floor=inputs.floor, epsilon=inputs.epsilon)
    if probe.is_meta:
        return
    _check_sizes("conserve_by_probe", size)
    if not _within(probe, -LARGEST, LARGEST):
        refuse("conserve_by_probe", f"the probe must be at most {LARGEST:g}", probe=_extremes(probe))
    if protected is not None and not ((protected == 0) | (protected == 1)).all():
        refuse("conserve_by_probe", "protected must be 0 or 1", protected=_extremes(protected))


def _check_sizes(operator: str, size: Tensor) -> None:
    if not size.is_meta and not _within(size, 1e-30, LARGEST):
        refuse(operator, f"sizes must be in 1e-30 ... {LARGEST:g}", sizes=_extremes(size))


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
