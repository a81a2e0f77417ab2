"""How each kind of target is met: by one search at a share of the MACs, or by several at shares that close in on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_vit.core.reducer import Method
from gtp_vit.errors import BadSetting
from gtp_vit.metrics.base import Measure
from gtp_vit.recipes.provenance import SpeedUp
from gtp_vit.tuning.local_search import Best, Budget, Ruler, search
from gtp_vit.tuning.settings import Progress, SearchConfig, Target
from gtp_vit.tuning.space import Space, cheapest
from gtp_vit.tuning.speed_meter import Clock


@dataclass(frozen=True)
class Task:
    """What every search for one target needs."""

    target: Target
    measure: Measure
    space: Space
    ruler: Ruler
    clock: Clock
    searched: int  # images of the search, the first of the ruler's
    config: SearchConfig
    timing_batch: int
    progress: Callable[[Progress], None] | None

    @property
    def timing_images(self) -> Tensor:
        return self.ruler.images[: self.timing_batch]

    def search(self, share: float, passes: float, done: float = 0.0, start: Sequence[Method] = ()) -> Best:
        """Search at a share of the MACs.

        Args:
            share: of the unreduced model's MACs.
            passes: how many of all passes over the images this search has.
            done: the share of all that others had before.
            start: where to begin as well.
        """
        space, config = self.space, self.config

        def report(spent: float, best: Best) -> None:
            if self.progress is not None:
                cost = space.cost(space.plan_of(best.method)) / space.whole
                title = self.measure.figure(self.measure.damage).title
                self.progress(
                    Progress(done + spent * passes / config.passes, best.method, best.damage.mean, title, cost)
                )

        budget = Budget(self.searched, passes, 60 * config.minutes * passes / config.passes, config.seed)
        return search(self.ruler, space, share * space.whole, budget, report=report, start=start)

    def moved(self, best: Best, share: float) -> list[Method]:
        """The shape of the best settings, at a different cost."""
        plan = self.space.fit(self.space.plan_of(best.method), share * self.space.whole)
        return [] if plan is None else [self.space.with_plan(plan, best.method)]

    def speedup(self, method: Method) -> float:
        return self.ruler.timed(method, lambda: self.clock.time(method, self.timing_images, 15).speedup)


def meet(task: Task) -> tuple[Best, SpeedUp | None]:
    """The best settings that meet the target, and how fast they are if the target is a speed-up."""
    if task.target.name == "macs":
        return task.search(task.target.value, task.config.passes), None
    if task.target.name == "speedup":
        return _at_speedup(task)
    return _at_damage(task), None


def _at_damage(task: Task) -> Best:
    """The cheapest settings with at most this damage: halve the range of costs, each time with a short search."""
    space, measure, target = task.space, task.measure, task.target
    bound = target.bound(measure)
    low, high, good, steps = cheapest(space) / space.whole, 1.0, None, 6
    last: Best | None = None
    for step in range(steps):
        middle = (low + high) / 2
        start = [] if last is None else task.moved(last, middle)
        last = task.search(middle, task.config.passes / steps, step / steps, start)
        if bound.is_met(target.value, last.damage.figures()):
            good, high = last, middle
        else:
            low = middle
        if last.interrupted:
            return dataclasses.replace(good or last, interrupted=True)
    if good is None:
        assert last is not None
        reached = ", ".join(f"{measure.figure(key).title} {number:g}" for key, number in last.damage.summary().items())
        raise BadSetting(
            f"{target.name} {target.value:g} was not met by any settings that save something: at a share of {low:.3f} "
            f"of the MACs there is {reached}; ask for less, or for macs"
        )
    return good


def _at_speedup(task: Task) -> tuple[Best, SpeedUp]:
    """Find the cost at which the starting shape is that fast, tune there, and correct it by the measured speed-up."""
    value, passes = task.target.value, task.config.passes
    share = _share_for_speedup(task, value)
    best = task.search(share, 0.7 * passes)
    for attempt in range(4):
        if best.interrupted:
            break
        reached = task.speedup(best.method)
        if reached >= value:
            break
        share *= max(min(reached / value, 0.99), 0.8)
        best = task.search(share, 0.1 * passes, 0.7 + 0.1 * min(attempt, 2), task.moved(best, share))
    timing = task.clock.time(best.method, task.timing_images, 31)
    if timing.speedup < value * 0.97 and not best.interrupted:
        raise BadSetting(
            f"a speed-up of {value:g} was not reached: the best schedule at {share:.3f} of the MACs measures "
            f"{timing.speedup:.2f} at batch {len(task.timing_images)}; ask for less, or for macs"
        )
    first, third = timing.speedup_quartiles
    return best, SpeedUp(
        median=round(timing.speedup, 3),
        quartiles=(round(first, 3), round(third, 3)),
        batch=len(task.timing_images),
        threads=torch.get_num_threads(),
        engine=task.clock.engine,
        precision=task.clock.precision,
    )


def _share_for_speedup(task: Task, value: float) -> float:
    """The share of the MACs at which the starting shape is so fast."""
    space = task.space
    low, high, fastest = cheapest(space) / space.whole, 1.0, 1.0
    shape = space.plan_of(space.method)
    for _ in range(6):
        middle = (low + high) / 2
        plan = space.fit(shape, middle * space.whole)
        if plan is None:  # this shape cannot be that cheap
            low = middle
            continue
        reached = task.speedup(space.with_plan(plan))
        fastest = max(fastest, reached)
        low, high = (middle, high) if reached >= value else (low, middle)
    if fastest < value:
        raise BadSetting(f"a speed-up of {value:g} was not reached here; the most was {fastest:.2f}, ask for less")
    return low
