"""The journal of a long run: finished work survives a kill, nothing is counted twice, two runs never mix.

The first line is the run's identity (runs/identity.py); every other line is one finished piece of work. Each line
begins with its checksum, so that a damaged one is found, also where it still looks like JSON. A line that was cut off
by a kill is dropped when the run resumes.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from gtp_vit.errors import GTPError
from gtp_vit.runs.files import Lock, friendly_write_errors, make_folder, remove_empty
from gtp_vit.runs.identity import differences

FORMAT = 1
MAGIC = f"gtp-vit journal {FORMAT}\n".encode()  # the first line; a file without it is no journal


class Journal:
    """Lines of JSON in a file that is locked while it is open."""

    def __init__(self, path: Path, run: dict[str, object], *, restart: bool = False) -> None:
        """Open the journal of `run`, its identity as JSON; entries of an unfinished run of the same are kept.

        A journal of a different run is refused and left as it is, unless `restart` discards it. A file that is no
        journal is never changed.
        """
        self.path = path
        self.keep_when_done = False  # keep the file after a finished run
        self.damage_report = ""  # for the user: what was damaged
        self.was_written = True  # has it anything that a later start could use?
        with friendly_write_errors(path):
            existed = path.exists()
        if existed:
            _check_ours(path)
        self.folders = make_folder(path.parent)
        self.lock = Lock(path)
        with friendly_write_errors(path):
            self.file = path.open("r+b", buffering=0)
        try:
            self.entries = self._resume(json.loads(json.dumps(run)), restart)
        except BaseException:
            self.close(finished=False)
            raise
        self.was_written = bool(self.entries)

    def _resume(self, run: dict[str, object], restart: bool) -> list[Any]:
        """The entries of an earlier start of this run; damaged lines are cut off the file."""
        with friendly_write_errors(self.path):
            content = self.file.read()
            lines = content[len(MAGIC) :].splitlines(keepends=True)
            entries = [_entry(line) for line in lines]
            good = entries.index(None) if None in entries else len(entries)
            if good == 0 and lines and lines[0].endswith(b"\n") and not restart:
                raise GTPError(f"the first line of {self.path} is damaged, which says what it measured; {RESTART_HINT}")
            if restart or good == 0:
                self._truncate(0)
                self._write(MAGIC)
                self.append(run)
                return []
        stored = entries[0]
        if stored != run:
            raise GTPError(f"{self.path} is of a different run: {differences(stored, run)}; {RESTART_HINT}")
        if good < len(lines) and lines[good].endswith(b"\n"):  # else a kill has cut it off
            self.damage_report = (
                f"line {good + 2} of {self.path} is damaged: {good - 1} finished pieces of work before it are kept, "
                f"it and {len(lines) - good - 1} after it are dropped and measured again"
            )
        with friendly_write_errors(self.path):
            self._truncate(len(MAGIC) + sum(map(len, lines[:good])))
        return entries[1:good]

    def append(self, entry: object) -> None:
        """Write one line and flush it to disk."""
        self.was_written = True
        text = json.dumps(entry, separators=(",", ":")).encode()
        self._write(b"%08x %s\n" % (zlib.crc32(text), text))

    def _write(self, line: bytes) -> None:
        """Write the whole line or nothing: on a full disk a part is removed again."""
        begin, rest = self.file.tell(), line
        with friendly_write_errors(self.path):
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
                os.fsync(self.file.fileno())
            except OSError:
                self._truncate(begin)
                raise

    def _truncate(self, length: int) -> None:
        self.file.truncate(length)
        self.file.seek(length)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Delete the journal of a run that is finished, or that was refused before it began; others may be resumed."""
        self.close(finished=(kind is None and not self.keep_when_done) or not self.was_written)
        if not self.was_written:
            remove_empty(self.folders)

    def close(self, *, finished: bool) -> None:
        """Close the file, and delete it if the run is finished."""
        if finished:
            self.path.unlink(missing_ok=True)
        self.file.close()
        self.lock.release()


RESTART_HINT = "use --restart to discard it, or choose another output path"


def _check_ours(path: Path) -> None:
    """Raise GTPError for a file that is no journal, before it is changed."""
    if not path.is_file():
        raise GTPError(f"{path} is not a file; this run keeps its journal there; choose another output path")
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
    except OSError as error:
        raise GTPError(f"cannot read {path}: {error.strerror or error}; choose another output path") from error
    if not MAGIC.startswith(begin):  # a kill may have cut it off
        raise GTPError(
            f"{path} exists and is not a journal of this version of gtp-vit; move it away, or choose "
            "another output path"
        )


def _entry(line: bytes) -> Any:
    """The content of a line; None if it is damaged or cut off."""
    checksum, _, text = line.partition(b" ")
    try:
        if line.endswith(b"\n") and int(checksum, 16) == zlib.crc32(text[:-1]):
            return json.loads(text)
    except ValueError:
        pass
    return None
