"""gtp-vit compare: which method is best for my model at this budget?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gtp_vit.cli import render
from gtp_vit.cli.evaluate import (
    change_text,
    check_complete,
    explanation,
    kl_text,
    result_row,
    with_bounds,
    write_results,
)
from gtp_vit.cli.flags import parse
from gtp_vit.cli.output import command
from gtp_vit.cli.resume import ResumeFlags, open_journal
from gtp_vit.cli.source import DataFlags, check_weights, make_dataset, make_model
from gtp_vit.errors import GTPError, check_range
from gtp_vit.inputs.data import first_images
from gtp_vit.measure.benchmark import Timing
from gtp_vit.measure.class_output import check_class_output
from gtp_vit.measure.evaluate import Evaluation
from gtp_vit.measure.macs import macs
from gtp_vit.measure.trace import trace
from gtp_vit.patch import patch
from gtp_vit.recipes import read_recipe
from gtp_vit.runs.files import check_writable
from gtp_vit.search.compare import Plan, Row, budgets_of, compare, models_of, plan
from gtp_vit.show.page import Section, paragraph, picture, table, write_report
from gtp_vit.show.pictures import panels, png
from gtp_vit.show.plot import curves


@dataclass(frozen=True)
class Compare(ResumeFlags, DataFlags):
    """All methods at equal MACs on the same images: accuracy, agreement, KL, GMACs and speed, as a table and a page.

    Each method's own work and the shortened last block are counted. Settings are found from the MACs: a budget is a
    share of the unreduced model's, or what GTP takes that propagates so many tokens a layer.

    examples:
      gtp-vit compare --output compared
      gtp-vit compare vit_tiny_patch16_224 --pretrained --data-dir imagenet/val --at-propagate 8 14 --output compared
      gtp-vit compare deit_small_patch16_224 --pretrained --data-dir val --macs 0.65 --methods gtp tome evit
    """

    methods: tuple[str, ...] = ()
    """Names of methods; all that fit the model if none is given."""
    macs: tuple[float, ...] = ()
    """Budgets as shares of the unreduced model's MACs."""
    at_propagate: tuple[int, ...] = ()
    """Budgets as the MACs of GTP with so many propagated tokens a layer. Without any budget: 0.8, 0.65 and 0.55."""
    recipes: tuple[str, ...] = ()
    """Files that gtp-vit tune wrote, or names of recipes in the package, to compare as well."""
    rounds: int = 7
    """How often each model is timed, interleaved; 0 does not time."""
    timing_batch: int = 8
    """Images in a batch while timing."""
    output: Path | None = None
    """Folder for results.csv, results.json and report.html; an interrupted run resumes from there."""
    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> None:
    flags = parse(Compare, words)
    check_weights(flags)
    check_range("--rounds", flags.rounds, 0, 10**6, whole=True)
    check_range("--timing-batch", flags.timing_batch, 1, 65536, whole=True)
    if 0 < flags.rounds < 3:
        raise GTPError(f"--rounds is {flags.rounds}; give 0, or at least 3 for a median with a spread")
    for share in flags.macs:
        check_range("--macs", share, 0, 1, above_low=True, why="(a share of the unreduced model's)")
    results = None if flags.output is None else flags.output / "results.csv"
    if flags.output is not None:
        check_writable(*(flags.output / name for name in ("results.csv", "results.json", "report.html")))
    model = make_model(flags)
    check_class_output(model)
    dataset = make_dataset(flags, model)
    whole = macs(model).total
    budgets = [share * whole for share in flags.macs] + budgets_of(model, flags.at_propagate)
    budgets = budgets or [share * whole for share in (0.8, 0.65, 0.55)]
    plans, left_out = plan(model, flags.methods, budgets, [read_recipe(recipe) for recipe in flags.recipes])
    models = models_of(model, plans)
    settings = {"plans": {p.name: None if p.method is None else p.method.to_dict() for p in plans}}
    timing_images = first_images(dataset, flags.timing_batch, model)
    with open_journal(flags, results, flags.model, models, dataset, **settings, batch_size=flags.batch_size) as journal:
        with render.progress("comparing") as progress:
            rows, found = compare(
                models,
                plans,
                dataset,
                batch_size=flags.batch_size,
                workers=flags.workers,
                rounds=flags.rounds,
                timing_images=timing_images,
                journal=journal,
                progress=progress,
            )
        behind = against_best(plans, found)
        stored = [_stored(flags, model, row, plans, found) | behind[row.plan.name] for row in rows]
        if flags.output is not None:
            write_results(flags.output / "results.csv", stored)
            write_results(flags.output / "results.json", stored)
            sections = report_sections(flags, model, rows, found, timing_images)
            if left_out:
                sections.append(Section("Left out", "".join(paragraph(text) for text in left_out)))
            lead = f"All methods at equal MACs on the same {found.scores[0].images} images."
            title = f"Token reduction on {flags.model}"
            write_report(flags.output / "report.html", title, lead, sections, command("compare", words))
    if flags.json:
        render.as_json({"flags": flags, "rows": stored, "unreadable": found.unreadable, "left_out": left_out})
    else:
        render.table(flags.model, *comparison_table(rows))
        render.say("\n".join([explanation(found), *(f"Left out: {text}" for text in left_out)]))
        if flags.output is not None:
            print(f"Written: {flags.output / 'report.html'}, results.csv, results.json")
    check_complete(found)


