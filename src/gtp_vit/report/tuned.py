"""Recipes that a search found as a table, a sentence, and the sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gtp_vit.metrics.base import Metric
from gtp_vit.metrics.registry import MEASURES
from gtp_vit.recipes.provenance import SampleFigures
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.plot import Point, line_plot
from gtp_vit.report.results import Table, row_as_text


def recipe_table(recipes: Sequence[Recipe]) -> Table:
    """A row for each recipe: what it costs and what it changes."""
    shown = _figures(recipes)
    titles = [figure.title for figure in shown]
    columns = ["GMACs", "fraction", *titles, *(f"held-out {title}" for title in titles), "speed-up", "settings"]
    cells = []
    for recipe in recipes:
        measured, held_out = recipe.measured, _held_out(recipe)
        both = [_text(part, figure) for part in (measured.figures, held_out.figures) for figure in shown]
        speed = "not timed" if measured.speedup is None else f"{measured.speedup.median:.2f}"
        costs = [f"{(measured.macs or 0) / 1e9:.4f}", f"{measured.fraction:.3f}"]
        cells.append([*costs, *both, speed, str(recipe.method)])
    return columns, cells


def _figures(recipes: Sequence[Recipe]) -> list[Metric]:
    """The figures of the recipes."""
    measure = MEASURES[recipes[0].measured.measure]
    return [figure for name in measure.summary for figure in measure.metrics if figure.name == name]


def _held_out(recipe: Recipe) -> SampleFigures:
    held_out = recipe.measured.held_out
    assert held_out is not None, "the recipe was not tuned"
    return held_out


def _text(figures: Mapping[str, float | None], figure: Metric) -> str:
    return f"{figures[figure.name]:.{figure.decimals}f}"


def explain_recipes(recipes: Sequence[Recipe]) -> str:
    """On which images the figures are, and whether the search came to its end."""
    last = recipes[-1]
    figures = _figures(recipes)
    text = (
        f"{' and '.join(figure.title for figure in figures)}: against the unreduced model, on the "
        f"{last.measured.images} images of the search and on {_held_out(last).images} that it did not see; "
        f"{last.provenance.candidates} candidates. {MEASURES[last.measured.measure].explanation}"
    )
    engine = last.measured.engine
    if engine is not None:
        there = " and ".join(f"{figure.title} {_text(engine.figures, figure)}" for figure in figures)
        text += (
            f" In {engine.name}, {engine.precision}, the last one has {there} against the unreduced float model "
            f"on the {engine.images} images not seen."
        )
    return text + (" The search was interrupted: this is the best so far." if last.provenance.interrupted else "")


def recipe_sections(recipes: Sequence[Recipe]) -> list[Section]:
    """The table, and of several recipes the curve of damage over cost."""
    columns, cells = recipe_table(recipes)
    sections = [Section("Recipes", table(columns, cells) + paragraph(explain_recipes(recipes)))]
    if len(recipes) > 1:
        damage = _figures(recipes)[0]
        points = [
            Point(
                recipe.measured.fraction or 0, _held_out(recipe).figures[damage.name] or 0, row_as_text(columns, line)
            )
            for recipe, line in zip(recipes, cells, strict=True)
        ]
        line = {recipes[0].method.name: points}
        drawn = line_plot(line, "MACs, as a share of the unreduced model's", f"{damage.title} on held-out images")
        sections.insert(0, Section("Damage over cost", drawn))
    return sections
