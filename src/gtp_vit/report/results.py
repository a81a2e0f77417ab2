"""results: figures as files for programs, CSV or JSON, and as tables of text for people."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtp_vit.runs.files import write_atomically

Table = tuple[list[str], list[list[str]]]  # columns, and rows of as many texts


def plain(result: Any) -> Any:
    """Dataclasses as dictionaries, all the way down; what is not finite as null, which is all that JSON has for it."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: plain(getattr(result, field.name)) for field in dataclasses.fields(result)}
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(item) for item in result]
    if isinstance(result, float) and not math.isfinite(result):
        return None
    return str(result) if isinstance(result, Path) else result


def in_words(columns: Sequence[str], row: Sequence[str]) -> str:
    """A row of a table by itself: a line for each cell that says something."""
    return "\n".join(f"{column}: {cell}" for column, cell in zip(columns, row, strict=True) if cell)


def write_results(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with a column of settings as CSV or JSON, whole or not at all."""
    if path.suffix == ".json":
        write_atomically(path, json.dumps(plain(rows), indent=1, allow_nan=False) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({**row, "settings": json.dumps(row["settings"])} for row in rows)
    write_atomically(path, text.getvalue())
