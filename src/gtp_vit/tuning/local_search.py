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
from gtp_vit.metrics.base import UNREDUCED, Arrays, Measure, check_reference_outputs, decode_array, encode_arrays
from gtp_vit.metrics.damage import Damage, compare_unlabelled
from gtp_vit.metrics.input_checks import check_has_weights, check_image_tensor
from gtp_vit.patching import patch, unpatch
from gtp_vit.runs.journal import Journal
from gtp_vit.tuning.space import ScheduleSpace, unreachable_error

MIN_IMAGES = 20
HELD_OUT_FRACTION = 0.2  # share of the images that the search does not see
RACE_FRACTIONS = (0.25, 0.5, 1.0)  # shares of the images after which a candidate may be given up
SEARCH_STAGES = ((0.25, 3), (0.4, 2), (2.0, 1))  # (share of the search, number of local searches until then)


def min_images(measure: Measure) -> int:
    """The number of images a search needs: even the held-out ones must be more than an image has neighbours."""
    return max(MIN_IMAGES, math.ceil(measure.min_images / HELD_OUT_FRACTION))


def check_enough_images(images: Any, model: Any, min_images: int) -> None:
    """Raise SettingError unless `images` is a tensor of enough images that the model takes."""
    check_has_weights(model)
    check_image_tensor(images, min_images, "tune on", 200)
    with torch.no_grad():
        patch(model, Identity(), quiet=True)(images[:1])  # raises if they do not fit


class DamageEvaluator:
    """Measures the damage of settings on fixed images; figures in the journal are reused."""

    def __init__(
        self, model: nn.Module, images: Tensor, batch_size: int, journal: Journal | None, measure: Measure
    ) -> None:
        self.model, self.images, self.batch_size, self.journal = unpatch(model), images, batch_size, journal
        self.measure = measure
        self.images_run = 0  # images that went through a reduced model
        self.seconds = 0.0
        self.cache: dict[Any, tuple[Arrays, float]] = {}  # with the seconds it took
        self.speedups: dict[Any, float] = {}
        for entry in [] if journal is None else journal.entries:
            if "settings" not in entry:  # what was learned before the search
                continue
            settings = _hashable(entry["settings"])
            if "speedup" in entry:
                self.speedups[settings] = entry["speedup"]
                continue
            values = {name: decode_array(stored) for name, stored in entry["found"].items()}
            self.cache[settings, entry["first"], entry["last"]] = values, entry["seconds"]
        with torch.inference_mode():
            self.base = self._outputs(UNREDUCED, self.model, images)
        check_reference_outputs(self.base, range(len(images)), images)
        self.base_arrays = compare_unlabelled(measure, self.base, self.base)

    def _outputs(self, name: str, model: nn.Module, images: Tensor) -> Tensor:
        return torch.cat([self.measure.outputs(name, model, part) for part in images.split(self.batch_size)])

    def damage(self, method: Method, first: int, last: int) -> Damage:
        """The damage of these settings on images `first` to `last`."""
        key = (_hashable(journal_settings(method)), first, last)
        self.images_run += last - first
        if key not in self.cache:
            begin = time.perf_counter()
            fast = patch(self.model, method, restore=self.measure.restores, quiet=True)
            with torch.inference_mode():
                outputs = self._outputs(method.name, fast, self.images[first:last])
            values = compare_unlabelled(self.measure, self.base[first:last], outputs)
            seconds = round(time.perf_counter() - begin, 4)
            self.cache[key] = values, seconds
            if self.journal is not None:
                entry = {"settings": journal_settings(method), "first": first, "last": last, "seconds": seconds}
                self.journal.append({**entry, "found": encode_arrays(values)})
        values, seconds = self.cache[key]
        self.seconds += seconds  # also for figures from the journal, so a resumed run ends at the same time
        base = {name: array[first:last] for name, array in self.base_arrays.items()}
        return Damage(self.measure, base, values)

    def speedup_of(self, method: Method, measure: Callable[[], float]) -> float:
        """The speed-up of these settings, measured once."""
        key = _hashable(journal_settings(method))
        if key not in self.speedups:
            self.speedups[key] = measure()
            if self.journal is not None:
                self.journal.append({"settings": journal_settings(method), "speedup": self.speedups[key]})
        return self.speedups[key]


def journal_settings(method: Method) -> dict[str, Any]:
    """The settings for the journal, with a calibration replaced by its hash."""
    return {
        name: hashlib.sha256(value.encode()).hexdigest() if isinstance(value, str) and len(value) > 300 else value
        for name, value in method.to_dict().items()
    }


def _hashable(settings: dict[str, Any]) -> Any:
    return tuple((key, tuple(v) if isinstance(v, (list, tuple)) else v) for key, v in sorted(settings.items()))


def random_change(
    space: ScheduleSpace, method: Method, target: float, rng: random.Random
) -> Callable[[Method], Method | None]:
    """A random small change, as a function that can be applied again if it helped."""
    ranges = type(method).tunable
    if ranges and rng.random() < 0.15:
        name = rng.choice(sorted(ranges))
        factor = rng.choice((0.7, 1 / 0.7))
        low, high = ranges[name]

        def scale(current: Method) -> Method | None:
            value = float(f"{min(max(getattr(current, name) * factor, low), high):.4g}")
            return dataclasses.replace(current, **{name: value}) if value != getattr(current, name) else None

        return scale
    plan = space.plan_of(method)
    if not any(plan):
        return lambda current: None  # the target is met without removing anything
    from_layer = rng.choice([layer for layer in space.layers if plan[layer]])
    amount = rng.choice((1, 2, 4, 8, 16, 10**6))
    others = [layer for layer in space.layers if layer != from_layer]
    if not others:
        return lambda current: None
    used = sum(bool(number) for number in plan)
    if space.limits.max_layers is not None and used >= space.limits.max_layers and amount < plan[from_layer]:
        others = [layer for layer in others if plan[layer]] or others
    to_layer = rng.choice(others)

    def shift(current: Method) -> Method | None:
        plan = space.plan_of(current)
        if not plan[from_layer]:
            return None
        plan[from_layer] -= min(amount, plan[from_layer])
        changed = space.rebalance(plan, to_layer, target)
        return None if changed is None else space.with_plan(changed, current)

    return shift


