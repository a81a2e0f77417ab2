"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """No permission, no space, no such folder: one line that says so."""
    try:
        yield
    except OSError as error:
        raise GTPError(f"cannot write {path}: {error.strerror or error}; choose another place or make room") from error