def comparison_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, as text."""
    columns = [
        "method",
        "GMACs",
        "top-1 %",
        "change",
        "agreement %",
        "KL to unreduced",
        "speed-up",
        "img/s",
        "settings",
    ]
    cells = []
    for row in rows:
        score = row.score
        cells.append(
            [
                row.plan.label,
                f"{row.plan.macs / 1e9:.3f}" if row.plan.macs > 1e8 else f"{row.plan.macs / 1e9:.4f}",
                f"{score.top1.value:.2f}",
                change_text(score.top1_change),
                f"{score.agreement.value:.2f}",
                kl_text(score),
                "not timed" if row.timing is None else _speed(row.timing),
                "not timed" if row.rate is None else f"{row.rate:.1f}",
                "" if row.plan.method is None else str(row.plan.method),
            ]
        )
    return columns, cells


def _speed(timing: Timing) -> str:
    low, high = timing.speedup_quartiles
    return f"{timing.speedup:.2f} ({low:.2f} .. {high:.2f})"


def report_sections(
    flags: Compare, model: Any, rows: Sequence[Row], found: Evaluation, images: torch.Tensor
) -> list[Section]:
    """The page: plots of KL, accuracy and speed over MACs, the table, and pictures of the tokens."""
    reduced = [row for row in rows if row.plan.method is not None]
    names = list(dict.fromkeys(row.plan.label for row in reduced))

    def series(x: Any, y: Any) -> dict[str, list[tuple[float, float]]]:
        return {name: [(x(row), y(row)) for row in reduced if row.plan.label == name] for name in names}

    def cost(row: Row) -> float:
        return row.plan.macs / rows[0].plan.macs

    def top1(row: Row) -> float:
        return row.score.top1.value

    share = "MACs, as a share of the unreduced model's"
    sections = [
        Section(
            "Damage over cost",
            curves(series(cost, lambda row: row.score.kl.value), share, "KL to the unreduced model", log_y=True)
            + paragraph("Lower is better: how far the class probabilities are from the unreduced model's.")
            + curves(series(cost, top1), share, "top-1 accuracy, %"),
        )
    ]
    if all(row.timing is not None for row in reduced):
        pareto = series(lambda row: row.timing.speedup, top1)
        text = f"Interleaved medians at batch {len(images)}, {torch.get_num_threads()} threads."
        sections.append(
            Section("Accuracy over speed", curves(pareto, "speed-up", "top-1 accuracy, %") + paragraph(text))
        )
    columns, cells = comparison_table(rows)
    finite = [index for index in range(1, len(rows)) if not rows[index].score.not_finite]
    best = min(finite, key=lambda index: rows[index].score.kl.value, default=None)
    cautions = {p.method.caution() for p in (row.plan for row in reduced) if p.method is not None} - {None}
    notes = "".join(paragraph(str(caution)) for caution in sorted(map(str, cautions)))
    text = f"{explanation(found)} Speed-ups are medians, with the middle half of the rounds. Marked: the least KL."
    sections.append(Section("All figures", table(columns, cells, best) + paragraph(text) + notes))
    sections.append(Section("What is left of an image", token_pictures(flags, model, reduced, images)))
    return sections


def token_pictures(flags: Compare, model: Any, rows: Sequence[Row], images: torch.Tensor) -> str:
    """One image through each method at the tightest budget."""
    from PIL import Image

    tightest = min(row.plan.budget for row in rows)
    shown = []
    pixels = images[0].float().cpu()
    pixels = (pixels - pixels.amin()) / (pixels.amax() - pixels.amin()).clamp(min=1e-6)
    array = (255 * pixels.expand(3, -1, -1)).byte().permute(1, 2, 0).numpy()
    for row in rows:
        if row.plan.budget != tightest or row.plan.method is None:
            continue
        found = trace(patch(model, row.plan.method, quiet=True), images[:1])
        depth = len(found.layers)
        drawn = panels(Image.fromarray(array), found, [depth // 4, depth // 2, 3 * depth // 4, depth - 1])
        shown.append(
            picture(
                png(drawn), f"{row.plan.method}: above what is left, with sizes, below which patches share a token."
            )
        )
    return "".join(shown)


def _stored(flags: Compare, model: Any, row: Row, plans: Sequence[Plan], found: Evaluation) -> dict[str, Any]:
    cost = {p.name: p.macs for p in plans}
    stored = result_row(flags, model, row.plan.name, cost, found)
    stored["method"] = "" if row.plan.method is None else row.plan.label
    stored["budget_gmacs"] = round(row.plan.budget / 1e9, 6)
    stored["speedup"] = None if row.timing is None else round(row.timing.speedup, 4)
    stored["images_per_second"] = None if row.rate is None else round(row.rate, 2)
    stored["settings"] = {} if row.plan.method is None else row.plan.method.to_dict()
    return stored


def against_best(plans: Sequence[Plan], found: Evaluation) -> dict[str, dict[str, Any]]:
    """How far each is from the plan with the least KL at the same budget, with paired intervals."""
    kl = {score.name: math.inf if score.not_finite else score.kl.value for score in found.scores}
    best = {}
    for own in plans:
        rivals = [plan.name for plan in plans if plan.method is not None and plan.budget == own.budget] or [own.name]
        best[own.name] = min(rivals, key=kl.__getitem__)
    behind: dict[str, dict[str, Any]] = {name: {"best_at_budget": other} for name, other in best.items()}
    wanted = [(name, other, figure) for name, other in best.items() for figure in ("kl", "agreement", "top1")]
    for (name, _, figure), interval in zip(wanted, found.differences(wanted), strict=True):
        behind[name] |= with_bounds(f"{figure}_minus_best", interval)
    return behind
