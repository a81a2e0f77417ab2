"""gtp-vit tune: give a target, get a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import EngineFlags, check_engine
from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.measure_flags import MeasureFlags, measure_flags, measure_of_flags, with_flags
from gtp_vit.cli.model_flags import DataFlags, check_weights, make_model, read_images
from gtp_vit.cli.output import OutputFlags, ResumeFlags, check_readable, open_journal, print_result, write_page
from gtp_vit.cli.parser import Nested
from gtp_vit.cli.target_flags import target_flags, target_of_flags
from gtp_vit.core.ranges import Range
from gtp_vit.core.reducer import Method
from gtp_vit.engines import TORCH
from gtp_vit.errors import GTPError
from gtp_vit.models.sources import public_name
from gtp_vit.recipes.defaults import DEFAULT_METHOD, DEPLOY_LAYERS, DEPLOY_MULTIPLE
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.report.tuned import explain_recipes, recipe_sections, recipe_table
from gtp_vit.runs.files import check_writable, write_atomically
from gtp_vit.tuning.local_search import min_images
from gtp_vit.tuning.settings import (
    DEFAULT_TARGET,
    Progress,
    SearchConfig,
    Target,
    TimingConfig,
    Tracking,
    target_bounds,
)
from gtp_vit.tuning.space import ScheduleLimits
from gtp_vit.tuning.tune import check_request, curve

CURVE_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class Tune(OutputFlags, MeasureFlags, EngineFlags, ResumeFlags, DataFlags):
    """Find the schedule and settings that change a model least at a given cost, on a few hundred images without labels.

    Give one target: --macs, --speedup (measured here), or what the measure for the model's kind of output has: of
    classes --max-kl or --min-agreement, of embeddings --min-cosine or --min-neighbours, of numbers --max-error, and
    with --measure dense, which compares restored features patch by patch, --max-error or --min-cosine. Without any it
    is --macs 0.65. The result is a recipe, a small JSON file that patch(model, "recipe.json") and every --method take.
    Ctrl-C ends the search with the best so far; a run that was killed resumes when it is started again with the same
    --output.

    examples:
      gtp-vit tune --macs 0.65
      gtp-vit tune deit_tiny_patch16_224 --pretrained --data-dir calibration --macs 0.65 --output recipe.json
      gtp-vit tune vit_tiny_patch16_224 --pretrained --data-dir calibration --min-agreement 95 --output recipe.json
      gtp-vit tune deit_tiny_patch16_224 --pretrained --data-dir calibration --method tome --curve --output curve.json
      gtp-vit tune deit_tiny_patch16_224 --pretrained --data-dir images --engine openvino --precision int8 --speedup 1.4
    """

    method: str = DEFAULT_METHOD.name
    """A method that has a schedule, such as gtp_plus, gtp or tome; its settings are where the search begins."""
    curve: bool = False
    """Tune at 0.9, 0.8, 0.7, 0.6 and 0.5 of the MACs instead, and write all the recipes."""
    images: Annotated[int, Range(1, 10**6)] = 320
    """Images to use, spread over the data set; a fifth of them is held out to check the result."""
    search: Annotated[
        SearchConfig,
        Nested({"passes": "search_passes", "seed": "search_seed"}, without=("batch_size",), group="search"),
    ] = SearchConfig()
    limits: Annotated[ScheduleLimits, Nested(group="search")] = ScheduleLimits()
    timing: Annotated[
        TimingConfig, Nested({"batch_size": "timing_batch"}, without=("engine", "precision"), group="search")
    ] = TimingConfig()
    output: Path | None = None
    """Write the recipe here, as JSON; a curve becomes one file per recipe, with its share of the MACs in the name."""


def main(arguments: Sequence[str]) -> None:
    command = with_flags(Tune, [*target_flags(), *measure_flags()])
    flags, chosen = parse_with_method(command, arguments, uses_model_default=False)
    check_weights(flags)
    check_engine(flags.engine, flags.precision, flags.device)
    targets = targets_of(flags)
    check_writable(flags.output, flags.html)
    model = make_model(flags)
    method = chosen.for_model(model)
    measure = measure_of_flags(flags, model)
    targets = [dataclasses.replace(target, measure=measure) for target in targets]
    for target in targets:
        target.bound(measure)  # raises, before images are read, if the measure has no such figure
    images, unreadable = read_images(flags, model, flags.images, min_images(measure))
    images = images.to(next(model.parameters()).device)
    limits, timing = schedule_limits(flags), timing_of(flags)
    for target in targets:  # before there is a journal
        check_request(model, images, target, method=method, limits=limits, timing=timing)
    run = {**identity_of(flags, targets), "method": method.to_dict(), **measure.settings()}
    with open_journal(flags, flags.output, flags.model, model, images, **run) as journal, _tuning_bar() as progress:
        recipes = curve(
            model,
            images,
            targets,
            method=method,
            search=dataclasses.replace(flags.search, batch_size=flags.batch_size),
            limits=limits,
            timing=timing,
            tracking=Tracking(progress, journal),
        )
        data = flags.dataset or (flags.data_dir.name if flags.data_dir else "embedded")
        recipes = [recipe.labelled(model=public_name(flags.model), data=data) for recipe in recipes]
        for path, recipe in recipe_files(flags, recipes).items():
            write_atomically(path, recipe.to_json())
        if journal is not None and recipes[-1].provenance.interrupted:
            journal.keep_when_done = True
    tell(flags, arguments, method, recipes)
    check_readable(unreadable)


def targets_of(flags: Tune) -> list[Target]:
    """The targets of the flags: one, or those of a curve."""
    if not flags.curve:
        return [target_of_flags(flags, DEFAULT_TARGET)]
    if any(getattr(flags, name) is not None for name in target_bounds()):
        raise GTPError("--curve sets its own targets; remove the target")
    return [Target("macs", share) for share in CURVE_FRACTIONS]


def schedule_limits(flags: Tune) -> ScheduleLimits:
    """Limits of the schedule: in an engine few layers and aligned numbers, unless the flags say otherwise."""
    if flags.engine == TORCH:
        return flags.limits
    return ScheduleLimits(flags.limits.max_layers or DEPLOY_LAYERS, flags.limits.multiple_of or DEPLOY_MULTIPLE)


def timing_of(flags: Tune) -> TimingConfig:
    return dataclasses.replace(flags.timing, engine=flags.engine, precision=flags.precision)


def identity_of(flags: Tune, targets: Sequence[Target]) -> dict[str, Any]:
    """Settings that must be equal for a search to be resumed. A longer one may reuse a shorter one's figures."""
    run: dict[str, Any] = {
        "target": {target.name: target.value for target in targets} if not flags.curve else {},
        "curve": flags.curve,
        "limits": schedule_limits(flags),
        "calibrate": flags.search.calibrate,
        "seed": flags.search.seed,
        "batch_size": flags.batch_size,
    }
    if targets[0].name == "speedup":  # only times depend on threads
        run |= {"threads": torch.get_num_threads(), "timing": timing_of(flags)}
    return run


