"""gtp-vit compare: which method is best for my model at this budget?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import nn

from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.measure_flags import MeasureFlags, measure_flags, measure_of_flags, with_flags
from gtp_vit.cli.model_flags import DataFlags, check_weights, data_settings, make_dataset, make_model, read_images
from gtp_vit.cli.output import (
    JsonFlags,
    ResumeFlags,
    check_complete,
    check_is_folder,
    check_readable,
    model_columns,
    open_journal,
    print_result,
    write_page,
)
from gtp_vit.core.ranges import Range
from gtp_vit.data.loader import take_images
from gtp_vit.errors import GTPError, plural
from gtp_vit.metrics.base import Measure
from gtp_vit.models.sources import public_name
from gtp_vit.profiling.macs import macs
from gtp_vit.recipes.recipe import Recipe, read_recipe
from gtp_vit.report.comparison import comparison_rows, comparison_sections, comparison_table
from gtp_vit.report.results import write_results
from gtp_vit.report.scores import explain_scores
from gtp_vit.runs.files import check_writable, write_atomically
from gtp_vit.tuning.all_methods import tunable_methods, tune_all_methods
from gtp_vit.tuning.compare import (
    ComparisonEntry,
    budgets_of,
    check_plans,
    compare,
    models_of,
    plan_comparison,
    traces_at_tightest_budget,
    with_timings,
)
from gtp_vit.tuning.local_search import MIN_IMAGES, min_images
from gtp_vit.tuning.settings import SearchConfig, Tracking

SHARE = Range(0, 1, exclude_low=True, why="(a share of the unreduced model's)")


@dataclass(frozen=True)
class Compare(JsonFlags, MeasureFlags, ResumeFlags, DataFlags):
    """All methods at equal MACs on the same images: damage, GMACs and speed, as a table and a page.

    Damage is what the measure for the model's kind of output says: of classes KL and agreement, of embeddings cosines
    and nearest neighbours; --measure dense compares restored features patch by patch.

    Each method's own work and the shortened last block are counted. Settings are found from the MACs: a budget is a
    share of the unreduced model's, or the cost of GTP at a given number of propagated tokens per layer.

    examples:
      gtp-vit compare --output compared
      gtp-vit compare vit_tiny_patch16_224 --pretrained --data-dir imagenet/val --gtp-budgets 8 14 --output compared
      gtp-vit compare deit_small_patch16_224 --pretrained --data-dir val --macs 0.65 --methods gtp tome evit
      gtp-vit compare vit_small_patch14_dinov2 --pretrained --data-dir images --output encoders
      gtp-vit compare deit_small_patch16_224 --pretrained --data-dir val --tuned --calibration-dir train --output both
    """

    methods: tuple[str, ...] = ()
    """Names of methods; all that fit the model if none is given."""
    macs: Annotated[tuple[float, ...], SHARE] = ()
    """Budgets as shares of the unreduced model's MACs."""
    gtp_budgets: tuple[int, ...] = ()
    """Budgets as the MACs of GTP with this many propagated tokens per layer. Without any budget: 0.8, 0.65 and 0.55."""
    recipes: tuple[str, ...] = ()
    """Files that gtp-vit tune wrote, or names of recipes in the package, to compare as well."""
    tuned: bool = False
    """Also search a schedule for every method that has one, at each budget, on the same images with as many passes."""
    calibration_dir: Path | None = None
    """Images for --tuned, without labels; not those that are compared."""
    tuning_images: Annotated[int, Range(MIN_IMAGES, 10**6)] = 160
    """How many of them to use, spread over the folder."""
    search_passes: Annotated[int, Range(1, 10**6)] = 30
    """Passes of each search over them."""
    rounds: Annotated[int, Range(0, 10**6)] = 7
    """Timing rounds per model, interleaved; 0 = no timing."""
    timing_batch: Annotated[int, Range(1, 65536)] = 8
    """Images in a batch while timing."""
    output: Path | None = None
    """Folder for results.csv, results.json and report.html; an interrupted run resumes from there."""


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(with_flags(Compare, measure_flags()), arguments)
    check_weights(flags)
    if 0 < flags.rounds < 3:
        raise GTPError(f"--rounds is {flags.rounds}; give 0, or at least 3 for a median with a spread")
    check_tuning(flags)
    if flags.output is not None:
        check_is_folder(flags.output)
        check_writable(*(flags.output / name for name in ("results.csv", "results.json", "report.html")))
    model = make_model(flags)
    measure = measure_of_flags(flags, model)
    make_dataset(flags, model, labels=measure.needs_labels)  # refused, if it is, before anything is searched
    whole = macs(model).total
    budgets = [share * whole for share in flags.macs] + budgets_of(model, flags.gtp_budgets)
    budgets = budgets or [share * whole for share in (0.8, 0.65, 0.55)]
    with contextlib.ExitStack() as journals:  # the one of the searches is kept until everything is written
        searched = tunable_methods(flags.methods) if flags.tuned else []
        recipes = [read_recipe(recipe) for recipe in flags.recipes]
        plans, left_out = plan_comparison(model, flags.methods, budgets, recipes, searched)  # refuses before the search
        if flags.tuned:
            tuned, not_tuned = tune_all(flags, model, measure, budgets, journals)
            plans, left_out = plan_comparison(model, flags.methods, budgets, [*recipes, *tuned], searched)
            left_out += not_tuned
        check_plans(plans, left_out)
        run(flags, arguments, model, measure, plans, left_out)


