"""WebDataset's tar files that are on this disk, with a place and a name for every image.

webdataset itself can only read such files from beginning to end. Of files on a disk, headers that are read once say
where each image is. So they can be shared by processes and read from anywhere, labels may be missing, and what cannot
be decoded is named.
"""

from __future__ import annotations

import bisect
import glob
import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from gtp_vit.data.image_file import IMAGE_EXTENSIONS
from gtp_vit.data.reader import OpenedImage, Reader
from gtp_vit.errors import GTPError, first_line, short_repr
from gtp_vit.runs import distributed

# What webdataset takes for the name of a sample, and for the ending of one of its files.
KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int
    size: int


class Sample(NamedTuple):
    """An image in a tar file, and its label, or why there is no image."""

    name: str
    image: Member | None = None
    label: Member | None = None
    error: str = ""


class TarReader(Reader):
    """All samples of some tar files."""

    def __init__(self, paths: Sequence[Path], root: Path) -> None:
        """Read the headers; processes share that work, and all get all of it."""
        self.root: Path = root
        self.paths = list(paths)
        rank, processes = distributed.rank_and_world_size()
        own = {number: samples_of(path) for number, path in list(enumerate(self.paths))[rank::processes]}
        by_number = {number: samples for part in distributed.all_gather(own) for number, samples in part.items()}
        self.samples = [by_number[number] for number in range(len(self.paths))]  # of each tar file
        self.first_indices = [0, *itertools.accumulate(map(len, self.samples))]

    @property
    def has_labels(self) -> bool:
        return any(sample.label is not None for samples in self.samples for sample in samples)

    def __len__(self) -> int:
        return self.first_indices[-1]

    def open(self, index: int) -> OpenedImage:
        path, sample = self._find(index)
        if sample.image is None:
            raise GTPError(sample.error)
        with path.open("rb") as file:
            image = _read(file, sample.image)
            label = None if sample.label is None else _label(_read(file, sample.label))
        return OpenedImage(self.name(index), io.BytesIO(image), label)

    def name(self, index: int) -> str:
        path, sample = self._find(index)
        return f"{os.path.relpath(path, self.root)}/{sample.name}"

    def listing(self, count: int) -> Iterator[str]:
        yield f"{count}"
        for path, samples in zip(self.paths, self.samples, strict=True):
            yield f"{os.path.relpath(path, self.root)} {path.stat().st_size} {len(samples)}"

    def _find(self, index: int) -> tuple[Path, Sample]:
        number = bisect.bisect_right(self.first_indices, index) - 1
        return self.paths[number], self.samples[number][index - self.first_indices[number]]


def tar_files(root: Path, names: Iterable[str]) -> list[Path] | None:
    """The files of a split, whose names may be patterns with *; None if one is not a plain tar file on this disk."""
    paths: list[Path] = []
    for name in names:
        here = root / name
        matching = [here] if here.is_file() else sorted(Path(match) for match in glob.glob(str(here), recursive=True))
        if not matching or any(path.suffix != ".tar" or not path.is_file() for path in matching):
            return None
        paths += matching
    return paths


def samples_of(path: Path) -> list[Sample]:
    """The samples of a tar file: files in a row with the same name up to the first dot."""
    members: list[Member] = []
    problem = ""
    try:
        members.extend(_members(path))
    except (OSError, tarfile.TarError) as error:
        problem = first_line(error)
    samples = [
        _sample(key, {_split(member.name)[1].lower(): member for member in group})
        for key, group in itertools.groupby(members, key=lambda member: _split(member.name)[0])
        if key and not os.path.basename(key).startswith("__")  # webdataset's own notes
    ]
    if problem:
        samples.append(Sample("", error=f"the tar file is damaged after its image {len(samples)}: {problem}"))
    return samples


def _split(name: str) -> tuple[str, str]:
    """The name of a sample, and the ending of one of its files; empty for files that belong to no sample."""
    match = KEY.fullmatch(name)
    return ("", "") if match is None else (match[1], match[2])


def _sample(key: str, members: dict[str, Member]) -> Sample:
    image = next((members[ending[1:]] for ending in IMAGE_EXTENSIONS if ending[1:] in members), None)
    if image is None:
        return Sample(key, error=f"it has no picture, only {', '.join(sorted(members))}")
    return Sample(image.name, image, members.get("cls"))


def _members(path: Path) -> Iterator[Member]:
    """The files in a tar file; tarfile itself takes a header that is damaged for the end, except the first."""
    size = path.stat().st_size
    with tarfile.open(path, "r:", errors="surrogateescape") as tar:
        for member in tar:
            if member.offset_data + member.size > size:
                raise tarfile.ReadError("unexpected end of data")
            if member.isfile():
                yield Member(member.name, member.offset_data, member.size)
        end = tar.offset
    with path.open("rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("bad header")


def _read(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    data = file.read(member.size)
    if len(data) < member.size:
        raise GTPError("the tar file has become shorter since the run began")
    return data


def _label(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise GTPError(f"its label, in the .cls file, is {short_repr(text)}; it must be an integer") from None
