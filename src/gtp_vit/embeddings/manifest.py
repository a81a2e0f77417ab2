"""The content of a folder of embeddings: shards, of this run or another, and the manifest that lists them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypedDict

from gtp_vit.embeddings.header import VERSION, ShardHeader
from gtp_vit.embeddings.shards import FORMATS, Shard, changed, format_of, read_header, read_shard
from gtp_vit.errors import GTPError, first_line, plural, short_repr
from gtp_vit.runs import distributed
from gtp_vit.runs.files import write_atomically
from gtp_vit.runs.identity import differences
from gtp_vit.runs.journal import RESTART_HINT

MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"embeddings-(\d{6,})\.(?:safetensors|parquet)")
PARTIAL_SHARD_NAME = re.compile(rf"\.{SHARD_NAME.pattern}\.\w+")  # a shard that was being written
Run = Mapping[str, object]  # its identity, as JSON


class Entry(TypedDict):
    """The manifest's entry of a shard."""

    file: str
    first: int
    embedded: int
    fingerprint: str


class UnreadableImage(TypedDict):
    """An image that has no embedding."""

    index: int
    image: str  # its name and why


class UnfinishedManifest(TypedDict):
    """The manifest of a run that has not finished."""

    version: int
    finished: Literal[False]
    run: Run


class Manifest(TypedDict):
    """The manifest of a run that has finished."""

    version: int
    finished: Literal[True]
    run: Run
    images: int
    embedded: int
    classes: list[str] | None
    shards: list[Entry]
    unreadable: list[UnreadableImage]
    not_finite: list[UnreadableImage]
    fingerprint: str  # of all of this


def shard_file_name(number: int, file_format: str) -> str:
    """The file of a shard."""
    return f"embeddings-{number:06}{FORMATS[file_format].suffix}"


def prepare(folder: Path, run: Run, restart: bool) -> None:
    """Raise GTPError if the folder has files of another run; with `restart`, delete them."""
    stored = _stored_manifest(folder)
    if stored is not None and not restart and stored["run"] != run:
        raise GTPError(f"{folder} has embeddings of a different run: {differences(stored['run'], run)}; {RESTART_HINT}")
    ours = _shards(folder) if restart else []
    for path in ours:
        _check_is_shard(path)  # all of them, before the first is deleted
    halves = [path for path in folder.iterdir() if PARTIAL_SHARD_NAME.fullmatch(path.name) and path.is_file()]
    for path in (*halves, *ours):  # halves are of a process that was killed while it wrote
        path.unlink(missing_ok=True)  # another process may be quicker
    if restart:
        (folder / MANIFEST).unlink(missing_ok=True)


def _check_is_shard(path: Path) -> None:
    """Raise GTPError for a file that has the name of a shard and whose header is not ours."""
    form = format_of(path)
    form.check_installed()
    with contextlib.suppress(FileNotFoundError):
        if not form.is_ours(path):
            raise GTPError(
                f"{path} was not written by gtp-vit embed, or its header is damaged; move or delete it, or write to "
                "another folder"
            )