@dataclass(frozen=True)
class SearchResult:
    """The best settings so far."""

    method: Method
    damage: Damage
    num_candidates: int
    interrupted: bool = False


@dataclass
class Candidate:
    """One local search: where it is, and the change that helped last, which is tried again."""

    method: Method
    damage: Damage
    last_change: Callable[[Method], Method | None] | None = None


def evaluate_or_abandon(evaluator: DamageEvaluator, method: Method, images: int, best: Damage | None) -> Damage | None:
    """Damage on all images, or None as soon as it is clearly not below the best one's."""
    parts: list[Damage] = []
    for first, last in itertools.pairwise([0, *(round(share * images) for share in RACE_FRACTIONS)]):
        parts.append(evaluator.damage(method, first, last))
        if best is not None:
            worse = np.concatenate([part.values for part in parts]) - best.values[:last]
            doubt = 0.5 * worse.std() / len(worse) ** 0.5 if last < images else 0.0
            if not worse.mean() < doubt:  # NaN is no improvement
                return None
    return Damage.concatenate(parts)


@dataclass(frozen=True)
class Budget:
    """The budget of a search: passes over its images, which are the evaluator's first, or time."""

    images: int
    passes: float
    seconds: float = 0  # 0 = no limit
    seed: int = 0


class LocalSearch:
    """Local search at a cost: several candidates improve in turn, and the worse ones are dropped on the way."""

    def __init__(
        self,
        evaluator: DamageEvaluator,
        space: ScheduleSpace,
        target: float,
        budget: Budget,
        report: Callable[[float, SearchResult], None] | None,
    ) -> None:
        self.evaluator, self.space, self.target, self.budget, self.report = evaluator, space, target, budget, report
        self.rng = random.Random(budget.seed)
        self.images_at_begin, self.begin_seconds = evaluator.images_run, evaluator.seconds
        self.candidates: list[Candidate] = []
        self.tried: set[Method] = set()

    def spent(self) -> float:
        """Share of the budget that is used up."""
        budget, seconds = self.budget, self.evaluator.seconds - self.begin_seconds
        by_time = seconds / budget.seconds if budget.seconds else 0.0
        return max((self.evaluator.images_run - self.images_at_begin) / budget.images / budget.passes, by_time)

    def best(self, *, interrupted: bool = False) -> SearchResult:
        leader = min(self.candidates, key=lambda candidate: candidate.damage.mean)
        return SearchResult(leader.method, leader.damage, len(self.tried), interrupted)

    def begin(self, start: Sequence[Method]) -> None:
        """Measure the first candidates: `start` and the space's own starting points."""
        for method in dict.fromkeys([*start, *self.space.starting_points(self.target)]):
            self.tried.add(method)
            damage = evaluate_or_abandon(self.evaluator, method, self.budget.images, None)
            assert damage is not None
            if not np.isfinite(damage.mean):
                continue
            self.candidates.append(Candidate(method, damage))
            self._report_progress()
            if self.spent() >= 1:
                break
        if not self.candidates and self.tried:
            raise GTPError(
                f"{self.space.method.name}'s outputs are not finite with any of the {len(self.tried)} schedules to "
                "begin with; use float32 or bfloat16, or ask for less"
            )
        if not self.candidates:
            raise unreachable_error(self.space, self.target)

    def improve(self) -> None:
        """Improve the candidates until the budget is spent, or nothing new is left to try."""
        turn, idle = 0, 0
        while self.spent() < 1 and idle < 2000:
            together = next(number for until, number in SEARCH_STAGES if self.spent() <= until)
            self.candidates = sorted(self.candidates, key=lambda candidate: candidate.damage.mean)[:together]
            turn += 1
            idle = 0 if self._step(self.candidates[turn % len(self.candidates)]) else idle + 1

    def _step(self, candidate: Candidate) -> bool:
        """Try one change of a candidate; False if there is nothing new to try."""
        change = candidate.last_change or random_change(self.space, candidate.method, self.target, self.rng)
        changed, candidate.last_change = change(candidate.method), None
        if changed is None or changed in self.tried:
            return False
        self.tried.add(changed)
        less = evaluate_or_abandon(self.evaluator, changed, self.budget.images, candidate.damage)
        if less is not None:
            candidate.method, candidate.damage, candidate.last_change = changed, less, change
        self._report_progress()
        return True

    def _report_progress(self) -> None:
        if self.report is not None:
            self.report(min(self.spent(), 1.0), self.best())


def search(
    evaluator: DamageEvaluator,
    space: ScheduleSpace,
    target: float,
    budget: Budget,
    *,
    report: Callable[[float, SearchResult], None] | None = None,
    start: Sequence[Method] = (),
) -> SearchResult:
    """The best settings at a cost of `target` MACs; Ctrl-C ends the search with the best so far."""
    local_search = LocalSearch(evaluator, space, target, budget, report)
    try:
        local_search.begin(start)
        local_search.improve()
    except KeyboardInterrupt:
        if not local_search.candidates:
            raise
        return local_search.best(interrupted=True)
    return local_search.best()
