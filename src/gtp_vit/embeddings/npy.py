"""A folder of embeddings as numpy files with metadata in Parquet beside them, as autofaiss and clip-retrieval read.

The files are made from those of a run, each proved to be what was written. Their names say the number of the file they
came from, so writing them again, after a stop or in a store, gives the same names and the same bytes.
"""

from __future__ import annotations

import io
import posixpath
from pathlib import Path

import numpy as np

from gtp_vit.data.stores import url_of, write_in_store
from gtp_vit.embeddings.manifest import read_embeddings
from gtp_vit.embeddings.shards import FORMATS, Shard
from gtp_vit.errors import GTPError
from gtp_vit.runs.files import write_atomically


def write_npy(folder: Path, output: Path) -> list[str]:
    """Write img_emb/img_emb_0000.npy, metadata/metadata_0000.parquet and so on; returns the names.

    Args:
        folder: a finished one, of `gtp-vit embed`.
        output: a folder, or a URL that fsspec knows.
    """
    FORMATS["parquet"].check_installed()
    url, names = url_of(output), []
    for shard in read_embeddings(folder):
        if shard.embeddings.ndim != 2:
            raise GTPError(f"{folder} has features of patches; numpy files for an index have one vector for an image")
        if not len(shard.embeddings):  # none of its images could be read
            continue
        number = shard.header.shard
        for name, content in (
            (f"img_emb/img_emb_{number:04}.npy", _vectors(shard)),
            (f"metadata/metadata_{number:04}.parquet", _metadata(shard)),
        ):
            if url is None:
                path = output / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content)
            else:
                write_in_store(posixpath.join(url, name), content)
            names.append(name)
    return names


def _vectors(shard: Shard) -> bytes:
    file = io.BytesIO()
    np.save(file, shard.embeddings)
    return file.getvalue()


def _metadata(shard: Shard) -> bytes:
    """Row by row what the vectors are of; `image_path` is clip-retrieval's word for the name."""
    import pyarrow
    from pyarrow import parquet

    columns = {"image_path": pyarrow.array(shard.names, pyarrow.string()), "index": shard.indices}
    if shard.labels is not None:
        columns["label"] = shard.labels
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()
