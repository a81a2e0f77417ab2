"""tune: the schedule and settings of a method that do least damage to a model at a given cost.

Damage is the distance to the unreduced model's outputs on a few hundred unlabelled images, by the measure for their
kind: KL divergence for classes. A fifth of them is held out of the search (climb.py); the damage on these is in the
recipe.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.eval_mode import measures_in_eval_mode
from gtp_vit.core.reducer import Method
from gtp_vit.errors import BadSetting, GTPError, check_range
from gtp_vit.methods.gtp_plus.learning.calibrate import calibrated
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.registry import MEASURES, measure_of
from gtp_vit.patching import host_of, patch, unpatch
from gtp_vit.profiling.budget import starting_point
from gtp_vit.recipes.defaults import DEFAULT, DEFAULT_SHARE
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit
from gtp_vit.runs.journal import Journal
from gtp_vit.tuning.local_search import HELD_OUT, Best, Ruler, check_enough_images, fewest_images, search
from gtp_vit.tuning.space import Limits, Space, cheapest, unreachable
from gtp_vit.tuning.speed_meter import Clock
from gtp_vit.version import __version__

# Targets and what they may be, from above the first to the second.
TARGETS: dict[str, tuple[float, float]] = {
    "macs": (0, 1),
    "speedup": (1, 100),
    "max_kl": (0, 100),
    "min_agreement": (0, 100),
    "min_cosine": (0, 1),
    "min_neighbours": (0, 100),
    "max_error": (0, 100),
}


@dataclass(frozen=True)
class Progress:
    """What `tune` reports while the search runs."""

    done: float  # share of the search
    best: Method
    damage: float  # mean over the images of the search
    title: str  # what the damage is
    share: float  # of the unreduced model's MACs


Report = Callable[[Progress], None]


@measures_in_eval_mode
def tune(
    model: nn.Module,
    images: Tensor,
    *,
    macs: float | None = None,
    speedup: float | None = None,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    min_cosine: float | None = None,
    min_neighbours: float | None = None,
    max_error: float | None = None,
    measure: str | Measure = "auto",
    method: Method | str = DEFAULT.name,
    learn: bool = True,
    limits: Limits = Limits(),  # noqa: B008  it is frozen
    evaluations: int = 150,
    minutes: float = 0,
    seed: int = 0,
    batch_size: int = 32,
    timing_batch: int = 8,
    engine: str = "torch",
    precision: str = "f32",
    name: str = "",
    data: str = "",
    journal: Journal | None = None,
    progress: Report | None = None,
) -> Recipe:
    """The settings of a method with the least damage at one target; a recipe that `patch` takes.

    Args:
        model: a supported ViT with the weights it will be used with; it is measured in eval mode.
        images: a few hundred, prepared as the model wants them, [I, channels, height, width]. No labels are needed.
        macs: the target as a share of the unreduced model's MACs,
        speedup: or as a speed-up that is measured here,
        max_kl: or as the largest KL divergence to the unreduced model,
        min_agreement: or as the least agreement with it, in percent,
        min_cosine: or as the least cosine to its embeddings, or of dense output to its features patch by patch,
        min_neighbours: or as the least share of an image's 10 nearest that stay the same, in percent,
        max_error: or as the largest relative error, of numbers or of features patch by patch. Give one target.
        measure: how outputs are compared: auto chooses by what the model returns; dense: by restored features.
        method: a method with a schedule, by name or with its settings.
        learn: first learn what matters to the model, by a backward pass an image (gtp_plus alone; see `calibrate`).
        limits: what deployment asks for.
        evaluations: passes over the images.
        minutes: end the search after this time; 0 = no limit.
        seed: of the search.
        batch_size: images at a time.
        timing_batch: images in a batch where speed is measured.
        engine: torch, or the name of the engine in which speed is measured and the result is checked.
        precision: in the engine: f32, bf16 or int8. Damage is that of the model in torch.
        name: of the model, for the recipe.
        data: what the images are, for the recipe.
        journal: of this run; figures in it are reused.
        progress: called with the best so far.

    Ctrl-C ends the search early with the best so far.
    """
    targets = {"macs": macs, "speedup": speedup, "max_kl": max_kl, "min_agreement": min_agreement}
    targets |= {"min_cosine": min_cosine, "min_neighbours": min_neighbours, "max_error": max_error}
    goal, value = the_target(targets)
    check_search(evaluations, minutes, batch_size, timing_batch)
    plain: Any = unpatch(model)
    host, vit = host_of(plain), host_of(plain).vit
    chosen = measure_of(plain, measure)
    settings, space = check_request(
        plain, images, {goal: value}, chosen, method=method, limits=limits, engine=engine, precision=precision
    )
    clock = Clock(plain, engine, precision, chosen)
    whole = space.whole
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    ruler = Ruler(plain, images[order.to(images.device)], batch_size, journal, chosen)
    searched = len(images) - round(HELD_OUT * len(images))
    learned = ""
    if learn:
        options: dict[str, Any] = {"measure": chosen, "batch_size": batch_size, "journal": journal}
        settings, learned = calibrated(settings, plain, ruler.images[:searched], **options)
        space = Space(space.costs, settings, limits)

    def run(target: float, budget: float, done: float, start: Sequence[Method] = ()) -> Best:
        def report(share: float, found: Best) -> None:
            if progress is not None:
                cost = space.cost(space.plan_of(found.method)) / whole
                title = chosen.figure(chosen.damage).title
                progress(Progress(done + share * budget / evaluations, found.method, found.damage.mean, title, cost))

        limit = {"evaluations": budget, "seconds": 60 * minutes * budget / evaluations}
        return search(ruler, space, target, images=searched, **limit, seed=seed, report=report, start=start)

    begin = time.time()
    timing = None
    with clock:
        if goal == "macs":
            found = run(value * whole, evaluations, 0)
        elif goal == "speedup":
            found, timing = _at_speedup(ruler, clock, ruler.images[:timing_batch], space, value, evaluations, run)
        else:
            found = _at_damage(goal, chosen, space, value, evaluations, run)
        in_engine = None if engine == "torch" else clock.outputs(found.method, ruler.images, searched)
    cost = space.cost(space.plan_of(found.method))
    held_out = ruler.damage(found.method, searched, len(images))
    if held_out.not_finite:
        raise GTPError(
            f"the outputs of {found.method} are not finite on {held_out.not_finite} of {len(images) - searched} "
            "held-out images, though they are on those of the search; use float32 or bfloat16, or ask for less"
        )
    measured: dict[str, Any] = {
        "measure": chosen.name,
        "macs": cost,
        "share": round(cost / whole, 4),
        **found.damage.summary(),
        "images": searched,
        "held_out": {**Damage.together([found.damage, held_out]).summary(searched), "images": len(images) - searched},
    }
    if timing is not None:
        measured["speedup"] = timing
    if in_engine is not None:
        measured["engine"] = in_engine
    history = {
        "by": "gtp-vit tune",
        "version": __version__,
        "target": {goal: value},
        "limits": dataclasses.asdict(limits),
        "calibration": learned,
        "data": data,
        "seed": seed,
        "candidates": found.tried,
        "interrupted": found.interrupted,
        "minutes": round((time.time() - begin) / 60, 1),
    }
    return Recipe(name or host.inputs.name, sizes_of_vit(vit), found.method, history, measured)


Run = Callable[..., Best]


def the_target(targets: Mapping[str, float | None]) -> tuple[str, float]:
    """The one target that is given; raises if it is none, several, or out of range."""
    given = {key: value for key, value in targets.items() if value is not None}
    if len(given) != 1:
        raise BadSetting(f"{len(given)} targets are given; give one of {', '.join(TARGETS)}")
    goal, value = next(iter(given.items()))
    check_range(goal, value, *TARGETS[goal], above_low=True)
    return goal, value


def check_search(evaluations: float, minutes: float, batch_size: int, timing_batch: int) -> None:
    """Refuse numbers of a search that make no sense."""
    check_range("evaluations", evaluations, 1, 10**6)
    check_range("minutes", minutes, 0, 10**6)
    check_range("batch_size", batch_size, 1, 65536, whole=True)
    check_range("timing_batch", timing_batch, 1, 65536, whole=True)


def check_request(
    plain: Any,
    images: Tensor,
    targets: Mapping[str, float],
    measure: Measure,
    *,
    method: Method | str,
    limits: Limits,
    engine: str,
    precision: str,
) -> tuple[Method, Space]:
    """Refuse all that can be refused before anything is measured or written; returns where the search begins."""
    host = host_of(plain)
    for goal in targets:
        check_target(goal, measure)
    check_enough_images(images, plain, fewest_images(measure))
    Clock(plain, engine, precision, measure)  # raises if it has no such engine
    settings = starting_point(method, host.vit)
    settings.build(host.vit)  # raises if they do not fit
    space = Space(host.costs(), settings, limits)
    if "macs" in targets and not list(space.starts(targets["macs"] * space.whole)):
        raise unreachable(space, targets["macs"] * space.whole)
    return settings, space


def check_target(goal: str, measure: Measure) -> None:
    """Refuse a target that this measure has no figure for."""
    if goal in ("macs", "speedup") or measure.bound(goal) is not None:
        return
    raise BadSetting(
        f"the target {goal} does not fit this model, whose outputs are measured as {measure.name}; give one of macs, "
        f"speedup, {', '.join(bound.name for bound in measure.bounds)}"
    )


def _at_damage(goal: str, measure: Measure, space: Space, value: float, evaluations: float, run: Run) -> Best:
    """The cheapest settings with at most this damage: halve the range of costs, each time with a short search."""
    whole = space.whole
    low, high, good, steps = cheapest(space) / whole, 1.0, None, 6
    last: Best | None = None
    for step in range(steps):
        middle = (low + high) / 2
        last = run(
            middle * whole,
            evaluations / steps,
            step / steps,
            [] if last is None else _moved(space, last, middle * whole),
        )
        bound = measure.bound(goal)
        assert bound is not None
        if bound.is_met(value, last.damage.figures()):
            good, high = last, middle
        else:
            low = middle
        if last.interrupted:
            return dataclasses.replace(good or last, interrupted=True)
    if good is None:
        assert last is not None
        reached = ", ".join(f"{measure.figure(key).title} {number:g}" for key, number in last.damage.summary().items())
        raise BadSetting(
            f"{goal} {value:g} was not met by any settings that save something: at a share of {low:.3f} of the MACs "
            f"there is {reached}; ask for less, or for macs"
        )
    return good


def _at_speedup(
    ruler: Ruler, clock: Clock, images: Tensor, space: Space, value: float, evaluations: float, run: Run
) -> tuple[Best, dict[str, Any]]:
    """Find the cost at which the starting shape is that fast, tune there, and correct it by the measured speed-up."""

    def faster(method: Method) -> float:
        return ruler.timed(method, lambda: clock.time(method, images, 15).speedup)

    whole = space.whole
    low, high, fastest = cheapest(space) / whole, 1.0, 1.0
    shape = space.plan_of(space.method)
    for _ in range(6):
        middle = (low + high) / 2
        plan = space.fit(shape, middle * whole)
        if plan is None:  # this shape cannot be that cheap
            low = middle
            continue
        reached = faster(space.with_plan(plan))
        fastest = max(fastest, reached)
        low, high = (middle, high) if reached >= value else (low, middle)
    share = low
    if fastest < value:
        raise BadSetting(f"a speed-up of {value:g} was not reached here; the most was {fastest:.2f}, ask for less")
    found = run(share * whole, 0.7 * evaluations, 0)
    for attempt in range(4):
        if found.interrupted:
            break
        reached = faster(found.method)
        if reached >= value:
            break
        share *= max(min(reached / value, 0.99), 0.8)
        found = run(share * whole, 0.1 * evaluations, 0.7 + 0.1 * min(attempt, 2), _moved(space, found, share * whole))
    timing = clock.time(found.method, images, 31)
    if timing.speedup < value * 0.97 and not found.interrupted:
        raise BadSetting(
            f"a speed-up of {value:g} was not reached: the best schedule at {share:.3f} of the MACs measures "
            f"{timing.speedup:.2f} at batch {len(images)}; ask for less, or for macs"
        )
    return found, {
        "median": round(timing.speedup, 3),
        "quartiles": [round(edge, 3) for edge in timing.speedup_quartiles],
        "batch": len(images),
        "threads": torch.get_num_threads(),
        **({} if clock.engine == "torch" else {"engine": clock.engine, "precision": clock.precision}),
    }


def _moved(space: Space, found: Best, target: float) -> list[Method]:
    """The shape that was found, at a different cost."""
    plan = space.fit(space.plan_of(found.method), target)
    return [] if plan is None else [space.with_plan(plan, found.method)]


def curve(
    model: nn.Module, images: Tensor, shares: Sequence[float], *, progress: Report | None = None, **settings: Any
) -> list[Recipe]:
    """Recipes at several costs, cheapest last: the trade-off that this model offers."""
    ordered = sorted(set(shares), reverse=True)
    found: list[Recipe] = []
    for index, share in enumerate(ordered):

        def part(now: Progress, index: int = index) -> None:
            if progress is not None:
                progress(dataclasses.replace(now, done=(index + now.done) / len(ordered)))

        found.append(tune(model, images, macs=share, progress=part, **settings))
        if found[-1].found["interrupted"]:
            break
    return found


def accelerate(model: Any, images: Tensor, *, macs: float | None = None, **settings: Any) -> Any:
    """Tune a model on a few hundred unlabelled images and patch it, in one call; targets and settings as in `tune`.

    Without a target it is 65 % of the MACs. With measure="dense" the model gives back the full grid (`patch`, restore).
    """
    others = any(settings.get(target) is not None for target in TARGETS)
    recipe = tune(model, images, macs=DEFAULT_SHARE if macs is None and not others else macs, **settings)
    return patch(model, recipe, restore=MEASURES[recipe.measured["measure"]].restores)
