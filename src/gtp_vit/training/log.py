"""The log of a run: lines of JSON, a table, and TensorBoard where that is installed.

The lines are part of the checkpoint, so after a resume the files have every step once.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtp_vit.runs.files import write_atomically

LINES, TABLE, BOARD = "log.jsonl", "log.csv", "tensorboard"
Entry = dict[str, Any]


class Log:
    """Entries have a step, an epoch and figures; those of a validation pass have kind "validation"."""

    def __init__(self, folder: Path | None, entries: Sequence[Entry] = ()) -> None:
        """Start a log with these entries; without a folder nothing is written."""
        self.folder, self.entries = folder, list(entries)
        self.board: Any = None
        if self.entries:
            self.write()  # replaces lines written after the last checkpoint
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            first = self.entries[-1]["step"] + 1 if self.entries else 0
            self.board = SummaryWriter(str(folder / BOARD), purge_step=first)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.write()
        if self.board is not None:
            for key, value in entry.items():
                if key not in ("step", "kind"):
                    self.board.add_scalar(f"{entry['kind']}/{key}", value, entry["step"])

    def write(self) -> None:
        if self.folder is None:
            return
        write_atomically(self.folder / LINES, "".join(_json(line) + "\n" for line in self.entries))
        text = io.StringIO()
        columns = list(dict.fromkeys(key for line in self.entries for key in line))
        writer = csv.DictWriter(text, columns, restval="")
        writer.writeheader()
        writer.writerows(self.entries)
        write_atomically(self.folder / TABLE, text.getvalue())

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry["kind"] == kind]

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _json(entry: Entry) -> str:
    """A line of JSON, with null for numbers that are not finite."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()
    }
    return json.dumps(finite, allow_nan=False)
