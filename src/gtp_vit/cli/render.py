"""Printing: tables and sentences in the available width, JSON for programs, and progress."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gtp_vit.cli.help import width
from gtp_vit.errors import printable
from gtp_vit.jsonable import jsonable

PIPE_WIDTH = 220  # columns for a file or a pipe, which have no width
MIN_COLUMN_WIDTH = 12  # columns that a text needs to be readable
# What a column of figures contains: numbers with their units and intervals, and words for missing ones.
NUMERIC_CELL = re.compile(r"[-+]?\d.*|[-+]?(nan|inf).*|-|not (timed|printed)|")
GAP = "  "
LOG_SECONDS, TERMINAL_SECONDS = 30, 0.1  # between two reports of progress

Rows = Sequence[Sequence[str]]


def print_table(title: str, columns: Sequence[str], rows: Rows) -> None:
    """Print a table in the available width; figures are never cut."""
    room = width() if sys.stdout.isatty() else PIPE_WIDTH
    lines = [*textwrap.wrap(title, room, break_long_words=False), "", *table_lines(columns, rows, room), ""]
    text = printable("\n".join(lines))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal that cannot draw lines
        text = text.replace("─", "-")
    print(text)


def print_text(text: str) -> None:
    """Print sentences; on a terminal, broken between words."""
    text = printable(text)
    print("\n".join(textwrap.fill(line, width()) for line in text.splitlines()) if sys.stdout.isatty() else text)


def print_json(result: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(jsonable(result), indent=2, allow_nan=False))


@contextmanager
def progress(text: str) -> Iterator[Callable[..., None]]:
    """A progress bar with the remaining time, on standard error, so that --json stays clean."""
    begin = time.monotonic()
    last = begin - TERMINAL_SECONDS

    def update(done: int, total: int | None = None, best: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= (TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS):
            last = now
            minutes = (now - begin) * ((total or done) - done) / done / 60
            part = f"{done} of {total}, {minutes:.1f} minutes left" if total else str(done)
            _report(f"{text}: {part}  {best}".rstrip())

    with status(text):
        yield update


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """For work of a few long steps: what is being done now, on standard error."""
    if sys.stderr.isatty():
        _report(f"{text} ...")
    try:
        yield lambda step: _report(f"{text}: {step}")
    finally:
        if sys.stderr.isatty():
            print(f"\r{'':<{width() - 1}}\r", end="", file=sys.stderr, flush=True)


def _report(line: str) -> None:
    """One line on standard error, in the place of the last one on a terminal."""
    if sys.stderr.isatty():
        room = width() - 1
        print(f"\r{printable(line)[:room]:<{room}}", end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def table_lines(columns: Sequence[str], rows: Rows, room: int) -> list[str]:
    """A table as lines: texts broken between words if it is too wide, and one block for each row if it still is."""
    cells = [[row[index] for row in rows] for index in range(len(columns))]
    widths = _widths(columns, cells, room - len(GAP) * (len(columns) - 1))
    if widths is None:
        return [line for row in rows for line in _block(columns, row, room)]
    right = [is_numeric(column) for column in cells]
    rule = GAP.join("─" * width for width in widths)
    body = [line for row in rows for line in _row(row, widths, right)]
    return [*_row(columns, widths, right), rule, *body]


def is_numeric(cells: Sequence[str]) -> bool:
    """Does a column contain only figures?"""
    return any(cells) and all(NUMERIC_CELL.fullmatch(cell) for cell in cells)


def _break_points(cell: str) -> list[str]:
    """Where a cell may be broken: a figure in front of a bracket, a text between words and after : , ( and =."""
    where = r" (?=[\[(])" if NUMERIC_CELL.fullmatch(cell) else r"(?<=[\s:,(=])"
    return [piece for piece in re.split(where, cell) if piece]


def _fill(cell: str, room: int) -> list[str]:
    """The lines of a cell in its column."""
    if len(cell) <= room:
        return [cell]
    if NUMERIC_CELL.fullmatch(cell):
        return _break_points(cell)
    lines = [""]
    for piece in _break_points(cell):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _widths(columns: Sequence[str], cells: Rows, room: int) -> list[int] | None:
    """Widths of columns, the natural ones if there is room; None if even broken cells do not fit."""
    natural = [max(map(len, (name, *column))) for name, column in zip(columns, cells, strict=True)]
    widths = []
    for name, column, full in zip(columns, cells, natural, strict=True):
        words = [*name.split(), *(piece.rstrip() for cell in column for piece in _break_points(cell))]
        widths.append(max([0 if is_numeric(column) else min(full, MIN_COLUMN_WIDTH), *map(len, words)]))
    if sum(widths) > room:
        return None
    while sum(widths) < min(room, sum(natural)):  # what is left goes to the column that is broken most
        widths[max(range(len(columns)), key=lambda index: natural[index] / max(widths[index], 1))] += 1
    return widths


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """The lines of one row."""
    filled = [_fill(cell, room) for cell, room in zip(cells, widths, strict=True)]
    lines = []
    for index in range(max(map(len, filled))):
        parts = [cell[index] if index < len(cell) else "" for cell in filled]
        padded = [p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)]
        lines.append(GAP.join(padded).rstrip())
    return lines


def _block(columns: Sequence[str], row: Sequence[str], room: int) -> list[str]:
    """One row: its first cell as a heading, and a line for each of the others that is not empty."""
    names = max(map(len, columns))
    lines = [f"{columns[0]}: {row[0]}" if row[0] else columns[0]]
    for column, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            first, *more = _fill(cell, max(room - names - 4, MIN_COLUMN_WIDTH))
            lines += [f"  {column:<{names}}  {first}", *(f"{'':<{names + 4}}{line}" for line in more)]
    return lines
