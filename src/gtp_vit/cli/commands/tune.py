"""gtp-vit tune: give a target, get a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import EngineFlags, check_engine
from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.measure_flags import MeasureFlags, chosen_measure, measure_flags, with_flags
from gtp_vit.cli.model_flags import DataFlags, check_weights, make_model, read_images
from gtp_vit.cli.output import OutputFlags, ResumeFlags, answer, check_readable, open_journal, write_page
from gtp_vit.cli.parser import Range
from gtp_vit.engines import TORCH
from gtp_vit.errors import GTPError
from gtp_vit.models.sources import public_name
from gtp_vit.recipes.defaults import DEFAULT, DEFAULT_SHARE, DEPLOY_LAYERS, DEPLOY_MULTIPLE
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.report.tuned import explain_recipes, recipe_sections, recipe_table
from gtp_vit.runs.files import check_writable, write_atomically
from gtp_vit.tuning.local_search import fewest_images
from gtp_vit.tuning.space import Limits
from gtp_vit.tuning.tune import (
    TARGETS,
    Progress,
    check_request,
    check_search,
    check_target,
    curve,
    the_target,
    tune,
)

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)


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

    method: str = DEFAULT.name
    """A method that has a schedule, such as gtp_plus, gtp or tome; its settings are where the search begins."""
    learn: bool = True
    """First learn what matters to the model, by a backward pass an image; gtp_plus alone does."""
    macs: float | None = None
    """Target: share of the unreduced model's MACs."""
    speedup: float | None = None
    """Target: speed-up over the unreduced model, measured on this machine at --timing-batch."""
    max_kl: float | None = None
    """Target: the cheapest schedule whose KL divergence to the unreduced model is at most this."""
    min_agreement: float | None = None
    """Target: the cheapest schedule that agrees with the unreduced model on at least this percentage of images."""
    min_cosine: float | None = None
    """Target: the cheapest schedule whose embeddings, or with --measure dense features, have at least this cosine."""
    min_neighbours: float | None = None
    """Target: the cheapest schedule that keeps at least this percentage of the 10 nearest neighbours of an image."""
    max_error: float | None = None
    """Target: the cheapest schedule with at most this relative error, of numbers or of features."""
    curve: bool = False
    """Tune at 0.9, 0.8, 0.7, 0.6 and 0.5 of the MACs instead, and write all the recipes."""
    images: Annotated[int, Range(1, 10**6)] = 320
    """Images to use, spread over the data set; a fifth of them is held out to check the result."""
    evaluations: int = 150
    """How often the search goes through its images."""
    minutes: float = 0
    """End the search after this many minutes; 0 = no limit."""
    max_layers: Annotated[int | None, Range(1, 1000)] = None
    """Largest number of layers that remove tokens; by default all, in an engine 3, as each costs time of its own."""
    multiple_of: Annotated[int | None, Range(1, 1024)] = None
    """Keep numbers of tokens that are multiples of this, which some accelerators need; by default 1, in an engine 8."""
    timing_batch: Annotated[int, Range(1, 65536)] = 8
    """Images in a batch where speed is measured."""
    search_seed: int = 0
    """Seed of the search; --seed is a setting of some methods."""
    output: Path | None = None
    """Write the recipe here, as JSON; a curve becomes one file per recipe, with its share of the MACs in the name."""


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(with_flags(Tune, measure_flags()), words, by_model=False)
    check_weights(flags)
    check_engine(flags.engine, flags.precision, flags.device)
    targets: dict[str, Any] = {key: getattr(flags, key) for key in TARGETS if getattr(flags, key) is not None}
    if flags.curve and targets:
        raise GTPError("--curve has targets of its own; leave out the other")
    if not flags.curve:
        targets = dict([the_target(targets or {"macs": DEFAULT_SHARE})])
    check_search(flags.evaluations, flags.minutes, flags.batch_size, flags.timing_batch)
    check_writable(flags.output, flags.report)
    model = make_model(flags)
    method = chosen.for_model(model)
    measure = chosen_measure(flags, model)
    for goal in targets:
        check_target(goal, measure)  # before images are read
    images, unreadable = read_images(flags, model, flags.images, fewest_images(measure))
    images = images.to(next(model.parameters()).device)
    settings: dict[str, Any] = {
        "method": method,
        "learn": flags.learn,
        "measure": measure,
        "limits": limits_of(flags),
        "engine": flags.engine,
        "precision": flags.precision,
        "evaluations": flags.evaluations,
        "minutes": flags.minutes,
        "seed": flags.search_seed,
        "timing_batch": flags.timing_batch,
        "batch_size": flags.batch_size,
        "name": public_name(flags.model),
        "data": flags.dataset or (flags.data_dir.name if flags.data_dir else "embedded"),
    }
    asked = {key: settings[key] for key in ("method", "limits", "engine", "precision")}
    for wanted in [{"macs": share} for share in SHARES] if flags.curve else [targets]:
        check_request(model, images, wanted, measure, **asked)  # before there is a journal
    # A longer search may reuse what was measured. Only times depend on threads.
    timed: dict[str, Any] = {}
    if flags.speedup:
        timed = {"threads": torch.get_num_threads(), "timing_batch": flags.timing_batch}
        timed |= {} if flags.engine == TORCH else {"engine": flags.engine, "precision": flags.precision}
    run = {"method": method.to_dict(), "learn": flags.learn, "target": targets, "limits": settings["limits"]}
    run |= {"seed": flags.search_seed, "curve": flags.curve, "batch_size": flags.batch_size, **timed}
    run |= measure.settings()
    with open_journal(flags, flags.output, flags.model, model, images, **run) as journal, _tuning_bar() as progress:
        settings |= {"journal": journal, "progress": progress}
        if flags.curve:
            recipes = curve(model, images, SHARES, **settings)
        else:
            recipes = [tune(model, images, **targets, **settings)]
        for path, recipe in written(flags, recipes).items():
            write_atomically(path, recipe.to_json())
        if journal is not None and recipes[-1].found["interrupted"]:
            journal.keep = True
    write_page(flags, words, flags.report, f"{flags.model}, tuned", f"{method.name}.", recipe_sections(recipes))
    text = explain_recipes(recipes)
    if flags.output is not None:
        text += f"\nWritten: {', '.join(map(str, written(flags, recipes)))}"
    result = [recipe.to_dict() for recipe in recipes]
    answer(flags, result, (f"{flags.model}, {method.name}", *recipe_table(recipes)), text=text)
    check_readable(unreadable)


def limits_of(flags: Tune) -> Limits:
    """What the schedule must respect: in an engine few layers and aligned numbers, unless the flags say otherwise."""
    layers, multiple = (None, 1) if flags.engine == TORCH else (DEPLOY_LAYERS, DEPLOY_MULTIPLE)
    return Limits(flags.max_layers or layers, flags.multiple_of or multiple)


def written(flags: Tune, recipes: Sequence[Recipe]) -> dict[Path, Recipe]:
    """Which recipe goes into which file; those of a curve have their share of the MACs in the name."""
    if flags.output is None:
        return {}
    if not flags.curve:
        return {flags.output: recipes[0]}
    output = flags.output
    return {output.with_name(f"{output.stem}-{r.found['target']['macs']}{output.suffix}"): r for r in recipes}


@contextmanager
def _tuning_bar() -> Iterator[Any]:
    with render.progress("tuning") as update:

        def report(now: Progress) -> None:
            update(round(1000 * now.done), 1000, best=f"{now.title} {now.damage:.4f} at {now.share:.3f} of the MACs")

        yield report
