"""The log of a run: lines of JSON, a table, and TensorBoard where that is installed.

The lines are part of the checkpoint, so after a resume the files have every step once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gtp_vit.jsonable import jsonable
from gtp_vit.runs.files import write_atomically

LogLine = dict[str, Any]  # kind, step, epoch, and any figures
LINES, TABLE, BOARD = "log.jsonl", "log.csv", "tensorboard"


@dataclass(frozen=True)
class LogEntry:
    """The figures of some training steps, or of a pass over the validation images."""

    kind: Literal["step", "validation"]
    step: int  # steps done
    epoch: float  # epochs done
    figures: dict[str, float]

    def to_dict(self) -> LogLine:
        """The entry as one flat line of a file."""
        return {"kind": self.kind, "step": self.step, "epoch": self.epoch, **self.figures}

    @classmethod
    def from_dict(cls, line: LogLine) -> LogEntry:
        """The entry that `to_dict` made a line of."""
        figures = dict(line)
        kind, step, epoch = (figures.pop(name) for name in ("kind", "step", "epoch"))
        return cls(kind, step, epoch, figures)


class Log:
    """The entries of a run so far, and the files that they are written to."""

    def __init__(self, folder: Path | None, entries: Sequence[LogEntry] = ()) -> None:
        """Start a log with these entries; without a folder nothing is written."""
        self.folder, self.entries = folder, list(entries)
        self.tensorboard: Any = None
        if self.entries:
            self.write()  # replaces lines written after the last checkpoint
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            first = self.entries[-1].step + 1 if self.entries else 0
            self.tensorboard = SummaryWriter(str(folder / BOARD), purge_step=first)

    def add(self, entry: LogEntry) -> None:
        self.entries.append(entry)
        self.write()
        if self.tensorboard is not None:
            for key, value in {"epoch": entry.epoch, **entry.figures}.items():
                self.tensorboard.add_scalar(f"{entry.kind}/{key}", value, entry.step)

    def write(self) -> None:
        if self.folder is None:
            return
        lines = [entry.to_dict() for entry in self.entries]
        text = "".join(json.dumps(jsonable(line), allow_nan=False) + "\n" for line in lines)
        write_atomically(self.folder / LINES, text)
        table = io.StringIO()
        writer = csv.DictWriter(table, list(dict.fromkeys(key for line in lines for key in line)), restval="")
        writer.writeheader()
        writer.writerows(lines)
        write_atomically(self.folder / TABLE, table.getvalue())

    def entries_of_kind(self, kind: str) -> list[LogEntry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
