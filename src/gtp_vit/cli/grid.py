"""A table as lines of text, in the available width: texts on the left, figures on the right and never broken."""

from __future__ import annotations

import re
from collections.abc import Sequence

NARROWEST = 12  # columns that a text needs to be readable
# What a column of figures contains: numbers with their units and intervals, and words for missing ones.
FIGURE = re.compile(r"[-+]?\d.*|[-+]?(nan|inf).*|-|not (timed|printed)|")
GAP = "  "

Rows = Sequence[Sequence[str]]


def lines_of(columns: Sequence[str], rows: Rows, room: int) -> list[str]:
    """A table with a frame if it fits, else without one and with texts broken, else one block for each row."""
    natural = [max(map(len, (column, *cells))) for column, cells in zip(columns, _cells(columns, rows), strict=True)]
    if sum(natural) + 3 * len(columns) + 1 <= room:
        return _framed(columns, rows, natural)
    widths = narrowed(columns, rows, natural, room - len(GAP) * (len(columns) - 1))
    if widths is None:
        return [line for row in rows for line in _block(columns, row, room)]
    return _plain(columns, rows, widths)


def is_figures(cells: Sequence[str]) -> bool:
    """Does a column contain only figures?"""
    return any(cells) and all(FIGURE.fullmatch(cell) for cell in cells)


def pieces(cell: str) -> list[str]:
    """Where a cell may be broken: a figure in front of a bracket, a text between words and after : , ( and =."""
    where = r" (?=[\[(])" if FIGURE.fullmatch(cell) else r"(?<=[\s:,(=])"
    return [piece for piece in re.split(where, cell) if piece]


def fill(cell: str, width: int) -> list[str]:
    """The lines of a cell in its column."""
    if len(cell) <= width:
        return [cell]
    parts = pieces(cell)
    if FIGURE.fullmatch(cell):
        return parts
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def narrowed(columns: Sequence[str], rows: Rows, natural: Sequence[int], room: int) -> list[int] | None:
    """Widths of columns that are broken; None if even that does not fit."""
    widths = []
    for column, cells, full in zip(columns, _cells(columns, rows), natural, strict=True):
        words = [*column.split(), *(piece.rstrip() for cell in cells for piece in pieces(cell))]
        least = 0 if is_figures(cells) else min(full, NARROWEST)
        widths.append(max([least, *map(len, words)]))
    if sum(widths) > room:
        return None
    while sum(widths) < min(room, sum(natural)):  # what is left goes to the column that is broken most
        widths[max(range(len(columns)), key=lambda index: natural[index] / max(widths[index], 1))] += 1
    return widths


def _cells(columns: Sequence[str], rows: Rows) -> list[list[str]]:
    return [[row[index] for row in rows] for index in range(len(columns))]


def _lines(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[list[str]]:
    """One row, as lines of padded cells; a word of a heading is as wide as its column at most."""
    filled = [fill(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, filled))
    lines = []
    for index in range(height):
        parts = [cell[index] if index < len(cell) else "" for cell in filled]
        lines.append([p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)])
    return lines


def _framed(columns: Sequence[str], rows: Rows, widths: Sequence[int]) -> list[str]:
    right = [is_figures(cells) for cells in _cells(columns, rows)]

    def rule(left: str, middle: str, end: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + end

    def framed(cells: Sequence[str]) -> list[str]:
        return [f"│ {' │ '.join(line)} │" for line in _lines(cells, widths, right)]

    body = [line for row in rows for line in framed(row)]
    return [rule("┌", "┬", "┐"), *framed(columns), rule("├", "┼", "┤"), *body, rule("└", "┴", "┘")]


def _plain(columns: Sequence[str], rows: Rows, widths: Sequence[int]) -> list[str]:
    right = [is_figures(cells) for cells in _cells(columns, rows)]

    def plain(cells: Sequence[str]) -> list[str]:
        return [GAP.join(line).rstrip() for line in _lines(cells, widths, right)]

    return [*plain(columns), GAP.join("─" * width for width in widths), *(line for row in rows for line in plain(row))]


def _block(columns: Sequence[str], row: Sequence[str], room: int) -> list[str]:
    """One row: its first cell as a heading, and a line for each of the others that is not empty."""
    names = max(map(len, columns))
    lines = [f"{columns[0]}: {row[0]}" if row[0] else columns[0]]
    for column, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            first, *more = fill(cell, max(room - names - 4, NARROWEST))
            lines += [f"  {column:<{names}}  {first}", *(f"{'':<{names + 4}}{line}" for line in more)]
    return lines
