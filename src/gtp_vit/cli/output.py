"""How a command that has one table to show does it: for people, as JSON, or as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.cli import render


@dataclass(frozen=True)
class OutputFlags:
    """Where a table goes."""

    report: Path | None = None
    """Write an HTML page here."""
    json: bool = False
    """Print JSON instead of a table."""


def show(
    flags: OutputFlags,
    command_line: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    as_json: Any = None,
) -> None:
    """Print the table, or `as_json` (the table's rows if None), and write the page if one is wanted."""
    if flags.report is not None:
        from gtp_vit.show.page import Section, table, write_report

        write_report(flags.report, title, "", [Section("Found", table(columns, rows))], command_line)
    if flags.json:
        render.as_json([dict(zip(columns, row, strict=True)) for row in rows] if as_json is None else as_json)
    else:
        render.table(title, columns, rows)


def command(name: str, words: Sequence[str]) -> str:
    """The command as it was typed, for pages."""
    return shlex.join(["gtp-vit", name, *words])