def _stored_manifest(folder: Path) -> Manifest | UnfinishedManifest | None:
    """The manifest, proved to be as it was written; None if there is none."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["run"], dict) or not isinstance(manifest["finished"], bool):
            raise ValueError("it does not describe a run")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GTPError(
            f"{path} is not a manifest of gtp-vit embed ({first_line(error)}); move it away, or choose another folder"
        ) from error
    if manifest.get("version") != VERSION:
        raise GTPError(
            f"{path} has version {short_repr(manifest.get('version'))}, and this gtp-vit has {VERSION}; read the "
            "folder with the version that wrote it, or delete it and embed again"
        )
    if manifest["finished"] and manifest.get("fingerprint") != _fingerprint(manifest):
        raise GTPError(f"{path} has changed since it was written; delete it and start the same command again")
    return manifest


def _fingerprint(manifest: Mapping[str, object]) -> str:
    """A hash of all that a manifest says."""
    content = {key: value for key, value in manifest.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name))


def finished_shards(folder: Path, run: Run) -> dict[int, ShardHeader]:
    """Headers of the shards that any process can see, by number; each was read and is as it was written.

    Raises GTPError for those of another run, and for damaged ones.
    """
    headers, form = {}, str(run["format"])
    for path in _shards(folder):
        header = read_header(path)
        if header.run != run or path.name != shard_file_name(header.shard, form):
            why = differences(header.run, run) or f"it is shard {header.shard} under another name"
            raise GTPError(f"{path} is of a different run: {why}; {RESTART_HINT}")
        headers[header.shard] = dataclasses.replace(header, run=run)
    # Each file is read by one process; where processes share a disk, all of them list it.
    by_process = distributed.all_gather(headers)
    for number in headers:
        sees = [rank for rank, visible in enumerate(by_process) if number in visible]
        if sees[number % len(sees)] == distributed.rank_and_world_size()[0]:
            read_shard(folder / shard_file_name(number, form))
    return {number: header for part in by_process for number, header in part.items()}


def make_manifest(
    run: Run, every: dict[int, ShardHeader], file_format: str, classes: list[str] | None, total: int | None
) -> Manifest:
    """The manifest of the folder, for people and programs."""
    headers = [every[number] for number in sorted(every)]
    images = sum(header.images for header in headers)
    if total is not None and images != total:
        raise GTPError(
            f"{images} of {plural(total, 'image', 'images')} are in the shards; something has deleted files: start it "
            "again"
        )
    manifest: Manifest = {
        "version": VERSION,
        "finished": True,
        "run": run,
        "images": images,
        "embedded": sum(header.embedded for header in headers),
        "classes": classes,
        "shards": [_entry(header, file_format) for header in headers],
        "unreadable": _unreadable_images(header.unreadable for header in headers),
        "not_finite": _unreadable_images(header.not_finite for header in headers),
        "fingerprint": "",
    }
    return {**manifest, "fingerprint": _fingerprint(manifest)}


def _entry(header: ShardHeader, file_format: str) -> Entry:
    file = shard_file_name(header.shard, file_format)
    return {"file": file, "first": header.first, "embedded": header.embedded, "fingerprint": header.fingerprint}


def _unreadable_images(shards: Iterable[Mapping[int, str]]) -> list[UnreadableImage]:
    return [{"index": place, "image": text} for shard in shards for place, text in shard.items()]


def write_manifest(folder: Path, manifest: Manifest | UnfinishedManifest) -> None:
    """Replace the manifest by this one."""
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def delete_unused_manifest(folder: Path) -> None:
    """Delete the manifest of a run that was refused before it wrote any file."""
    stored = _stored_manifest(folder)
    if stored is not None and not stored["finished"] and not _shards(folder):
        (folder / MANIFEST).unlink(missing_ok=True)


def read_embeddings(folder: str | Path) -> Iterator[Shard]:
    """Read the embeddings that `gtp-vit embed` wrote, file by file in the order of the data set.

    Every file is checked to be as it was written: vectors, names, indices, labels and header.

    Args:
        folder: the --output of `gtp-vit embed`.

    Yields:
        Shards with `embeddings`, `indices`, `names` and `labels`.

    Raises:
        GTPError: the run has not finished, or a file is missing, damaged or of another run.

    >>> from gtp_vit.cli.app import main
    >>> folder = getfixture("tmp_path") / "vectors"
    >>> code = main(["embed", "--limit", "5", "--workers", "0", "--output", str(folder)])  # doctest: +ELLIPSIS
    fashion_vit with ...
    >>> [tuple(shard.embeddings.shape) for shard in read_embeddings(folder)]
    [(5, 64)]
    """
    folder = Path(folder)
    manifest = _finished_manifest(folder)
    return (_check_shard(folder, entry, manifest["run"]) for entry in manifest["shards"])


def verify(folder: Path) -> Manifest:
    """The manifest of a finished run whose files are all as they were written; raises GTPError with the others."""
    manifest = _finished_manifest(folder)
    problems = []
    for entry in manifest["shards"]:
        try:
            _check_shard(folder, entry, manifest["run"])
        except GTPError as error:
            problems.append(str(error))
    named = {entry["file"] for entry in manifest["shards"]}
    problems += [f"{path} is not in {MANIFEST}" for path in _shards(folder) if path.name not in named]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        count = f"{len(problems)} of {plural(len(named), 'file', 'files')} are not as they were written"
        raise GTPError(problems[0] if len(problems) == 1 else f"{count}: {'; '.join(problems[:5])}{more}")
    return manifest


def _finished_manifest(folder: Path) -> Manifest:
    manifest = _stored_manifest(folder)
    if manifest is None:
        raise GTPError(f"there is no {MANIFEST} in {folder}; give the folder that gtp-vit embed wrote to")
    if not manifest["finished"]:
        raise GTPError(f"the run that writes {folder} has not finished; start the same command again, it resumes")
    return manifest


def _check_shard(folder: Path, entry: Entry, run: Run) -> Shard:
    path = folder / entry["file"]
    if not path.exists():
        raise GTPError(f"{path} is missing; it may be on another machine that took part in the run")
    header = read_header(path)
    if header.run != run:
        raise GTPError(f"{path} is of a different run than {MANIFEST} beside it; do not mix folders")
    if _entry(header, format_of(path).name) != entry:
        raise changed(path)
    return read_shard(path)
