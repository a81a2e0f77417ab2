"""tune: search for the schedule and settings of a method that do the least damage to a model at a target cost.

Damage is the distance to the unreduced model's outputs on a few hundred unlabelled images; the measure fits the kind of
output, e.g. KL divergence for classes. A fifth of the images is held out of the search (local_search.py), and the
recipe has the damage on them as well.
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
    search: SearchConfig = SearchConfig(),  # noqa: B008  it is frozen, as are those below
    limits: ScheduleLimits = ScheduleLimits(),  # noqa: B008
    timing: TimingConfig = TimingConfig(),  # noqa: B008
    tracking: Tracking = Tracking(),  # noqa: B008
) -> Recipe:
    """The settings of a method with the least damage at a target; a recipe that `patch` takes.

    Args:
        model: a supported ViT with the weights it will be used with; it is measured in eval mode.
        images: a few hundred unlabelled images, preprocessed for the model, [I, channels, height, width].
        target: the cost, speed-up or damage to reach, by default 65 % of the unreduced model's MACs.
        method: a method with a schedule, by name or with its settings.
        search: length and seed of the search, and whether to calibrate first.
        limits: limits of the schedule that the deployment needs.
        timing: the engine that speed is measured in and the result is checked in.
        tracking: a callback for progress, and a journal that stores figures.

    Ctrl-C ends the search early, with the best settings so far.

    Returns:
        The settings, their provenance, their MACs, and their damage on the images of the search and on the held-out
        images.

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
    speed_meter = SpeedMeter(plain, timing.engine, timing.precision, measure)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(search.seed))
    evaluator = DamageEvaluator(plain, images[order.to(images.device)], search.batch_size, tracking.journal, measure)
    num_search_images = len(images) - round(HELD_OUT_FRACTION * len(images))
    calibration_summary = ""
    if search.calibrate:
        options: dict[str, Any] = {"batch_size": search.batch_size, "journal": tracking.journal}
        settings, calibration_summary = calibrate_method(
            settings, plain, evaluator.images[:num_search_images], measure=measure, **options
        )
        space = ScheduleSpace(space.costs, settings, limits)
    task = SearchTask(
        *(target, measure, space, evaluator, speed_meter, num_search_images),
        *(search, timing.batch_size, tracking.progress),
    )
    begin = time.time()
    with speed_meter:
        best, speedup = reach_target(task)
        engine_figures = (
            None if speed_meter.in_torch else speed_meter.figures(best.method, evaluator.images, num_search_images)
        )
    measured = dataclasses.replace(measurements(task, best), speedup=speedup, engine=engine_figures)
    provenance = Provenance(
        by="gtp-vit tune",
        version=__version__,
        target={target.name: target.value},
        limits=dataclasses.asdict(limits),
        calibration=calibration_summary,
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
    """Raise GTPError for all that can be checked before the search; returns its first settings, and its space."""
    host, measure = host_of(plain), target.measure_of(plain)
    check_enough_images(images, plain, min_images(measure))
    SpeedMeter(plain, timing.engine, timing.precision, measure)  # raises if it cannot measure with these
    settings = starting_point(method, host.vit)
    settings.build(host.vit)  # raises if the settings do not fit this ViT
    space = ScheduleSpace(host.costs(), settings, limits)
    if target.name == "macs" and not list(space.starting_points(target.value * space.unreduced_macs)):
        raise unreachable_error(space, target.value * space.unreduced_macs)
    return settings, space


def measurements(task: SearchTask, best: SearchResult) -> Measurements:
    """Cost and damage of the best settings, on the images of the search and on the held-out ones."""
    evaluator, space, num_search_images = task.evaluator, task.space, task.num_search_images
    cost = space.cost(space.plan_of(best.method))
    held_out = evaluator.damage(best.method, num_search_images, len(evaluator.images))
    num_held_out = len(evaluator.images) - num_search_images
    if held_out.not_finite:
        raise GTPError(
            f"the outputs of {best.method} are not finite on {held_out.not_finite} of {num_held_out} held-out "
            "images, though they are finite on the images of the search; use float32 or bfloat16, or a target that "
            "removes fewer tokens"
        )
    all_images = Damage.concatenate([best.damage, held_out])
    return Measurements(
        macs=cost,
        fraction=round(cost / space.unreduced_macs, 4),
        measure=task.measure.name,
        figures=best.damage.summary(),
        images=num_search_images,
        held_out=SampleFigures(all_images.summary(num_search_images), num_held_out),
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
    """One recipe per target, in the order of the targets; arguments as in `tune`. Ctrl-C leaves out the later ones."""
    recipes: list[Recipe] = []
    for index, target in enumerate(targets):

        def report(progress: Progress, index: int = index) -> None:
            """Report the progress of this target as a share of all targets."""
            if tracking.progress is not None:
                tracking.progress(dataclasses.replace(progress, done=(index + progress.done) / len(targets)))

        tracking_of_target = dataclasses.replace(tracking, progress=report)
        recipes.append(
            tune(
                model,
                images,
                target,
                method=method,
                search=search,
                limits=limits,
                timing=timing,
                tracking=tracking_of_target,
            )
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

    If outputs are measured as dense, the patched model restores a feature for every patch (`restore` of `patch`).

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
