"""Local search over the schedules of a method, by the damage they do to a model on some images.

A step lets one layer remove fewer tokens and another more, at the same cost, and is kept if the damage falls. A
candidate that is clearly worse on the first images is given up early.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gtp_vit.core.reducer import Method
from gtp_vit.errors import GTPError
from gtp_vit.methods.identity import Identity
from gtp_vit.metrics.base import UNREDUCED, Arrays, Measure, check_base, decoded, encoded
from gtp_vit.metrics.damage import Damage, compare_unlabelled
from gtp_vit.metrics.input_checks import check_has_weights, check_image_tensor
from gtp_vit.patching import patch, unpatch
from gtp_vit.runs.journal import Journal
from gtp_vit.tuning.space import Space, unreachable

FEWEST_IMAGES = 20
HELD_OUT = 0.2  # share of the images that the search does not see
RACE = (0.25, 0.5, 1.0)  # shares of the images after which a candidate may be given up
CLIMBS = ((0.25, 3), (0.4, 2), (2.0, 1))  # (share of the search, number of local searches until then)


def fewest_images(measure: Measure) -> int:
    """How many images a search needs: so many that even the held-out ones are more than an image has neighbours."""
    return max(FEWEST_IMAGES, math.ceil(measure.fewest_images / HELD_OUT))


def check_enough_images(images: Any, model: Any, fewest: int) -> None:
    """Raise BadSetting unless `images` is a tensor of enough images that the model takes."""
    check_has_weights(model)
    check_image_tensor(images, fewest, "tune on", 200)
    with torch.no_grad():
        patch(model, Identity(), quiet=True)(images[:1])  # raises if they do not fit


class Ruler:
    """Measures the damage of settings on fixed images; figures in the journal are reused."""

    def __init__(
        self, model: nn.Module, images: Tensor, batch_size: int, journal: Journal | None, measure: Measure
    ) -> None:
        self.model, self.images, self.batch_size, self.journal = unpatch(model), images, batch_size, journal
        self.measure = measure
        self.seen = 0  # images that went through a reduced model
        self.seconds = 0.0
        self.known: dict[Any, tuple[Arrays, float]] = {}  # with the seconds it took
        self.speedups: dict[Any, float] = {}
        for entry in [] if journal is None else journal.entries:
            if "settings" not in entry:  # what was learned before the search
                continue
            settings = _hashable(entry["settings"])
            if "speedup" in entry:
                self.speedups[settings] = entry["speedup"]
                continue
            found = {name: decoded(stored) for name, stored in entry["found"].items()}
            self.known[settings, entry["first"], entry["last"]] = found, entry["seconds"]
        with torch.inference_mode():
            self.base = self._outputs(UNREDUCED, self.model, images)
        check_base(self.base, range(len(images)), images)
        self.of_base = compare_unlabelled(measure, self.base, self.base)

    def _outputs(self, name: str, model: nn.Module, images: Tensor) -> Tensor:
        return torch.cat([self.measure.outputs(name, model, part) for part in images.split(self.batch_size)])

    def damage(self, method: Method, first: int, last: int) -> Damage:
        """The damage of these settings on images `first` to `last`."""
        key = (_hashable(settings_of(method)), first, last)
        self.seen += last - first
        if key not in self.known:
            begin = time.perf_counter()
            fast = patch(self.model, method, restore=self.measure.restores, quiet=True)
            with torch.inference_mode():
                outputs = self._outputs(method.name, fast, self.images[first:last])
            found = compare_unlabelled(self.measure, self.base[first:last], outputs)
            seconds = round(time.perf_counter() - begin, 4)
            self.known[key] = found, seconds
            if self.journal is not None:
                entry = {"settings": settings_of(method), "first": first, "last": last, "seconds": seconds}
                self.journal.append({**entry, "found": encoded(found)})
        found, seconds = self.known[key]
        self.seconds += seconds  # also for figures from the journal, so a resumed run ends at the same time
        base = {name: array[first:last] for name, array in self.of_base.items()}
        return Damage(self.measure, base, found)

    def timed(self, method: Method, measure: Callable[[], float]) -> float:
        """The speed-up of these settings, measured once."""
        key = _hashable(settings_of(method))
        if key not in self.speedups:
            self.speedups[key] = measure()
            if self.journal is not None:
                self.journal.append({"settings": settings_of(method), "speedup": self.speedups[key]})
        return self.speedups[key]


def settings_of(method: Method) -> dict[str, Any]:
    """The settings for the journal; of a calibration, which all of a search share, what tells it from others."""
    return {
        name: hashlib.sha256(value.encode()).hexdigest() if isinstance(value, str) and len(value) > 300 else value
        for name, value in method.to_dict().items()
    }


def _hashable(settings: dict[str, Any]) -> Any:
    return tuple((key, tuple(v) if isinstance(v, (list, tuple)) else v) for key, v in sorted(settings.items()))


def neighbour(space: Space, method: Method, target: float, choose: random.Random) -> Callable[[Method], Method | None]:
    """A random small change, as a function that can be applied again if it helped."""
    ranges = type(method).tunes
    if ranges and choose.random() < 0.15:
        name = choose.choice(sorted(ranges))
        factor = choose.choice((0.7, 1 / 0.7))
        low, high = ranges[name]

        def scale(of: Method) -> Method | None:
            value = float(f"{min(max(getattr(of, name) * factor, low), high):.4g}")
            return dataclasses.replace(of, **{name: value}) if value != getattr(of, name) else None

        return scale
    plan = space.plan_of(method)
    if not any(plan):
        return lambda of: None  # the target is met without removing anything
    taken = choose.choice([layer for layer in space.layers if plan[layer]])
    amount = choose.choice((1, 2, 4, 8, 16, 10**6))
    others = [layer for layer in space.layers if layer != taken]
    if not others:
        return lambda of: None
    used = sum(bool(number) for number in plan)
    if space.limits.max_layers is not None and used >= space.limits.max_layers and amount < plan[taken]:
        others = [layer for layer in others if plan[layer]] or others
    filled = choose.choice(others)

    def shift(of: Method) -> Method | None:
        plan = space.plan_of(of)
        if not plan[taken]:
            return None
        plan[taken] -= min(amount, plan[taken])
        changed = space.fill(plan, filled, target)
        return None if changed is None else space.with_plan(changed, of)

    return shift


@dataclass(frozen=True)
class Best:
    """The best settings so far."""

    method: Method
    damage: Damage
    tried: int
    interrupted: bool = False


@dataclass
class Climb:
    """One local search: where it is, and the change that helped last, which is tried again."""

    method: Method
    damage: Damage
    again: Callable[[Method], Method | None] | None = None


def race(ruler: Ruler, method: Method, images: int, best: Damage | None) -> Damage | None:
    """Damage on all images, or None as soon as it is clearly not below the best one's."""
    parts: list[Damage] = []
    for first, last in itertools.pairwise([0, *(round(share * images) for share in RACE)]):
        parts.append(ruler.damage(method, first, last))
        if best is not None:
            worse = np.concatenate([part.values for part in parts]) - best.values[:last]
            doubt = 0.5 * worse.std() / len(worse) ** 0.5 if last < images else 0.0
            if not worse.mean() < doubt:  # NaN is no improvement
                return None
    return Damage.together(parts)


