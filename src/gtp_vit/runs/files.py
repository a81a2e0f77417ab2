"""Writing files atomically, and locking them."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gtp_vit.errors import GTPError

PART = ".part"  # how the name of a temporary file ends


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write under a temporary name, then rename: readers see the old file or the new one, never a part.

    What an earlier writer of this file left that was killed is deleted.
    """
    data = content.encode() if isinstance(content, str) else content
    with friendly_write_errors(path):
        _check_ordinary(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_parts(path)
        handle, temporary = _new_part(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only the owner can read
                os.replace(temporary, path)  # while it is locked
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _new_part(path: Path) -> tuple[int, str]:
    """A temporary file beside a path, open and locked for as long as its writer lives."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        _lock(handle, Path(temporary))
        if os.path.lexists(temporary):
            return handle, temporary
        os.close(handle)  # another writer found it before it was locked


def _delete_parts(path: Path) -> None:
    """Delete the temporary files of a path whose writers are dead."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PART}"):
        with contextlib.suppress(OSError):  # another writer may be quicker, or it is another user's
            handle = os.open(left, os.O_RDWR)
            try:
                if _lock(handle, left):
                    left.unlink()
            finally:
                os.close(handle)


def check_writable(*paths: Path | None) -> None:
    """Raise GTPError for paths that cannot be written, before the work whose result would be lost."""
    for path in paths:
        if path is not None:
            with friendly_write_errors(path):
                _check_ordinary(path)
                # Nothing is made yet, as the command may still be refused: a folder is needed that exists.
                with tempfile.TemporaryFile(dir=_nearest_folder(path)):
                    pass


def _check_ordinary(path: Path) -> None:
    """Raise OSError where a file cannot be replaced: root could replace /dev/null itself."""
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    if path.exists() and not path.is_file():
        raise OSError(None, "it is not a regular file")


def _nearest_folder(path: Path) -> Path:
    """The nearest folder above a path that exists; raises if a file is in the way."""
    return next(parent for parent in path.absolute().parents if parent.is_dir() or os.path.lexists(parent))


@contextlib.contextmanager
def folder_kept_if_used(folder: Path) -> Iterator[None]:
    """Make a folder; if what follows fails, those that were made and are still empty are removed again."""
    made = make_folder(folder)
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it; returns those that were not there, the innermost first."""
    with friendly_write_errors(folder):
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, up to the first that something is in."""
    with contextlib.suppress(OSError):  # another process may be quicker, too
        for folder in folders:
            folder.rmdir()


class Lock:
    """Refuses a second run that would write `path`, until it is released or the process ends.

    Workers of a killed process live on for some seconds. As forks they would inherit the lock, so a fork closes its
    copy at once. As a context manager it deletes the file at the end.
    """

    def __init__(self, path: Path) -> None:
        """Lock a file, which is created if it does not exist."""
        self.path = path
        with friendly_write_errors(path):
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(self.handle, path):
            os.close(self.handle)
            raise GTPError(f"another run is writing {path}; wait for it, or choose another path")
        _held.add(self)

    def release(self) -> None:
        if self in _held:
            _held.remove(self)
            os.close(self.handle)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.release()


def is_locked(path: Path) -> bool:
    """Does a run hold this lock now?"""
    if not path.exists():
        return False
    try:
        Lock(path).release()
    except GTPError:
        return True
    return False


def _lock(handle: int, path: Path) -> bool:
    """Try to lock; True on success."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have deleted the file after we opened it.
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


_held: set[Lock] = set()


def _release_in_fork() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_fork)


@contextlib.contextmanager
def friendly_write_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing (no permission, no space, no such folder) into one clear line."""
    try:
        yield
    except OSError as error:
        raise GTPError(
            f"cannot write {path}: {error.strerror or error}; choose another path or free some disk space"
        ) from error
