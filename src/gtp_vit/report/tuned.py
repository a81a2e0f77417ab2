"""tuned: recipes that a search found as a table, a sentence, and the sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtp_vit.metrics.base import Figure
from gtp_vit.metrics.classes import Classes
from gtp_vit.metrics.registry import MEASURES
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.plot import Point, curves
from gtp_vit.report.results import Table, in_words


def recipe_table(recipes: Sequence[Recipe]) -> Table:
    """A row for each recipe: what it costs and what it changes."""
    shown = _figures(recipes)
    titles = [figure.title for figure in shown]
    columns = ["GMACs", "share", *titles, *(f"held-out {title}" for title in titles), "speed-up", "settings"]
    cells = []
    for recipe in recipes:
        figures = recipe.measured
        both = [_text(part, figure) for part in (figures, figures["held_out"]) for figure in shown]
        speed = f"{figures['speedup']['median']:.2f}" if figures.get("speedup") else "not timed"
        cells.append([f"{figures['macs'] / 1e9:.4f}", f"{figures['share']:.3f}", *both, speed, str(recipe.method)])
    return columns, cells


def _figures(recipes: Sequence[Recipe]) -> list[Figure]:
    """The figures of the recipes; older ones name no measure, and are of classes."""
    measure = MEASURES[recipes[0].measured.get("measure", Classes.name)]
    return [figure for name in measure.summary for figure in measure.figures if figure.name == name]


def _text(part: Mapping[str, Any], figure: Figure) -> str:
    return f"{part[figure.name]:.{figure.decimals}f}"


def explain_recipes(recipes: Sequence[Recipe]) -> str:
    """On which images the figures are, and whether the search came to its end."""
    last = recipes[-1]
    figures = _figures(recipes)
    text = (
        f"{' and '.join(figure.title for figure in figures)}: against the unreduced model, on the "
        f"{last.measured['images']} images of the search and on {last.measured['held_out']['images']} that it did not "
        f"see; {last.found['candidates']} candidates. {MEASURES[last.measured['measure']].meaning}"
    )
    engine = last.measured.get("engine")
    if engine is not None:
        there = " and ".join(f"{figure.title} {_text(engine, figure)}" for figure in figures)
        text += (
            f" In {engine['name']}, {engine['precision']}, the last one has {there} against the unreduced float model "
            f"on the {engine['images']} images not seen."
        )
    return text + (" The search was interrupted: this is the best so far." if last.found["interrupted"] else "")


def recipe_sections(recipes: Sequence[Recipe]) -> list[Section]:
    """The table, and of several recipes the curve of damage over cost."""
    columns, cells = recipe_table(recipes)
    sections = [Section("Recipes", table(columns, cells) + paragraph(explain_recipes(recipes)))]
    if len(recipes) > 1:
        damage = _figures(recipes)[0]
        points = [
            Point(recipe.measured["share"], recipe.measured["held_out"][damage.name], in_words(columns, line))
            for recipe, line in zip(recipes, cells, strict=True)
        ]
        line = {recipes[0].method.name: points}
        drawn = curves(line, "MACs, as a share of the unreduced model's", f"{damage.title} on held-out images")
        sections.insert(0, Section("Damage over cost", drawn))
    return sections
