"""What is in a folder of embeddings: shards, of this run or another, and the manifest that says what they are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtp_vit.errors import GTPError, first_line
from gtp_vit.features.shards import FORMATS, Shard, fingerprint, format_of, read_about
from gtp_vit.runs import distributed
from gtp_vit.runs.files import write_atomically
from gtp_vit.runs.journal import RESTART, differences

VERSION = 1  # of the manifest and of shards
MANIFEST = "manifest.json"
OURS = re.compile(r"embeddings-(\d{6,})\.(?:safetensors|parquet)")


def name_of(number: int, form: str) -> str:
    """The file of a shard."""
    return f"embeddings-{number:06}{FORMATS[form].suffix}"


def prepare(folder: Path, run: dict[str, Any], restart: bool) -> None:
    """Raise GTPError if the folder has files of another run; with `restart`, delete them."""
    stored = _stored_manifest(folder)
    if stored is not None and not restart and stored["run"] != run:
        raise GTPError(f"{folder} has embeddings of a different run: {differences(stored['run'], run)}; {RESTART}")
    for left in folder.glob(".embeddings-*"):  # of a process that was killed while it wrote
        left.unlink(missing_ok=True)
    if restart:
        for path in _shards(folder):
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                _check_ours(path)
                path.unlink()
        (folder / MANIFEST).unlink(missing_ok=True)


def _check_ours(path: Path) -> None:
    """Raise GTPError for a file that has the name of a shard and is none; damaged ones may be deleted."""
    form = format_of(path)
    form.check_installed()
    try:
        found = form.about(path)
    except FileNotFoundError:
        raise
    except Exception:  # both libraries raise errors of many classes
        return
    if found is None:
        raise GTPError(f"{path} was not written by gtp-vit embed; move it away, or write to another folder")


def _stored_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["run"], dict) or not isinstance(found["finished"], bool):
            raise ValueError("it says of no run")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GTPError(
            f"{path} is no manifest of gtp-vit embed ({first_line(error)}); move it away, or write to another folder"
        ) from error
    return found


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if OURS.fullmatch(path.name))


def finished_shards(folder: Path, run: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the shards that any process can see say of themselves, by number; raises for those of another run."""
    found = {}
    for path in _shards(folder):
        about = read_about(path)
        if about.pop("run") != run or path.name != name_of(about["shard"], run["format"]):
            other = read_about(path)["run"]
            why = differences(other, run) or f"it is shard {about['shard']} under another name"
            raise GTPError(f"{path} is of a different run: {why}; {RESTART}")
        found[about["shard"]] = about
    return {number: about for part in distributed.gather(found) for number, about in part.items()}


def make_manifest(
    run: dict[str, Any], every: dict[int, dict[str, Any]], form: str, classes: list[str] | None, total: int | None
) -> dict[str, Any]:
    """What is in the folder, for people and programs."""
    abouts = [every[number] for number in sorted(every)]
    images = sum(about["images"] for about in abouts)
    if total is not None and images != total:
        raise GTPError(f"{images} of {total} images are in the shards; something has deleted files: start it again")
    return {
        "version": VERSION,
        "finished": True,
        "run": run,
        "images": images,
        "embedded": sum(about["embedded"] for about in abouts),
        "classes": classes,
        "shards": [
            {"file": name_of(about["shard"], form), **{key: about[key] for key in ("first", "embedded", "fingerprint")}}
            for about in abouts
        ],
        **{
            key: [{"place": int(place), "image": text} for about in abouts for place, text in about[key].items()]
            for key in ("unreadable", "not_finite")
        },
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest by this one."""
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def forget_unused(folder: Path) -> None:
    """Delete the manifest of a run that was refused before it wrote any file."""
    stored = _stored_manifest(folder)
    if stored is not None and not stored["finished"] and not _shards(folder):
        (folder / MANIFEST).unlink(missing_ok=True)


def read_embeddings(folder: str | Path) -> Iterator[Shard]:
    """What `gtp-vit embed` wrote, file by file in the order of the data set, each checked to be as it was written."""
    folder = Path(folder)
    manifest = _stored_manifest(folder)
    if manifest is None:
        raise GTPError(f"there is no {MANIFEST} in {folder}; give the folder that gtp-vit embed wrote to")
    if not manifest["finished"]:
        raise GTPError(f"the run that writes {folder} has not finished; start the same command again, it resumes")
    return (_checked(folder / entry["file"], entry, manifest["run"]) for entry in manifest["shards"])


def _checked(path: Path, entry: dict[str, Any], run: dict[str, Any]) -> Shard:
    if not path.exists():
        raise GTPError(f"{path} is missing; it may be on another machine that took part in the run")
    if read_about(path)["run"] != run:
        raise GTPError(f"{path} is of a different run than {MANIFEST} beside it; do not mix folders")
    shard = format_of(path).read(path)
    if fingerprint(shard.embeddings) != entry["fingerprint"]:
        raise GTPError(f"{path} has changed since it was written; delete it and start the same command again")
    return shard
