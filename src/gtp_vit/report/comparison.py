"""comparison: methods at equal MACs as lines of a results file, a table, and the sections of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gtp_vit.core.reducer import Method
from gtp_vit.metrics.evaluate import Evaluation
from gtp_vit.profiling.trace import Trace
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.plot import Point, line_plot
from gtp_vit.report.results import Table, row_as_text
from gtp_vit.report.scores import ModelColumns, explain_scores, figure_text, score_row, with_bounds
from gtp_vit.report.tokens import prepared_picture, token_picture
from gtp_vit.tuning.compare import ComparisonRow


def comparison_rows(
    model: ModelColumns, rows: Sequence[ComparisonRow], evaluation: Evaluation
) -> list[dict[str, object]]:
    """The lines of a results file, each with its distance to the best plan of its budget."""
    behind = _distance_to_best(rows, evaluation)
    return [
        score_row(model, evaluation, row.entry.name, row.entry.macs)
        | {
            "method": "" if row.entry.method is None else row.entry.label,
            "budget_gmacs": round(row.entry.budget / 1e9, 6),
            "speedup": None if row.timing is None else round(row.timing.speedup, 4),
            "images_per_second": None if row.rate is None else round(row.rate, 2),
            "settings": {} if row.entry.method is None else row.entry.method.to_dict(),
        }
        | behind[row.entry.name]
        for row in rows
    ]


def _distance_to_best(rows: Sequence[ComparisonRow], evaluation: Evaluation) -> dict[str, dict[str, object]]:
    """The distance of each entry to the one with the least damage at the same budget, with paired intervals."""
    damage = {score.name: math.inf if score.not_finite else score.damage.value for score in evaluation.scores}
    plans = [row.entry for row in rows]
    best = {}
    for own in plans:
        rivals = [plan.name for plan in plans if plan.method is not None and plan.budget == own.budget] or [own.name]
        best[own.name] = min(rivals, key=damage.__getitem__)
    behind: dict[str, dict[str, object]] = {name: {"best_at_budget": other} for name, other in best.items()}
    figures = [f.name for f in evaluation.figures() if f.brief and not f.change and not f.quantile]
    comparisons = [(name, other, figure) for name, other in best.items() for figure in reversed(figures)]
    for (name, _, figure), interval in zip(comparisons, evaluation.differences(comparisons), strict=True):
        behind[name] |= with_bounds(f"{figure}_minus_best", interval)
    return behind


def comparison_table(rows: Sequence[ComparisonRow], evaluation: Evaluation) -> Table:
    """A row for each plan."""
    figures = [figure for figure in evaluation.figures() if figure.brief]
    columns = ["method", "GMACs", *(figure.title for figure in figures), "speed-up", "img/s", "settings"]
    cells = []
    for row in rows:
        plan, score, speed = row.entry, row.score, "not timed"
        if row.timing is not None:
            low, high = row.timing.speedup_quartiles
            speed = f"{row.timing.speedup:.2f} ({low:.2f} .. {high:.2f})"
        gmacs = f"{plan.macs / 1e9:.{3 if plan.macs > 1e8 else 4}f}"
        measured = [figure_text(score, figure) for figure in figures]
        rate = "not timed" if row.rate is None else f"{row.rate:.1f}"
        settings = "" if plan.method is None else str(plan.method)
        cells.append([plan.label, gmacs, *measured, speed, rate, settings])
    return columns, cells


def comparison_sections(
    rows: Sequence[ComparisonRow],
    evaluation: Evaluation,
    images: Tensor,
    traces: Sequence[tuple[Method, Trace]],
    left_out: Sequence[str],
) -> list[Section]:
    """Plots of damage, quality and speed over MACs, the table, pictures of the tokens, and what was left out.

    `images` are those that were timed; `traces` are of the first of them.
    """
    reduced = [row for row in rows if row.entry.method is not None]
    names = list(dict.fromkeys(row.entry.label for row in reduced))
    columns, cells = comparison_table(rows, evaluation)
    texts = {row.entry.name: row_as_text(columns, line) for row, line in zip(rows, cells, strict=True)}

    def series(x: Callable[[Any], float], y: Callable[[Any], float]) -> dict[str, list[Point]]:
        return {
            name: [Point(x(row), y(row), texts[row.entry.name]) for row in reduced if row.entry.label == name]
            for name in names
        }

    def cost(row: ComparisonRow) -> float:
        return row.entry.macs / rows[0].entry.macs

    damage = evaluation.measure.metric(evaluation.measure.damage)
    shown = next((figure for figure in evaluation.figures() if figure.name == evaluation.measure.headline), damage)

    def quality(row: ComparisonRow) -> float:
        return row.score[shown.name].value

    share = "MACs, as a share of the unreduced model's"
    drawn = line_plot(series(cost, lambda row: row.score.damage.value), share, damage.title, log_y=True)
    drawn += paragraph(f"Lower is better. {evaluation.measure.explanation}")
    if shown is not damage:
        drawn += line_plot(series(cost, quality), share, shown.title)
    sections = [Section("Damage over cost", drawn)]
    if all(row.timing is not None for row in reduced):
        pareto = line_plot(series(lambda row: row.timing.speedup, quality), "speed-up", shown.title)
        text = f"Interleaved medians at batch {len(images)}, {torch.get_num_threads()} threads."
        sections.append(Section(f"{shown.title} over speed", pareto + paragraph(text)))
    finite = [index for index in range(1, len(rows)) if not rows[index].score.not_finite]
    best = min(finite, key=lambda index: rows[index].score.damage.value, default=None)
    cautions = {row.entry.method.warning() for row in reduced if row.entry.method is not None} - {None}
    text = (
        f"{explain_scores(evaluation)} Speed-ups are medians, with the middle half of the rounds. Marked: the least "
        f"{damage.title}."
    )
    notes = "".join(map(paragraph, [text, *sorted(map(str, cautions))]))
    sections.append(Section("All figures", table(columns, cells, best) + notes))
    image = prepared_picture(images[0])
    caption = "above what is left, with sizes, below which patches share a token."
    drawn = "".join(token_picture(image, trace, f"{method}: {caption}") for method, trace in traces)
    sections.append(Section("What is left of an image", drawn))
    return sections + ([Section("Left out", "".join(map(paragraph, left_out)))] if left_out else [])
