"""tuned: recipes that a search found as a table, a sentence, and the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence

from gtp_vit.recipes import Recipe
from gtp_vit.show.page import Section, paragraph, table
from gtp_vit.show.plot import curves
from gtp_vit.show.results import Table


def recipe_table(recipes: Sequence[Recipe]) -> Table:
    """A row for each recipe: what it costs and what it changes."""
    columns = ["GMACs", "share", "KL", "agreement %", "held-out KL", "held-out agreement %", "speed-up", "settings"]
    cells = []
    for recipe in recipes:
        figures = recipe.measured
        both = [
            text
            for part in (figures, figures["held_out"])
            for text in (f"{part['kl']:.4f}", f"{part['agreement']:.1f}")
        ]
        speed = f"{figures['speedup']['median']:.2f}" if figures.get("speedup") else "not timed"
        cells.append([f"{figures['macs'] / 1e9:.4f}", f"{figures['share']:.3f}", *both, speed, str(recipe.method)])
    return columns, cells


def explain_recipes(recipes: Sequence[Recipe]) -> str:
    """On which images the figures are, and whether the search came to its end."""
    last = recipes[-1]
    text = (
        f"KL and agreement are to the unreduced model, on the {last.measured['images']} images of the search and on "
        f"{last.measured['held_out']['images']} that it did not see; {last.found['candidates']} candidates."
    )
    engine = last.measured.get("engine")
    if engine is not None:
        text += (
            f" In {engine['name']}, {engine['precision']}, the last one has KL {engine['kl']:.4f} and agreement "
            f"{engine['agreement']:.1f} % to the unreduced float model on the {engine['images']} images not seen."
        )
    return text + (" The search was interrupted: this is the best so far." if last.found["interrupted"] else "")


def recipe_sections(recipes: Sequence[Recipe]) -> list[Section]:
    """The table, and of several recipes the curve of damage over cost."""
    sections = [Section("Recipes", table(*recipe_table(recipes)) + paragraph(explain_recipes(recipes)))]
    if len(recipes) > 1:
        points = [(recipe.measured["share"], recipe.measured["held_out"]["kl"]) for recipe in recipes]
        line = {recipes[0].method.name: points}
        drawn = curves(line, "MACs, as a share of the unreduced model's", "KL on held-out images")
        sections.insert(0, Section("Damage over cost", drawn))
    return sections
