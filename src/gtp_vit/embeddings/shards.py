"""One file of embeddings: names, places, vectors, and the run that it belongs to; as safetensors or Parquet.

Both say in their metadata under `gtp_vit`, as JSON, what they hold, so a file that is alone can still be understood
and a file of another run is recognised. The same content gives the same bytes.

Shapes: N images, C numbers in an embedding; [N, C] is [N, patches, C] of patches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gtp_vit.errors import GTPError, first_line, shown

METADATA = "gtp_vit"
VERSION = 2  # of shards and of the manifest; files of version 1 proved their vectors only
LONGEST_HEADER = 90_000_000  # safetensors refuses to read headers of more than 100 MB
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Shard:
    """The content of one file."""

    names: tuple[str, ...]  # N
    places: Array  # [N] int64, in the data set
    embeddings: Array  # [N, C]
    labels: Array | None  # [N] int64; None = the data set has none
    about: dict[str, Any]  # JSON: the run and the part of it


class Format(Protocol):
    """How a shard becomes a file."""

    name: str
    suffix: str

    def check_installed(self) -> None:
        """Raise GTPError with the command that installs what is missing."""
        return

    def content(self, shard: Shard) -> bytes:
        """The bytes of the file."""

    def about(self, path: Path) -> dict[str, Any] | None:
        """What a file says of itself; None if it does not say so. Only its header is read."""

    def read(self, path: Path) -> Shard:
        """The whole file."""

    def is_ours(self, path: Path) -> bool:
        """Does its header say that this package wrote it? It may be damaged behind that."""


class Safetensors(Format):
    """Tensors `embeddings`, `places` and `labels`; names as a JSON list in the metadata, under `names`."""

    name = "safetensors"
    suffix = ".safetensors"

    def content(self, shard: Shard) -> bytes:
        from safetensors.numpy import save

        names = json.dumps(shard.names)
        if len(names) > LONGEST_HEADER:
            raise GTPError(
                f"the names of {len(shard.names)} images are too long for one file; give fewer images a file"
            )
        tensors = {"embeddings": shard.embeddings, "places": shard.places}
        if shard.labels is not None:
            tensors["labels"] = shard.labels
        made = save(tensors)
        # The library writes metadata in an order that changes from call to call.
        length = int.from_bytes(made[:8], "little")
        header = {
            "__metadata__": {METADATA: json.dumps(shard.about), "names": names},
            **json.loads(made[8 : 8 + length]),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([len(text).to_bytes(8, "little"), text, memoryview(made)[8 + length :]])

    def about(self, path: Path) -> dict[str, Any] | None:
        return _about(self._metadata(path))

    def read(self, path: Path) -> Shard:
        from safetensors.numpy import load_file

        stored, metadata = load_file(path), self._metadata(path)
        about = _about(metadata)
        return Shard(
            tuple(json.loads(metadata["names"])),
            stored["places"],
            stored["embeddings"],
            stored.get("labels"),
            {} if about is None else about,
        )

    def is_ours(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:  # the library refuses files that were cut off
                length = int.from_bytes(file.read(8), "little")
                header: Any = json.loads(file.read(length)) if length <= 2 * LONGEST_HEADER else None
            return _about(header["__metadata__"]) is not None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def _metadata(self, path: Path) -> dict[str, str]:
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            return file.metadata() or {}


class Parquet(Format):
    """Columns `name`, `place`, `embedding` (a list of fixed length, of patches one behind the other) and `label`."""

    name = "parquet"
    suffix = ".parquet"

    def check_installed(self) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise GTPError("Parquet needs pyarrow, which is not installed: pip install 'gtp-vit[parquet]'")

    def content(self, shard: Shard) -> bytes:
        import pyarrow
        from pyarrow import parquet

        width = int(np.prod(shard.embeddings.shape[1:]))
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(shard.embeddings.reshape(-1)), width)
        columns = {"name": pyarrow.array(shard.names, pyarrow.string()), "place": shard.places, "embedding": vectors}
        if shard.labels is not None:
            columns["label"] = shard.labels
        table = pyarrow.table(columns, metadata={METADATA: json.dumps(shard.about)})
        file = io.BytesIO()
        parquet.write_table(table, file, use_dictionary=False, compression="zstd")
        return file.getvalue()

    def about(self, path: Path) -> dict[str, Any] | None:
        from pyarrow import parquet

        metadata = parquet.read_schema(path).metadata or {}
        return _about({key.decode(): value.decode() for key, value in metadata.items()})

    def read(self, path: Path) -> Shard:
        from pyarrow import parquet

        table = parquet.read_table(path)
        vectors = table["embedding"].combine_chunks()
        about = _about({key.decode(): value.decode() for key, value in table.schema.metadata.items()})
        return Shard(
            tuple(table["name"].to_pylist()),
            table["place"].to_numpy().copy(),
            vectors.flatten()
            .to_numpy(zero_copy_only=False)
            .reshape(len(table), *_shape(about))
            .copy(),  # may be changed
            table["label"].to_numpy().copy() if "label" in table.column_names else None,
            {} if about is None else about,
        )

    def is_ours(self, path: Path) -> bool:
        try:
            return self.about(path) is not None
        except FileNotFoundError:
            raise
        except Exception:  # the library raises errors of many classes; a file that was cut off has no header
            return False


_EVERY: tuple[Format, ...] = (Safetensors(), Parquet())
FORMATS = {each.name: each for each in _EVERY}


def format_of(path: Path) -> Format:
    """The format that the ending of a name means."""
    return next(each for each in _EVERY if each.suffix == path.suffix)


def read_about(path: Path) -> dict[str, Any]:
    """What a shard says of itself; raises GTPError for files that are damaged or not ours."""
    form = format_of(path)
    form.check_installed()
    try:
        found = form.about(path)
    except Exception as error:  # both libraries raise errors of many classes
        raise GTPError(
            f"{path} is damaged: {first_line(error)}; delete it, and its images are embedded again"
        ) from error
    if found is None:
        raise GTPError(f"{path} was not written by gtp-vit embed; move it away, or write to another folder")
    if found.get("version") != VERSION:
        raise GTPError(
            f"{path} has version {shown(found.get('version'))} of these files, and this gtp-vit has {VERSION}; begin "
            "anew with --restart, or write to another folder"
        )
    if not _is_complete(found):
        raise _changed(path)
    return found


def read_shard(path: Path, about: dict[str, Any] | None = None) -> Shard:
    """The content of a file, proved to be what was written; `about` = what its manifest says of it, too."""
    said = read_about(path)
    if any(said[key] != value for key, value in (about or {}).items()):
        raise _changed(path)
    try:
        shard = format_of(path).read(path)
        whole = fingerprint(shard) == said["fingerprint"]
    except Exception as error:  # both libraries raise errors of many classes
        raise _changed(path) from error
    if not whole:
        raise _changed(path)
    return shard


def _changed(path: Path) -> GTPError:
    return GTPError(f"{path} has changed since it was written; delete it and start the same command again")


_TYPES = {"shard": int, "first": int, "images": int, "embedded": int, "fingerprint": str, "run": dict}


def _is_complete(about: dict[str, Any]) -> bool:
    """Does it have all that a shard says of itself?"""
    texts = [about.get(key) for key in ("unreadable", "not_finite")]
    return all(type(about.get(key)) is kind for key, kind in _TYPES.items()) and all(
        isinstance(each, dict) and all(isinstance(text, str) and key.isdecimal() for key, text in each.items())
        for each in texts
    )


def fingerprint(shard: Shard) -> str:
    """A hash of all that a file holds: vectors, places, names, labels, and what it says of itself."""
    digest = hashlib.sha256()
    about = {key: value for key, value in shard.about.items() if key != "fingerprint"}
    labels = "no labels" if shard.labels is None else "labels"
    digest.update(json.dumps([about, shard.names, labels], sort_keys=True).encode())
    for array in (shard.embeddings, shard.places, shard.labels):
        if array is not None:
            digest.update(f"{array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _shape(about: dict[str, Any] | None) -> list[int]:
    """Of one image's vectors, which Parquet stores as one list."""
    return [-1] if about is None else about["run"]["output"]["shape"]


def _about(metadata: dict[str, str]) -> dict[str, Any] | None:
    try:
        found = json.loads(metadata.get(METADATA, "null"))
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("run"), dict) else None
