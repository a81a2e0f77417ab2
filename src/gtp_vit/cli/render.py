"""Results as tables for people, or as JSON for programs; the only file that imports rich."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gtp_vit.cli.grid import lines_of
from gtp_vit.cli.help import width
from gtp_vit.errors import printable
from gtp_vit.jsonable import jsonable

PIPE = 220  # columns for a file or a pipe, which have no width


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in the available width; figures are never cut."""
    room = width() if sys.stdout.isatty() else PIPE
    text = "\n".join([*textwrap.wrap(title, room, break_long_words=False), *lines_of(columns, rows, room)])
    text = printable(text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal that cannot draw lines
        text = text.translate(str.maketrans("─│┌┬┐├┼┤└┴┘", "-|+++++++++"))
    print(text)


def say(text: str) -> None:
    """Print sentences; on a terminal, broken between words."""
    text = printable(text)
    print("\n".join(textwrap.fill(line, width()) for line in text.splitlines()) if sys.stdout.isatty() else text)


def print_json(result: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(jsonable(result), indent=2, allow_nan=False))


@contextmanager
def progress(text: str, *columns: str) -> Iterator[Callable[..., None]]:
    """A progress bar with the remaining time, on standard error, so that --json stays clean.

    `columns` are more of rich's text columns, with the fields that updates give.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    if not sys.stderr.isatty():  # a log: print a line now and then
        yield _line_by_line(text)
        return
    shown = [*Progress.get_default_columns(), *(TextColumn(column) for column in columns)]
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, best="")
        yield lambda done, total, **fields: bar.update(task, completed=done, total=total, **fields)


@contextmanager
def steps(text: str) -> Iterator[Callable[[str], None]]:
    """For work of a few long steps: what is being done now, on standard error."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda step: print(f"{text}: {step}", file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status(text) as status:
        yield lambda step: status.update(f"{text}: {step}")


def _line_by_line(text: str) -> Callable[..., None]:
    """Progress for logs: at most one line in half a minute."""
    begin = last = time.monotonic()

    def update(done: int, total: int | None, best: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 30 or not done:
            return
        last = now
        left = f" of {total}, {(now - begin) * (total - done) / done / 60:.1f} minutes left" if total else ""
        print(f"{text}: {done}{left}  {best}".rstrip(), file=sys.stderr, flush=True)

    return update
