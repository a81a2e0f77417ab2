"""The tables and figures of the paper, and what others print, as cells: which model, which method, which figures.

What is printed is in printed.json, and of others in field.json. Accuracies of the main tables are the paper's best over
several settings; ours are at the settings given there. Figures are pictures without numbers: their cells have settings,
and nothing printed.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.core.costs import Convention
from gtp_vit.core.reducer import Method
from gtp_vit.methods import method_from_dict


def _stored(name: str) -> dict[str, Any]:
    """The tables of one file."""
    tables: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))["tables"]
    return tables


TABLES = _stored("printed.json") | _stored("field.json")
SETTINGS = {
    row["row"]: row for row in TABLES["hyperparameters"]["rows"]
}  # rows of other tables are "like" one of these


@dataclass(frozen=True)
class Cell:
    """One entry of a table, or one point of a figure."""

    row: str
    column: str
    model: str
    method: Method | None  # None = the unreduced model, unless at_cost or absent
    top1: float | None = None  # printed accuracy in percent; None = not printed
    gmacs: float | None = None  # printed; None = not printed
    finetuned: bool = False  # was the printed accuracy reached by finetuning?
    at_cost: str | None = None  # the method's name, where it is to run at the printed cost
    absent: bool = False  # is the method not in this package?
    lacks: str = ""  # what is missing to measure its accuracy, besides weights and images
    pixels: int | None = None  # height and width of the images, if not the model's own
    counts: Convention = "torchprofile"  # how the printed MACs are counted
    source: str = ""  # where it is printed, where that is not the paper


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    title: str
    cells: tuple[Cell, ...]


# Settings that a row hands on to its cells as they are.
HANDED_ON = ("finetuned", "at_cost", "absent", "lacks", "pixels", "source")


def _cells_of(row: dict[str, Any], counts: Convention) -> list[Cell]:
    """The cells of one row: the settings that all share, with those that vary from cell to cell."""
    row = {"settings": {}, "vary": {}} | SETTINGS.get(row.get("like", ""), {}) | row
    count = max(len(values) for values in (*row["vary"].values(), row.get("top1", (None,))))
    more = {name: row[name] for name in HANDED_ON if name in row}
    cells = []
    for index in range(count):
        settings = row["settings"] | {name: values[index] for name, values in row["vary"].items()}
        top1, gmacs = (row[figure][index] if figure in row else None for figure in ("top1", "gmacs"))
        method = method_from_dict(settings) if settings else None
        column = row["column"].format(gmacs=gmacs, **settings)
        cells.append(Cell(row["row"], column, row["model"], method, top1, gmacs, counts=counts, **more))
    return cells


def _experiment(table: dict[str, Any]) -> Experiment:
    counts = table.get("counts", "torchprofile")
    rows = [_cells_of(row, counts) for row in TABLES.get(table.get("same_as", ""), table)["rows"]]
    if table.get("by_column"):  # of each model, one column after the other
        models = (list(own) for _, own in itertools.groupby(rows, key=lambda row: row[0].model))
        rows = [[cell for cell in column if cell] for own in models for column in itertools.zip_longest(*own)]
    return Experiment(table["title"], tuple(itertools.chain(*rows)))


# Those without rows have no cells of accuracy; reproduction/measure.py computes them.
EXPERIMENTS = {name: _experiment(table) for name, table in TABLES.items() if {"rows", "same_as"} & set(table)}
COMPUTED = {name: table["title"] for name, table in TABLES.items() if name not in EXPERIMENTS}
EXTRA_MMACS: dict[str, dict[str, float]] = TABLES["figure-complexity"]["extra_mmacs"]
