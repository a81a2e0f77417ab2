"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gtp_vit.errors import GTPError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write under another name, then rename: readers see the old file or the new one, whole."""
    data = content.encode() if isinstance(content, str) else content
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # mkstemp's own mode lets nobody else read
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def check_writable(*paths: Path | None) -> None:
    """Refuse places that cannot be written, before the work is done whose result would be lost."""
    for path in paths:
        if path is not None:
            with explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    raise IsADirectoryError(None, "it is a folder")
                with tempfile.TemporaryFile(dir=path.parent):
                    pass


def lock(file: IO[Any], what: Path) -> None:
    """Refuse to write where another run is writing; the lock ends with the file's closing."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise GTPError(f"another run is writing {what}; wait for it, or let this one write to another place") from error


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """No permission, no space, no such folder: one line that says so."""
    try:
        yield
    except OSError as error:
        raise GTPError(f"cannot write {path}: {error.strerror or error}; choose another place or make room") from error
