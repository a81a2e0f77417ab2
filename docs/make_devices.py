"""Writes the table of docs/reference/devices.md from docs/results/launches.json: python docs/make_devices.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results/launches.json"
START, END = "<!-- launches -->", "<!-- end -->"


def launches() -> str:
    """The table: each method before and now, beside slicing, which no method can be below."""
    stored = json.loads(RESULTS.read_text())
    bound = stored["now"]["slicing"]
    lines = [
        "| method | a layer: before | now | bound | whole model: before | now | bound | attention maps: before | now |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, now in stored["now"].items():
        before = stored["before"][name]
        cells = [name]
        for key in ("layer", "model"):
            cells += [_cell(before, key), f"**{_cell(now, key)}**", str(bound[key])]
        lines.append("| " + " | ".join([*cells, _cell(before, "maps"), _cell(now, "maps")]) + " |")
    return "\n".join(lines)


def _cell(counts: dict[str, Any] | None, key: str) -> str:
    return "-" if counts is None else f"{counts[key]:,}"


def pages() -> dict[str, str]:
    """The page with its table, by its path in docs."""
    page = FOLDER / "reference/devices.md"
    table = f"{START}\n{launches()}\n\n{END}"
    return {"reference/devices.md": re.sub(f"{START}.*?{END}", table, page.read_text(), flags=re.S)}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
