"""What is in a folder of embeddings: shards, of this run or another, and the manifest that says what they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.embeddings.shards import FORMATS, VERSION, Shard, format_of, read_about, read_shard
from gtp_vit.errors import GTPError, counted, first_line, shown
from gtp_vit.runs import distributed
from gtp_vit.runs.files import write_atomically
from gtp_vit.runs.identity import differences
from gtp_vit.runs.journal import RESTART

MANIFEST = "manifest.json"
OURS = re.compile(r"embeddings-(\d{6,})\.(?:safetensors|parquet)")
HALF = re.compile(rf"\.{OURS.pattern}\.\w+")  # a shard that was being written
ENTRY = ("first", "embedded", "fingerprint")  # what the manifest has of a shard


def name_of(number: int, form: str) -> str:
    """The file of a shard."""
    return f"embeddings-{number:06}{FORMATS[form].suffix}"


def prepare(folder: Path, run: dict[str, Any], restart: bool) -> None:
    """Raise GTPError if the folder has files of another run; with `restart`, delete them."""
    stored = _stored_manifest(folder)
    if stored is not None and not restart and stored["run"] != run:
        raise GTPError(f"{folder} has embeddings of a different run: {differences(stored['run'], run)}; {RESTART}")
    ours = _shards(folder) if restart else []
    for path in ours:
        _check_ours(path)  # all of them, before the first is deleted
    halves = [path for path in folder.iterdir() if HALF.fullmatch(path.name) and path.is_file()]
    for path in (*halves, *ours):  # halves are of a process that was killed while it wrote
        path.unlink(missing_ok=True)  # another process may be quicker
    if restart:
        (folder / MANIFEST).unlink(missing_ok=True)


def _check_ours(path: Path) -> None:
    """Raise GTPError for a file that has the name of a shard and whose header is not ours."""
    form = format_of(path)
    form.check_installed()
    with contextlib.suppress(FileNotFoundError):
        if not form.is_ours(path):
            raise GTPError(
                f"{path} was not written by gtp-vit embed, or its header is damaged; move or delete it, or write to "
                "another folder"
            )


def _stored_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, proved to be as it was written; None if there is none."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["run"], dict) or not isinstance(found["finished"], bool):
            raise ValueError("it says of no run")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GTPError(
            f"{path} is no manifest of gtp-vit embed ({first_line(error)}); move it away, or write to another folder"
        ) from error
    if found.get("version") != VERSION:
        raise GTPError(
            f"{path} has version {shown(found.get('version'))}, and this gtp-vit has {VERSION}; read the folder with "
            "the version that wrote it, or delete it and embed again"
        )
    if found["finished"] and found.get("fingerprint") != _fingerprint(found):
        raise GTPError(f"{path} has changed since it was written; delete it and start the same command again")
    return found


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of all that a manifest says."""
    said = {key: value for key, value in manifest.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if OURS.fullmatch(path.name))


def finished_shards(folder: Path, run: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the shards that any process can see say of themselves, by number; each was read and is as it was written.

    Raises GTPError for those of another run, and for damaged ones.
    """
    found = {}
    for path in _shards(folder):
        about = read_about(path)
        stored = about.pop("run")
        if stored != run or path.name != name_of(about["shard"], run["format"]):
            why = differences(stored, run) or f"it is shard {about['shard']} under another name"
            raise GTPError(f"{path} is of a different run: {why}; {RESTART}")
        found[about["shard"]] = about
    seen = distributed.all_gather(found)  # by every process, where they share a disk; one of them reads the file
    for number in found:
        sees = [rank for rank, each in enumerate(seen) if number in each]
        if sees[number % len(sees)] == distributed.rank_and_world_size()[0]:
            read_shard(folder / name_of(number, run["format"]))
    return {number: about for part in seen for number, about in part.items()}


def make_manifest(
    run: dict[str, Any], every: dict[int, dict[str, Any]], form: str, classes: list[str] | None, total: int | None
) -> dict[str, Any]:
    """What is in the folder, for people and programs."""
    abouts = [every[number] for number in sorted(every)]
    images = sum(about["images"] for about in abouts)
    if total is not None and images != total:
        raise GTPError(
            f"{images} of {counted(total, 'image', 'images')} are in the shards; something has deleted files: start it "
            "again"
        )
    made = {
        "version": VERSION,
        "finished": True,
        "run": run,
        "images": images,
        "embedded": sum(about["embedded"] for about in abouts),
        "classes": classes,
        "shards": [{"file": name_of(about["shard"], form), **{key: about[key] for key in ENTRY}} for about in abouts],
        **{
            key: [{"place": int(place), "image": text} for about in abouts for place, text in about[key].items()]
            for key in ("unreadable", "not_finite")
        },
    }
    return {**made, "fingerprint": _fingerprint(made)}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest by this one."""
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def forget_unused(folder: Path) -> None:
    """Delete the manifest of a run that was refused before it wrote any file."""
    stored = _stored_manifest(folder)
    if stored is not None and not stored["finished"] and not _shards(folder):
        (folder / MANIFEST).unlink(missing_ok=True)


def read_embeddings(folder: str | Path) -> Iterator[Shard]:
    """What `gtp-vit embed` wrote, file by file in the order of the data set.

    Of each file all is checked to be as it was written: vectors, names, places, labels, and what it says of itself.
    """
    folder = Path(folder)
    manifest = _finished_manifest(folder)
    return (_checked(folder, entry, manifest["run"]) for entry in manifest["shards"])


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a finished run whose files are all as they were written; raises GTPError with the others."""
    manifest = _finished_manifest(folder)
    problems = []
    for entry in manifest["shards"]:
        try:
            _checked(folder, entry, manifest["run"])
        except GTPError as error:
            problems.append(str(error))
    named = {entry["file"] for entry in manifest["shards"]}
    problems += [f"{path} is not in {MANIFEST}" for path in _shards(folder) if path.name not in named]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        count = f"{len(problems)} of {counted(len(named), 'file', 'files')} are not as they were written"
        raise GTPError(problems[0] if len(problems) == 1 else f"{count}: {'; '.join(problems[:5])}{more}")
    return manifest


def _finished_manifest(folder: Path) -> dict[str, Any]:
    manifest = _stored_manifest(folder)
    if manifest is None:
        raise GTPError(f"there is no {MANIFEST} in {folder}; give the folder that gtp-vit embed wrote to")
    if not manifest["finished"]:
        raise GTPError(f"the run that writes {folder} has not finished; start the same command again, it resumes")
    return manifest


def _checked(folder: Path, entry: dict[str, Any], run: dict[str, Any]) -> Shard:
    path = folder / entry["file"]
    if not path.exists():
        raise GTPError(f"{path} is missing; it may be on another machine that took part in the run")
    if read_about(path)["run"] != run:
        raise GTPError(f"{path} is of a different run than {MANIFEST} beside it; do not mix folders")
    return read_shard(path, {key: entry[key] for key in ENTRY})
