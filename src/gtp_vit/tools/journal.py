"""A journal of a long run: what is finished survives a kill, nothing is counted twice, two runs never mix.

The first line says what is being measured; every other line is one finished batch. A line that was cut off by a kill is
dropped when the run goes on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from gtp_vit.errors import GTPError
from gtp_vit.tools.files import explained, lock


class Journal:
    """Lines of JSON in a file that is locked while it is open."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """Open the journal of `run`, which must be JSON; entries of an earlier, unfinished run of the same are kept."""
        self.path = path
        self.keep = False  # also after the run has ended by itself
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = path.open("a+b")
        try:
            lock(self.file, path)
            self.entries = self._read(run)
        except BaseException:
            self.file.close()
            raise

    def _read(self, run: dict[str, Any]) -> list[Any]:
        self.file.seek(0)
        whole, entries = 0, []
        for line in self.file:
            if not line.endswith(b"\n"):
                break
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
            whole += len(line)
        self.file.truncate(whole)
        wanted = json.loads(json.dumps(run))
        if entries and entries[0] != wanted:
            differ = [key for key in {**wanted, **entries[0]} if wanted.get(key) != entries[0].get(key)]
            raise GTPError(
                f"{self.path} is the journal of another run (other {', '.join(sorted(differ))}); delete it to start "
                "anew, or let this run write to another place"
            )
        if not entries:
            self.append(wanted)
        return entries[1:]

    def append(self, entry: Any) -> None:
        """Write one line, through to the disk."""
        with explained(self.path):
            self.file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that ended by itself needs no journal any more; any other may go on from it."""
        self.close(finished=kind is None and not self.keep)

    def close(self, *, finished: bool) -> None:
        """Let go of the file; a finished run needs no journal any more."""
        if finished:
            self.path.unlink(missing_ok=True)
        self.file.close()
