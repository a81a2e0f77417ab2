"""space: the schedules of a method that keep to a number of MACs and to what deployment asks for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from gtp_vit.core.costs import Costs, bisect
from gtp_vit.core.ranges import Range, check_ranges
from gtp_vit.core.reducer import Method
from gtp_vit.core.schedule import SCHEDULES, quarter_layers, round_schedule
from gtp_vit.errors import GTPError, SettingError

SHAPES = ("constant", "peak", "late", "early")  # hand-made starts, scaled to the cost
# None in the first layer, hardly any in the second, most in the middle, as DiffRate's published schedules have it;
# shares of all removed tokens for 12 layers, stretched to other depths.
DIFFRATE_SHAPE = (0, 0.02, 0.05, 0.09, 0.14, 0.14, 0.14, 0.13, 0.11, 0.09, 0.06, 0.03)


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits that a schedule must respect to be deployed.

    >>> ScheduleLimits(max_layers=3, multiple_of=8)
    ScheduleLimits(max_layers=3, multiple_of=8)
    """

    max_layers: Annotated[int | None, Range(1, 1000)] = None
    """Largest number of layers that remove tokens; by default all, and 3 with --engine, where each costs time of its
    own."""
    multiple_of: Annotated[int | None, Range(1, 1024)] = None
    """Where tokens are removed, the number that stays, prefix tokens included, is a multiple of this, which some
    accelerators need; by default 1, and 8 with --engine."""

    def __post_init__(self) -> None:
        check_ranges(self)


class ScheduleSpace:
    """The schedules of one method that keep to a cost and to the limits."""

    def __init__(self, costs: Costs, method: Method, limits: ScheduleLimits) -> None:
        assert method.schedule_field is not None
        self.costs, self.method, self.limits, self.field = costs, method, limits, method.schedule_field
        self.vit, self.unreduced_macs = costs.vit, costs.unreduced
        self.multiple_of = limits.multiple_of or 1
        # After the last layer image tokens are unused if the head reads prefix tokens only.
        self.layers = range(self.vit.depth - (not self.vit.head_reads_image_tokens))

    @property
    def min_tokens(self) -> int:
        """Image tokens that must stay: what the method needs, or as many as make a multiple of `multiple_of`."""
        step, prefix, least = self.multiple_of, self.vit.prefix, self.method.build(self.vit).min_tokens
        return least if step == 1 else ((prefix + least - 1) // step + 1) * step - prefix

    def cost(self, plan: Sequence[int]) -> int:
        """MACs of a schedule, the method's own and the shortened last block counted."""
        return self.costs.macs_with(self.with_plan(plan))

    def with_plan(self, plan: Sequence[int], method: Method | None = None) -> Method:
        """The settings, or others of the same method, with this schedule."""
        return dataclasses.replace(method or self.method, **{self.field: tuple(plan)})

    def plan_of(self, method: Method) -> list[int]:
        """The schedule of these settings, layer by layer."""
        return list(method.build(self.vit).removals(self.vit.grid))

    def snap(self, plan: Sequence[float]) -> list[int] | None:
        """The nearest schedule that respects the limits and fits the method; None if there is none."""
        used = [layer for layer in self.layers if plan[layer] > 0]
        if self.limits.max_layers is not None:
            used = sorted(sorted(used, key=lambda layer: -plan[layer])[: self.limits.max_layers])
        step, prefix = self.multiple_of, self.vit.prefix
        settled = round_schedule(
            [plan[layer] if layer in used else 0 for layer in range(self.vit.depth)],
            self.vit.image_tokens,
            self.min_tokens,
            lambda left: round((left + prefix) / step) * step - prefix,
        )
        try:
            plan = self.plan_of(self.with_plan(settled))
        except GTPError:
            return None
        return plan if self.respects_limits(plan) else None

    def respects_limits(self, plan: Sequence[int]) -> bool:
        """Does a schedule keep to the limits? The method may have cut it."""
        left, used = self.vit.image_tokens + self.vit.prefix, 0
        for removed in plan:
            left, used = left - removed, used + bool(removed)
            if removed and left % self.multiple_of:
                return False
        return self.limits.max_layers is None or used <= self.limits.max_layers

    def fit(self, shape: Sequence[float], target: float) -> list[int] | None:
        """The most expensive schedule of this shape that costs at most `target`."""
        if sum(shape) <= 0:
            return None

        def settled(scale: float) -> list[int] | None:
            plan = self.snap([scale * share for share in shape])
            return None if plan is None or self.cost(plan) > target else plan

        most = self.vit.image_tokens / max(shape)
        _, scale = bisect(lambda scale: settled(scale) is not None, 0.0, most)
        return settled(scale) if scale < most else None

    def rebalance(self, plan: Sequence[int], layer: int, target: float) -> list[int] | None:
        """Let `layer` remove as few tokens as the cost allows."""
        low, high, best = 0, self.vit.image_tokens - 1, None
        while low <= high:
            middle = (low + high) // 2
            tried = self.snap([*plan[:layer], middle, *plan[layer + 1 :]])
            if tried is None or self.cost(tried) <= target:
                best, high = tried or best, middle - 1
            else:
                low = middle + 1
        return best if best is not None and self.cost(best) <= target else None

    def starting_points(self, target: float) -> Iterator[Method]:
        """The settings' own schedule and hand-made ones, at this cost."""
        tokens, depth = self.vit.image_tokens, self.vit.depth
        shapes: list[Sequence[float]] = [self.plan_of(self.method)]
        shapes += [SCHEDULES[name](depth, tokens, 100) for name in SHAPES]
        three = quarter_layers(depth)
        shapes.append([float(layer in three) for layer in range(depth)])
        shapes.append(np.interp(np.linspace(0, 11, depth), range(12), DIFFRATE_SHAPE).tolist())
        plans = [plan for plan in (self.fit(shape, target) for shape in shapes) if plan is not None]
        if not plans:  # removing as much as possible at once is the cheapest
            last_resort = self.fit([float(layer == 0) for layer in range(depth)], target)
            plans = [] if last_resort is None else [last_resort]
        if not plans:  # the method cuts what a shape asks for, and several layers must remove all they can
            plans = sorted((plan for plan in earliest(self) if self.cost(plan) <= target), key=self.cost)[-1:]
        for plan in plans:
            yield self.with_plan(plan)


def unreachable_error(space: ScheduleSpace, target: float) -> SettingError:
    """The error for a target that cannot be reached, with what can be."""
    whole, least = space.unreduced_macs, min_macs(space)
    return SettingError(
        f"{target / 1e9:.4g} GMACs cannot be reached by {space.method.name} with these limits; it takes "
        f"{least / 1e9:.4g} to {space.cost([0] * space.vit.depth) / 1e9:.4g} on this model: ask for a share of "
        f"{least / whole:.2f} or more"
    )


def earliest(space: ScheduleSpace) -> list[list[int]]:
    """Schedules that remove all they can in the first layers, of one layer, two, and so on, and one of none."""
    tokens, depth = space.vit.image_tokens, space.vit.depth
    schedules = [[0] * depth]
    for used in range(1, depth + 1):
        asked = [tokens if layer < used else 0 for layer in range(depth)]
        plans = [space.snap(asked)]
        with contextlib.suppress(GTPError):  # some methods cut a schedule that asks for too much
            plans.append(space.plan_of(space.with_plan(asked)))
        schedules += [plan for plan in plans if plan is not None and space.respects_limits(plan)]
    return schedules


def min_macs(space: ScheduleSpace) -> int:
    """MACs of the cheapest schedule known: everything as early as the method and the limits allow."""
    return min(map(space.cost, earliest(space)))
