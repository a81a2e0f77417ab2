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
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gtp_vit.embeddings.header import VERSION, ShardHeader
from gtp_vit.errors import GTPError, first_line, short_repr

METADATA = "gtp_vit"
StoredHeader = dict[str, object]  # as JSON, before it is checked
MAX_HEADER_BYTES = 90_000_000  # safetensors refuses to read headers of more than 100 MB
Integers = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True)
class Shard:
    """The content of one file."""

    names: tuple[str, ...]  # N
    indices: Integers  # [N], in the data set
    embeddings: Vectors  # [N, C]
    labels: Integers | None  # [N]; None = the data set has none
    header: ShardHeader


class Format(Protocol):
    """A file format of shards."""

    name: str
    suffix: str

    def check_installed(self) -> None:
        """Raise GTPError with the command that installs what is missing."""
        return

    def serialize(self, shard: Shard) -> bytes:
        """The bytes of the file."""

    def header(self, path: Path) -> StoredHeader | None:
        """The header of a file; None if it has none. Nothing else of it is read."""

    def read(self, path: Path) -> Shard:
        """The whole file."""

    def is_ours(self, path: Path) -> bool:
        """Does its header say that this package wrote it? It may be damaged behind that."""


class Safetensors(Format):
    """Tensors `embeddings`, `indices` and `labels`; names as a JSON list in the metadata, under `names`."""

    name = "safetensors"
    suffix = ".safetensors"

    def serialize(self, shard: Shard) -> bytes:
        from safetensors.numpy import save

        names = json.dumps(shard.names)
        if len(names) > MAX_HEADER_BYTES:
            raise GTPError(
                f"the names of {len(shard.names)} images are too long for one file; put fewer images into a file"
            )
        tensors = {"embeddings": shard.embeddings, "indices": shard.indices}
        if shard.labels is not None:
            tensors["labels"] = shard.labels
        serialized = save(tensors)
        # The library writes metadata in an order that changes from call to call.
        length = int.from_bytes(serialized[:8], "little")
        header = {
            "__metadata__": {METADATA: json.dumps(shard.header.to_dict()), "names": names},
            **json.loads(serialized[8 : 8 + length]),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([len(text).to_bytes(8, "little"), text, memoryview(serialized)[8 + length :]])

    def header(self, path: Path) -> StoredHeader | None:
        return _stored_header(self._metadata(path))

    def read(self, path: Path) -> Shard:
        from safetensors.numpy import load_file

        stored, metadata = load_file(path), self._metadata(path)
        return Shard(
            tuple(json.loads(metadata["names"])),
            stored["indices"],
            stored["embeddings"],
            stored.get("labels"),
            _checked_header(path, _stored_header(metadata)),
        )

    def is_ours(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:  # the library refuses files that were cut off
                length = int.from_bytes(file.read(8), "little")
                if length > 2 * MAX_HEADER_BYTES:
                    return False
                header = json.loads(file.read(length))
            return _stored_header(header["__metadata__"]) is not None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def _metadata(self, path: Path) -> dict[str, str]:
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            return file.metadata() or {}


class Parquet(Format):
    """Columns `name`, `index`, `embedding` (a list of fixed length, of patches one behind the other) and `label`."""

    name = "parquet"
    suffix = ".parquet"

    def check_installed(self) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise GTPError("Parquet needs pyarrow, which is not installed: pip install 'gtp-vit[parquet]'")

    def serialize(self, shard: Shard) -> bytes:
        import pyarrow
        from pyarrow import parquet

        width = int(np.prod(shard.embeddings.shape[1:]))
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(shard.embeddings.reshape(-1)), width)
        columns = {"name": pyarrow.array(shard.names, pyarrow.string()), "index": shard.indices, "embedding": vectors}
        if shard.labels is not None:
            columns["label"] = shard.labels
        table = pyarrow.table(columns, metadata={METADATA: json.dumps(shard.header.to_dict())})
        file = io.BytesIO()
        parquet.write_table(table, file, use_dictionary=False, compression="zstd")
        return file.getvalue()

    def header(self, path: Path) -> StoredHeader | None:
        from pyarrow import parquet

        metadata = parquet.read_schema(path).metadata or {}
        return _stored_header({key.decode(): value.decode() for key, value in metadata.items()})

    def read(self, path: Path) -> Shard:
        from pyarrow import parquet

        table = parquet.read_table(path)
        vectors = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        stored = _stored_header({key.decode(): value.decode() for key, value in table.schema.metadata.items()})
        header = _checked_header(path, stored)
        return Shard(
            tuple(table["name"].to_pylist()),
            table["index"].to_numpy().copy(),
            vectors.reshape(len(table), *_shape(header)).copy(),  # may be changed
            table["label"].to_numpy().copy() if "label" in table.column_names else None,
            header,
        )

    def is_ours(self, path: Path) -> bool:
        try:
            return self.header(path) is not None
        except FileNotFoundError:
            raise
        except Exception:  # the library raises errors of many classes; a file that was cut off has no header
            return False


_ALL_FORMATS: tuple[Format, ...] = (Safetensors(), Parquet())
FORMATS = {form.name: form for form in _ALL_FORMATS}


def format_of(path: Path) -> Format:
    """The format that the ending of a name means."""
    return next(form for form in _ALL_FORMATS if form.suffix == path.suffix)


def read_header(path: Path) -> ShardHeader:
    """The header of a shard; raises GTPError for files that are damaged or not ours."""
    form = format_of(path)
    form.check_installed()
    try:
        stored = form.header(path)
    except Exception as error:  # both libraries raise errors of many classes
        raise GTPError(
            f"{path} is damaged: {first_line(error)}; delete it, and its images are embedded again"
        ) from error
    return _checked_header(path, stored)


def _checked_header(path: Path, stored: StoredHeader | None) -> ShardHeader:
    """The stored header, checked; raises GTPError if it is incomplete, or of another version."""
    if stored is None:
        raise GTPError(f"{path} was not written by gtp-vit embed; move it away, or choose another folder")
    if stored.get("version") != VERSION:
        raise GTPError(
            f"{path} has version {short_repr(stored.get('version'))} of these files, and this gtp-vit has {VERSION}; "
            "use --restart to discard it, or choose another folder"
        )
    header = ShardHeader.from_dict(stored)
    if header is None:
        raise changed(path)
    return header


def read_shard(path: Path) -> Shard:
    """The content of a file, proved to be what was written."""
    header = read_header(path)
    try:
        shard = format_of(path).read(path)
        whole = shard_fingerprint(shard) == header.fingerprint
    except Exception as error:  # both libraries raise errors of many classes
        raise changed(path) from error
    if not whole:
        raise changed(path)
    return shard


def changed(path: Path) -> GTPError:
    return GTPError(f"{path} has changed since it was written; delete it and start the same command again")


def shard_fingerprint(shard: Shard) -> str:
    """A hash of all that a file holds: vectors, places, names, labels, and what it says of itself."""
    digest = hashlib.sha256()
    header = shard.header.to_dict()
    del header["fingerprint"]
    labels = "no labels" if shard.labels is None else "labels"
    digest.update(json.dumps([header, shard.names, labels], sort_keys=True).encode())
    for array in (shard.embeddings, shard.indices, shard.labels):
        if array is not None:
            digest.update(f"{array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _shape(header: ShardHeader) -> list[int]:
    """The shape of one image's vectors, which Parquet stores as one list."""
    output = header.run.get("output")
    return output["shape"] if isinstance(output, dict) else [-1]


def _stored_header(metadata: dict[str, str]) -> StoredHeader | None:
    try:
        stored = json.loads(metadata.get(METADATA, "null"))
    except ValueError:
        return None
    return stored if isinstance(stored, dict) and isinstance(stored.get("run"), dict) else None
