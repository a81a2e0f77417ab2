"""Searches for each kind of target: one at a fraction of the MACs, or several at fractions that close in on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_vit.core.costs import bisect
from gtp_vit.core.reducer import Method
from gtp_vit.errors import SettingError
from gtp_vit.metrics.base import Measure
from gtp_vit.recipes.provenance import SpeedUp
from gtp_vit.tuning.local_search import Budget, DamageEvaluator, SearchResult, search
from gtp_vit.tuning.settings import Progress, SearchConfig, Target
from gtp_vit.tuning.space import ScheduleSpace, min_macs
from gtp_vit.tuning.speed_meter import SpeedMeter


@dataclass(frozen=True)
class SearchTask:
    """The inputs of every search for one target."""

    target: Target
    measure: Measure
    space: ScheduleSpace
    evaluator: DamageEvaluator
    speed_meter: SpeedMeter
    num_search_images: int  # number of images for the search, the first of the evaluator's
    config: SearchConfig
    timing_batch: int
    progress: Callable[[Progress], None] | None

    @property
    def timing_images(self) -> Tensor:
        return self.evaluator.images[: self.timing_batch]

    def search(self, fraction: float, passes: float, done: float = 0.0, start: Sequence[Method] = ()) -> SearchResult:
        """Search at a share of the MACs.

        Args:
            fraction: of the unreduced model's MACs.
            passes: how many of all passes over the images this search has.
            done: the share of all that others had before.
            start: where to begin as well.
        """
        space, config = self.space, self.config

        def report(spent: float, best: SearchResult) -> None:
            if self.progress is not None:
                cost = space.cost(space.plan_of(best.method)) / space.unreduced_macs
                title = self.measure.metric(self.measure.damage).title
                self.progress(
                    Progress(done + spent * passes / config.passes, best.method, best.damage.mean, title, cost)
                )

        budget = Budget(self.num_search_images, passes, 60 * config.minutes * passes / config.passes, config.seed)
        return search(self.evaluator, space, fraction * space.unreduced_macs, budget, report=report, start=start)

    def rescaled(self, best: SearchResult, fraction: float) -> list[Method]:
        """The shape of the best settings, at a different cost."""
        plan = self.space.fit(self.space.plan_of(best.method), fraction * self.space.unreduced_macs)
        return [] if plan is None else [self.space.with_plan(plan, best.method)]

    def speedup(self, method: Method) -> float:
        return self.evaluator.speedup_of(
            method, lambda: self.speed_meter.measure_speed(method, self.timing_images, 15).speedup
        )


def reach_target(task: SearchTask) -> tuple[SearchResult, SpeedUp | None]:
    """The best settings that meet the target, and how fast they are if the target is a speed-up."""
    if task.target.name == "macs":
        return task.search(task.target.value, task.config.passes), None
    if task.target.name == "speedup":
        return _reach_speedup(task)
    return _reach_damage(task), None


def _reach_damage(task: SearchTask) -> SearchResult:
    """The cheapest settings with at most this damage: halve the range of costs, each time with a short search."""
    space, measure, target = task.space, task.measure, task.target
    bound = target.bound(measure)
    low, high, good, steps = min_macs(space) / space.unreduced_macs, 1.0, None, 6
    last: SearchResult | None = None
    for step in range(steps):
        middle = (low + high) / 2
        start = [] if last is None else task.rescaled(last, middle)
        last = task.search(middle, task.config.passes / steps, step / steps, start)
        if bound.is_met(target.value, last.damage.figures()):
            good, high = last, middle
        else:
            low = middle
        if last.interrupted:
            return dataclasses.replace(good or last, interrupted=True)
    if good is None:
        assert last is not None
        reached = ", ".join(f"{measure.metric(key).title} {number:g}" for key, number in last.damage.summary().items())
        raise SettingError(
            f"{target.name} {target.value:g} was not met by any settings that save something: at a share of {low:.3f} "
            f"of the MACs there is {reached}; ask for less, or for macs"
        )
    return good


def _reach_speedup(task: SearchTask) -> tuple[SearchResult, SpeedUp]:
    """Find the cost at which the starting shape is that fast, tune there, and correct it by the measured speed-up."""
    value, passes = task.target.value, task.config.passes
    share = _fraction_for_speedup(task, value)
    best = task.search(share, 0.7 * passes)
    for attempt in range(4):
        if best.interrupted:
            break
        reached = task.speedup(best.method)
        if reached >= value:
            break
        share *= max(min(reached / value, 0.99), 0.8)
        best = task.search(share, 0.1 * passes, 0.7 + 0.1 * min(attempt, 2), task.rescaled(best, share))
    timing = task.speed_meter.measure_speed(best.method, task.timing_images, 31)
    if timing.speedup < value * 0.97 and not best.interrupted:
        raise SettingError(
            f"a speed-up of {value:g} was not reached: the best schedule at {share:.3f} of the MACs measures "
            f"{timing.speedup:.2f} at batch {len(task.timing_images)}; ask for less, or for macs"
        )
    first, third = timing.speedup_quartiles
    return best, SpeedUp(
        median=round(timing.speedup, 3),
        quartiles=(round(first, 3), round(third, 3)),
        batch=len(task.timing_images),
        threads=torch.get_num_threads(),
        engine=task.speed_meter.engine,
        precision=task.speed_meter.precision,
    )


def _fraction_for_speedup(task: SearchTask, value: float) -> float:
    """The share of the MACs at which the starting shape is so fast."""
    space, speeds = task.space, [1.0]
    shape = space.plan_of(space.method)

    def fast_enough(fraction: float) -> bool:
        plan = space.fit(shape, fraction * space.unreduced_macs)
        if plan is None:  # this shape cannot be that cheap
            return True
        speeds.append(task.speedup(space.with_plan(plan)))
        return speeds[-1] >= value

    dearest, _ = bisect(lambda fraction: not fast_enough(fraction), min_macs(space) / space.unreduced_macs, 1.0, 6)
    if max(speeds) < value:
        raise SettingError(
            f"a speed-up of {value:g} was not reached here; the most was {max(speeds):.2f}, ask for less"
        )
    return dearest
