"""results: figures as files for programs, CSV or JSON, and as tables of text for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from gtp_vit.jsonable import jsonable
from gtp_vit.runs.files import write_atomically

Table = tuple[list[str], list[list[str]]]  # columns, and rows of as many texts


def row_as_text(columns: Sequence[str], row: Sequence[str]) -> str:
    """A row of a table by itself: a line for each cell that says something."""
    return "\n".join(f"{column}: {cell}" for column, cell in zip(columns, row, strict=True) if cell)


def write_results(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows with a column of settings as CSV or JSON, whole or not at all."""
    if path.suffix == ".json":
        write_atomically(path, json.dumps(jsonable(rows), indent=1, allow_nan=False) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({**row, "settings": json.dumps(row["settings"])} for row in rows)
    write_atomically(path, text.getvalue())