@dataclass(frozen=True)
class Budget:
    """What a search may use: passes over its images, which are the ruler's first, and time; whichever is first."""

    images: int
    passes: float
    seconds: float = 0  # 0 = no limit
    seed: int = 0


class LocalSearch:
    """Local search at a cost: it climbs from the best few starts at once, and gives the worse climbs up on the way."""

    def __init__(
        self, ruler: Ruler, space: Space, target: float, budget: Budget, report: Callable[[float, Best], None] | None
    ) -> None:
        self.ruler, self.space, self.target, self.budget, self.report = ruler, space, target, budget, report
        self.choose = random.Random(budget.seed)
        self.begin_seen, self.begin_seconds = ruler.seen, ruler.seconds
        self.climbs: list[Climb] = []
        self.tried: set[Method] = set()

    def spent(self) -> float:
        """Share of the budget that is used up."""
        budget, seconds = self.budget, self.ruler.seconds - self.begin_seconds
        by_time = seconds / budget.seconds if budget.seconds else 0.0
        return max((self.ruler.seen - self.begin_seen) / budget.images / budget.passes, by_time)

    def best(self, *, interrupted: bool = False) -> Best:
        leader = min(self.climbs, key=lambda climb: climb.damage.mean)
        return Best(leader.method, leader.damage, len(self.tried), interrupted)

    def begin(self, start: Sequence[Method]) -> None:
        """Measure where climbs begin: at `start` and at the space's own starts."""
        for candidate in dict.fromkeys([*start, *self.space.starts(self.target)]):
            self.tried.add(candidate)
            damage = race(self.ruler, candidate, self.budget.images, None)
            assert damage is not None
            if not np.isfinite(damage.mean):
                continue
            self.climbs.append(Climb(candidate, damage))
            self._tell()
            if self.spent() >= 1:
                break
        if not self.climbs and self.tried:
            raise GTPError(
                f"{self.space.method.name}'s outputs are not finite with any of the {len(self.tried)} schedules to "
                "begin with; use float32 or bfloat16, or ask for less"
            )
        if not self.climbs:
            raise unreachable(self.space, self.target)

    def improve(self) -> None:
        """Climb until the budget is spent, or nothing new is left to try."""
        turn, idle = 0, 0
        while self.spent() < 1 and idle < 2000:
            together = next(number for until, number in CLIMBS if self.spent() <= until)
            self.climbs = sorted(self.climbs, key=lambda climb: climb.damage.mean)[:together]
            turn += 1
            idle = 0 if self._step(self.climbs[turn % len(self.climbs)]) else idle + 1

    def _step(self, climb: Climb) -> bool:
        """Try one change of a climb; False if there is nothing new to try."""
        change = climb.again or neighbour(self.space, climb.method, self.target, self.choose)
        changed, climb.again = change(climb.method), None
        if changed is None or changed in self.tried:
            return False
        self.tried.add(changed)
        less = race(self.ruler, changed, self.budget.images, climb.damage)
        if less is not None:
            climb.method, climb.damage, climb.again = changed, less, change
        self._tell()
        return True

    def _tell(self) -> None:
        if self.report is not None:
            self.report(min(self.spent(), 1.0), self.best())


def search(
    ruler: Ruler,
    space: Space,
    target: float,
    budget: Budget,
    *,
    report: Callable[[float, Best], None] | None = None,
    start: Sequence[Method] = (),
) -> Best:
    """The best settings at a cost of `target` MACs; Ctrl-C ends the search with the best so far."""
    climbing = LocalSearch(ruler, space, target, budget, report)
    try:
        climbing.begin(start)
        climbing.improve()
    except KeyboardInterrupt:
        if not climbing.climbs:
            raise
        return climbing.best(interrupted=True)
    return climbing.best()