def recipe_files(flags: Tune, recipes: Sequence[Recipe]) -> dict[Path, Recipe]:
    """Recipes by the file they go into; those of a curve have their fraction of the MACs in the name."""
    if flags.output is None:
        return {}
    if not flags.curve:
        return {flags.output: recipes[0]}
    output = flags.output
    return {output.with_name(f"{output.stem}-{r.provenance.target['macs']}{output.suffix}"): r for r in recipes}


def tell(flags: Tune, arguments: Sequence[str], method: Method, recipes: Sequence[Recipe]) -> None:
    """Print the recipes' figures, and write the page."""
    write_page(flags, arguments, flags.html, f"{flags.model}, tuned", f"{method.name}.", recipe_sections(recipes))
    text = explain_recipes(recipes)
    if flags.output is not None:
        text += f"\nWritten: {', '.join(map(str, recipe_files(flags, recipes)))}"
    result = [recipe.to_dict() for recipe in recipes]
    print_result(flags, result, (f"{flags.model}, {method.name}", *recipe_table(recipes)), text=text)


@contextmanager
def _tuning_bar() -> Iterator[Any]:
    with render.progress("tuning") as update:

        def report(now: Progress) -> None:
            update(round(1000 * now.done), 1000, best=f"{now.title} {now.damage:.4f} at {now.fraction:.3f} of the MACs")

        yield report