def run(
    flags: Compare,
    arguments: Sequence[str],
    model: nn.Module,
    measure: Measure,
    plans: list[ComparisonEntry],
    left_out: list[str],
) -> None:
    """Measure what is planned, and write it down."""
    results = None if flags.output is None else flags.output / "results.csv"
    dataset = make_dataset(flags, model, labels=measure.needs_labels)
    models = models_of(model, plans, restore=measure.restores)
    settings: dict[str, object] = {"plans": {p.name: None if p.method is None else p.method.to_dict() for p in plans}}
    settings |= measure.settings()
    timing_images = take_images(dataset, flags.timing_batch, model)
    with open_journal(flags, results, flags.model, models, dataset, **settings, batch_size=flags.batch_size) as journal:
        with render.progress("comparing") as progress:
            rows, evaluation = compare(
                models,
                plans,
                dataset,
                batch_size=flags.batch_size,
                workers=flags.workers,
                measure=measure,
                journal=journal,
                progress=progress,
            )
        rows = with_timings(rows, models, timing_images, flags.rounds)
        stored = comparison_rows(model_columns(flags.model, model, data_settings(flags)), rows, evaluation)
        text = [explain_scores(evaluation), *(f"Left out: {reason}" for reason in left_out)]
        if flags.output is not None:
            for name in ("results.csv", "results.json"):
                write_results(flags.output / name, stored)
            traces = traces_at_tightest_budget(model, rows, timing_images[:1])
            sections = comparison_sections(rows, evaluation, timing_images, traces, left_out)
            lead = f"All methods at equal MACs on the same {plural(evaluation.scores[0].images, 'image', 'images')}."
            title = f"Token reduction on {flags.model}"
            write_page(flags, arguments, flags.output / "report.html", title, lead, sections)
            text.append(f"Written: {flags.output / 'report.html'}, results.csv, results.json")
    result = {"flags": flags, "rows": stored, "unreadable": evaluation.unreadable, "left_out": left_out}
    print_result(flags, result, (flags.model, *comparison_table(rows, evaluation)), text="\n".join(text))
    check_complete(evaluation)


def check_tuning(flags: Compare) -> None:
    """Refuse flags of tuning that make no sense."""
    if flags.tuned == (flags.calibration_dir is None):
        raise GTPError("--tuned and --calibration-dir go together; the folder has images to tune on, without labels")
    folders = [folder.resolve() for folder in (flags.calibration_dir, flags.data_dir) if folder is not None]
    if len(folders) == 2 and folders[0] == folders[1]:
        raise GTPError("--calibration-dir is --data-dir; tune on other images than those that are compared")


def tune_all(
    flags: Compare, model: nn.Module, measure: Measure, budgets: Sequence[float], journals: contextlib.ExitStack
) -> tuple[list[Recipe], list[str]]:
    """A recipe of each method that has a schedule at each budget, written beside the results."""
    source = dataclasses.replace(flags, data_dir=flags.calibration_dir, dataset="", limit=0)
    images, unreadable = read_images(source, model, flags.tuning_images, min_images(measure))
    check_readable(unreadable)
    images = images.to(next(model.parameters()).device)
    search = SearchConfig(passes=flags.search_passes, batch_size=flags.batch_size)
    journal_path = None if flags.output is None else flags.output / "tuning"
    journal = journals.enter_context(
        open_journal(flags, journal_path, flags.model, model, images, search=search, **measure.settings())
    )
    with render.progress("tuning") as progress:
        recipes, left_out = tune_all_methods(
            model,
            images,
            tunable_methods(flags.methods),
            budgets,
            measure=measure,
            search=search,
            tracking=Tracking(journal=journal),
            progress=progress,
        )
    data = flags.calibration_dir.name if flags.calibration_dir else ""
    recipes = [recipe.labelled(model=public_name(flags.model), data=data) for recipe in recipes]
    for recipe in recipes if flags.output is not None else ():
        assert flags.output is not None
        share = recipe.provenance.target["macs"]
        write_atomically(flags.output / f"tuned-{recipe.method.name}-{share:.4f}.json", recipe.to_json())
    return recipes, left_out
