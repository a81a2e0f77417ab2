"""tune: the schedule and settings of a method that do least damage to a model at a given cost.

Damage is the distance to the unreduced model's outputs on a few hundred unlabelled images, by the measure for their
kind: KL divergence for classes. A fifth of them is held out of the search (local_search.py); the damage on these is in
the recipe.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.eval_mode import in_eval_mode
from gtp_vit.core.reducer import Method
from gtp_vit.errors import GTPError
from gtp_vit.methods.gtp_plus.learning.calibrate import calibrate_method
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.registry import MEASURES
from gtp_vit.patching import host_of, patch, unpatch
from gtp_vit.profiling.budget import starting_point
from gtp_vit.recipes.defaults import DEFAULT_METHOD
from gtp_vit.recipes.provenance import Measurements, Provenance, SampleFigures
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit
from gtp_vit.tuning.local_search import (
    HELD_OUT_FRACTION,
    DamageEvaluator,
    SearchResult,
    check_enough_images,
    min_images,
)
from gtp_vit.tuning.settings import DEFAULT_TARGET, Progress, SearchConfig, Target, TimingConfig, Tracking
from gtp_vit.tuning.space import ScheduleLimits, ScheduleSpace, unreachable_error
from gtp_vit.tuning.speed_meter import SpeedMeter
from gtp_vit.tuning.targets import SearchTask, reach_target
from gtp_vit.version import __version__


@in_eval_mode
def tune(
    model: nn.Module,
    images: Tensor,
    target: Target = DEFAULT_TARGET,
    *,
    method: Method | str = DEFAULT_METHOD.name,
    search: SearchConfig = SearchConfig(),  # noqa: B008  it is frozen, as are the others
    limits: ScheduleLimits = ScheduleLimits(),  # noqa: B008
    timing: TimingConfig = TimingConfig(),  # noqa: B008
    tracking: Tracking = Tracking(),  # noqa: B008
) -> Recipe:
    """The settings of a method with the least damage at a target; a recipe that `patch` takes.

    Args:
        model: a supported ViT with the weights it will be used with; it is measured in eval mode.
        images: a few hundred, prepared as the model expects them, [I, channels, height, width]. No labels are needed.
        target: what is to be reached, by default 65 % of the unreduced model's MACs.
        method: a method with a schedule, by name or with its settings.
        search: how long the search takes, its seed, and whether it first learns what matters to the model.
        limits: what deployment asks for.
        timing: where speed is measured, and the result is checked.
        tracking: who is told how it goes, and where figures are stored.

    Ctrl-C ends the search early with the best so far.

    Returns:
        The settings, their provenance, and their MACs and damage on the images of the search and on held-out ones.

    Raises:
        GTPError: the target cannot be met, or the images or the model do not allow a comparison.

    >>> import torch, gtp_vit
    >>> model, images = gtp_vit.create_model("test_vit"), torch.rand(40, 3, 160, 160)
    >>> recipe = tune(model, images, Target("macs", 0.7), method="tome", search=SearchConfig(passes=1))
    >>> fast = gtp_vit.patch(model, recipe)
    >>> round(gtp_vit.macs(fast).total / gtp_vit.macs(model).total, 2)
    0.7
    """
    plain: Any = unpatch(model)
    host, measure = host_of(plain), target.measure_of(plain)
    settings, space = check_request(plain, images, target, method=method, limits=limits, timing=timing)
    clock = SpeedMeter(plain, timing.engine, timing.precision, measure)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(search.seed))
    ruler = DamageEvaluator(plain, images[order.to(images.device)], search.batch_size, tracking.journal, measure)
    searched = len(images) - round(HELD_OUT_FRACTION * len(images))
    learned = ""
    if search.calibrate:
        options: dict[str, Any] = {"batch_size": search.batch_size, "journal": tracking.journal}
        settings, learned = calibrate_method(settings, plain, ruler.images[:searched], measure=measure, **options)
        space = ScheduleSpace(space.costs, settings, limits)
    task = SearchTask(target, measure, space, ruler, clock, searched, search, timing.batch_size, tracking.progress)
    begin = time.time()
    with clock:
        best, speedup = reach_target(task)
        in_engine = None if clock.in_torch else clock.figures(best.method, ruler.images, searched)
    measured = dataclasses.replace(measurements(task, best), speedup=speedup, engine=in_engine)
    provenance = Provenance(
        by="gtp-vit tune",
        version=__version__,
        target={target.name: target.value},
        limits=dataclasses.asdict(limits),
        calibration=learned,
        seed=search.seed,
        candidates=best.num_candidates,
        interrupted=best.interrupted,
        minutes=round((time.time() - begin) / 60, 1),
    )
    return Recipe(host.inputs.name, sizes_of_vit(host.vit), best.method, provenance, measured)


def check_request(
    plain: Any,
    images: Tensor,
    target: Target,
    *,
    method: Method | str,
    limits: ScheduleLimits,
    timing: TimingConfig,
) -> tuple[Method, ScheduleSpace]:
    """Refuse all that can be refused before anything is measured or written; returns where the search begins."""
    host, measure = host_of(plain), target.measure_of(plain)
    check_enough_images(images, plain, min_images(measure))
    SpeedMeter(plain, timing.engine, timing.precision, measure)  # raises if it has no such engine
    settings = starting_point(method, host.vit)
    settings.build(host.vit)  # raises if they do not fit
    space = ScheduleSpace(host.costs(), settings, limits)
    if target.name == "macs" and not list(space.starting_points(target.value * space.unreduced_macs)):
        raise unreachable_error(space, target.value * space.unreduced_macs)
    return settings, space


def measurements(task: SearchTask, best: SearchResult) -> Measurements:
    """Cost and damage of the best settings, on the images of the search and on the held-out ones."""
    ruler, space, searched = task.evaluator, task.space, task.num_search_images
    cost = space.cost(space.plan_of(best.method))
    held_out = ruler.damage(best.method, searched, len(ruler.images))
    unseen = len(ruler.images) - searched
    if held_out.not_finite:
        raise GTPError(
            f"the outputs of {best.method} are not finite on {held_out.not_finite} of {unseen} held-out images, though "
            "they are on those of the search; use float32 or bfloat16, or ask for less"
        )
    both = Damage.concatenate([best.damage, held_out])
    return Measurements(
        macs=cost,
        fraction=round(cost / space.unreduced_macs, 4),
        measure=task.measure.name,
        figures=best.damage.summary(),
        images=searched,
        held_out=SampleFigures(both.summary(searched), unseen),
    )


def curve(
    model: nn.Module,
    images: Tensor,
    targets: Sequence[Target],
    *,
    method: Method | str = DEFAULT_METHOD.name,
    search: SearchConfig = SearchConfig(),  # noqa: B008
    limits: ScheduleLimits = ScheduleLimits(),  # noqa: B008
    timing: TimingConfig = TimingConfig(),  # noqa: B008
    tracking: Tracking = Tracking(),  # noqa: B008
) -> list[Recipe]:
    """Recipes at several targets, in this order: the trade-off that this model offers; settings as in `tune`."""
    recipes: list[Recipe] = []
    for index, target in enumerate(targets):

        def part(now: Progress, index: int = index) -> None:
            if tracking.progress is not None:
                tracking.progress(dataclasses.replace(now, done=(index + now.done) / len(targets)))

        own = dataclasses.replace(tracking, progress=part)
        recipes.append(
            tune(model, images, target, method=method, search=search, limits=limits, timing=timing, tracking=own)
        )
        if recipes[-1].provenance.interrupted:
            break
    return recipes


def tune_and_patch(
    model: Any,
    images: Tensor,
    target: Target = DEFAULT_TARGET,
    *,
    method: Method | str = DEFAULT_METHOD.name,
    search: SearchConfig = SearchConfig(),  # noqa: B008
    limits: ScheduleLimits = ScheduleLimits(),  # noqa: B008
    timing: TimingConfig = TimingConfig(),  # noqa: B008
    tracking: Tracking = Tracking(),  # noqa: B008
) -> Any:
    """Tune a model on a few hundred unlabelled images and patch it, in one call; settings as in `tune`.

    With a target that is measured as dense the model gives back the full grid (`patch`, restore).

    Args:
        model: as in `tune`; it is not changed.
        images: as in `tune`.
        target: as in `tune`.
        method: as in `tune`.
        search: as in `tune`.
        limits: as in `tune`.
        timing: as in `tune`.
        tracking: as in `tune`.

    Returns:
        The patched model, as `patch` returns it; its method is `model.reduction.method`.

    Raises:
        GTPError: as in `tune`.

    >>> import torch, gtp_vit
    >>> model, images = gtp_vit.create_model("test_vit"), torch.rand(40, 3, 160, 160)
    >>> fast = tune_and_patch(model, images, method="tome", search=SearchConfig(passes=1))
    >>> gtp_vit.is_patched(fast)
    True
    """
    recipe = tune(model, images, target, method=method, search=search, limits=limits, timing=timing, tracking=tracking)
    return patch(model, recipe, restore=MEASURES[recipe.measured.measure].restores)
