"""WebDataset's tar files that are on this disk, with a place and a name for every image.

webdataset itself can only read such files from beginning to end. Of files on a disk, headers that are read once say
where each image is. So they can be shared by processes and read from anywhere, labels may be missing, and what cannot
be decoded is named.
"""

from __future__ import annotations

import bisect
import glob
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gtp_vit.data import image_file
from gtp_vit.errors import GTPError, first_line, shown
from gtp_vit.runs import distributed

BLOCK = 512  # tar's unit
# What webdataset takes for the name of a sample, and for the ending of one of its files.
KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


class Sample(NamedTuple):
    """Where an image is, and its label."""

    name: str
    offset: int  # of the image in its tar file
    size: int
    label_offset: int
    label_size: int  # 0 = there is none
    problem: str  # "" = none


class Tars:
    """All samples of some tar files, with the interface of timm's readers."""

    def __init__(self, paths: Sequence[Path], root: Path) -> None:
        """Read the headers; processes share that work, and all get all of it."""
        self.root, self.paths = root, list(paths)
        rank, processes = distributed.rank_and_world_size()
        own = {number: index(path) for number, path in list(enumerate(self.paths))[rank::processes]}
        every = {number: found for part in distributed.all_gather(own) for number, found in part.items()}
        self.samples_of = [every[number] for number in range(len(self.paths))]
        self.begins = [0]
        for found in self.samples_of:
            self.begins.append(self.begins[-1] + len(found))

    def __len__(self) -> int:
        return self.begins[-1]

    def __getitem__(self, place: int) -> tuple[Any, int | None]:
        number, sample = self._find(place)
        if sample.problem:
            raise GTPError(sample.problem)
        with open(self.paths[number], "rb") as file:
            image = _read(file, sample.offset, sample.size)
            label = _label(_read(file, sample.label_offset, sample.label_size)) if sample.label_size else None
        return io.BytesIO(image), label

    def filename(self, place: int) -> str:
        number, sample = self._find(place)
        return f"{os.path.relpath(self.paths[number], self.root)}/{sample.name}"

    def listed(self) -> Iterator[str]:
        """A line for each tar file, for the identity of a run."""
        for path, found in zip(self.paths, self.samples_of, strict=True):
            yield f"{os.path.relpath(path, self.root)} {path.stat().st_size} {len(found)}"

    def _find(self, place: int) -> tuple[int, Sample]:
        number = bisect.bisect_right(self.begins, place) - 1
        return number, self.samples_of[number][place - self.begins[number]]


def _label(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise GTPError(f"its label, in the .cls file, is {shown(text)}; it must be a whole number") from None


def paths_of(root: Path, names: Iterable[str]) -> list[Path] | None:
    """The files of a split, whose names may be patterns with *; None if one is not a plain tar file on this disk."""
    found: list[Path] = []
    for name in names:
        here = root / name
        matching = [here] if here.is_file() else sorted(Path(each) for each in glob.glob(str(here), recursive=True))
        if not matching or any(path.suffix != ".tar" or not path.is_file() for path in matching):
            return None
        found += matching
    return found


def index(path: Path) -> list[Sample]:
    """The samples of a tar file: files in a row with the same name up to the first dot."""
    found: list[Sample] = []
    key = ""
    parts: dict[str, tuple[str, int, int]] = {}
    members = _members(path)
    while True:
        try:
            member = next(members, None)
        except (OSError, tarfile.TarError) as error:
            found += [_sample(key, parts)] if parts else []
            found.append(
                Sample("", 0, 0, 0, 0, f"the tar file is damaged behind its image {len(found)}: {first_line(error)}")
            )
            return found
        split = KEY.fullmatch(member[0]) if member is not None else None
        if parts and (split is None or split[1] != key):
            found.append(_sample(key, parts))
            parts = {}
        if member is None:
            return found
        if split is not None and not os.path.basename(split[1]).startswith("__"):  # webdataset's own notes
            key = split[1]
            parts[split[2].lower()] = member


def _sample(key: str, parts: dict[str, tuple[str, int, int]]) -> Sample:
    image = next((parts[ending[1:]] for ending in image_file.ENDINGS if ending[1:] in parts), None)
    _, label_offset, label_size = parts.get("cls", ("", 0, 0))
    if image is None:
        return Sample(key, 0, 0, 0, 0, f"it has no picture, only {', '.join(sorted(parts))}")
    return Sample(*image, label_offset, label_size, "")


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each file in a tar file.

    Headers of the usual kind are read here, 10 times as fast as by tarfile, which reads files with any other.
    """
    plain: list[tuple[str, int, int]] = []
    with open(path, "rb", buffering=BLOCK) as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            header = file.read(BLOCK)
            if header == bytes(BLOCK):
                yield from plain
                return
            if len(header) < BLOCK or header[257:262] != b"ustar" or header[156:157] not in b"05\0" or header[345]:
                break
            try:
                name, length = header[:100].rstrip(b"\0").decode(), int(header[124:136].rstrip(b" \0"), 8)
            except ValueError:
                break
            begin = file.tell()
            if begin + length > size:
                break
            if header[156:157] != b"5":
                plain.append((name, begin, length))
            file.seek(begin + -(-length // BLOCK) * BLOCK)
    with tarfile.open(path, "r:", errors="surrogateescape") as tar:
        for member in tar:
            if member.isfile():
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("unexpected end of data")
                yield member.name, member.offset_data, member.size


def _read(file: Any, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise GTPError("the tar file has become shorter since the run began")
    return data
