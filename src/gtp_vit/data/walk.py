"""The files of a tree, each once, whatever links lead to it.

Links to folders are followed, but a real folder is visited once; so a loop ends. Of several names of one file the first
counts, and names without links come before those with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gtp_vit.errors import printable

Key = tuple[int, int]  # device and number of a file or folder, which all its names share


class Walk:
    """The files below a folder whose names `includes` accepts."""

    def __init__(self, root: str | Path, includes: Callable[[str], bool], *, count_links: bool = False) -> None:
        """Walk; with `count_links` a file counts once for each of its names. Loops end all the same."""
        self.includes, self.count_links = includes, count_links
        self.paths: list[str] = []
        self.duplicates: dict[str, str] = {}  # names of files and folders that were counted already -> as what
        self.unreadable_folders: list[str] = []  # folders that could not be opened
        self.folders: dict[Key, str] = {}  # as they were entered
        self.files: dict[Key, str] = {}  # those that may have other names: links and hard links
        links, file_links = self._enter(os.fspath(root), ()), []
        while links:  # folders first: which files are inside is known then
            later, links = links, []
            for path, above in sorted(later):
                if os.path.isdir(path):
                    links += self._enter(path, above)
                elif includes(os.path.basename(path)):
                    file_links.append(path)
        for path in sorted(file_links):
            self._add_link(path)
        self.paths.sort()

    def _enter(self, begin: str, above: tuple[Key, ...]) -> list[tuple[str, tuple[Key, ...]]]:
        """Take what is in a folder and below; returns the links there, with the folders that they are in."""
        links, todo = [], [(begin, above)]
        while todo:
            folder, chain = todo.pop()
            try:
                key, entries = _key(os.stat(folder)), list(os.scandir(folder))
            except OSError:  # no permission, or it has gone
                self.unreadable_folders.append(folder)
                continue
            if key in chain or (key in self.folders and not self.count_links):
                self.duplicates[folder] = self.folders[key]
                continue
            self.folders.setdefault(key, folder)
            below = []
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_symlink():
                    links.append((entry.path, (*chain, key)))
                elif entry.is_dir():
                    below.append((entry.path, (*chain, key)))
                elif self.includes(entry.name):
                    status = entry.stat()
                    self._add(entry.path, _key(status) if status.st_nlink > 1 else None)
            todo += reversed(below)
        return links

    def _add(self, path: str, key: Key | None) -> None:
        """Count a file, unless it was counted; without a key it has one name."""
        first = path if key is None else self.files.setdefault(key, path)
        if first == path or self.count_links:
            self.paths.append(path)
        else:
            self.duplicates[path] = first

    def _add_link(self, path: str) -> None:
        """The file at the end of a link, which may be in a folder that was visited."""
        try:
            status, real = os.stat(path), os.path.realpath(path)
            inside = self.folders.get(_key(os.stat(os.path.dirname(real))))
        except OSError:  # it leads nowhere: reading it will say so
            self.paths.append(path)
            return
        name = os.path.basename(real)
        if inside is not None and self.includes(name) and not self.count_links:
            self.duplicates[path] = os.path.join(inside, name)
        else:
            self._add(path, _key(status))


def _key(status: os.stat_result) -> Key:
    return status.st_dev, status.st_ino


def duplicates_among(paths: Iterable[str]) -> dict[str, str]:
    """The names in a list of files that an earlier one names already -> the earlier name."""
    files: dict[Key, str] = {}
    duplicates = {}
    for path in paths:
        try:
            first = files.setdefault(_key(os.stat(path)), path)
        except OSError:  # reading it will say so
            continue
        if first != path:
            duplicates[path] = first
    return duplicates


def describe_duplicates(duplicates: Mapping[str, str], root: str | Path) -> str:
    """A sentence on names that lead to what was counted already."""
    name = min(duplicates)
    one, other = os.path.relpath(name, root), os.path.relpath(duplicates[name], root)
    more = f", and {len(duplicates) - 1} more names like it" if len(duplicates) > 1 else ""
    same = "the folder itself" if other == "." else other
    return printable(f"in {root}, {one} is the same as {same}{more}; counted once")
