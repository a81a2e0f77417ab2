"""A run that writes a folder of embeddings, in one process or many.

A shard covers a range of positions in the data set, and batches always begin at the same positions. So the images of a
batch, and with them every bit of the result, do not depend on the number of processes or on where a run was
interrupted. A shard is written whole or not at all, and its header says which images it covers: the files themselves
record what is finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gtp_vit.data.dataset import Images, StreamingImageDataset
from gtp_vit.data.items import Batch
from gtp_vit.data.loader import batches, planned_batches
from gtp_vit.embeddings.batch_embedder import BatchEmbedder, EmbeddingBatch
from gtp_vit.embeddings.header import VERSION, ShardHeader
from gtp_vit.embeddings.manifest import (
    Manifest,
    delete_unused_manifest,
    finished_shards,
    make_manifest,
    prepare,
    shard_file_name,
    write_manifest,
)
from gtp_vit.embeddings.shards import FORMATS, Integers, Shard, shard_fingerprint
from gtp_vit.runs import distributed
from gtp_vit.runs.files import Lock, folder_kept_if_used, write_atomically

# Interval of the reports between processes: short enough that no process waits so long that the network gives up (half
# an hour), and long enough that waiting for the slowest costs next to nothing.
SECONDS_BETWEEN_REPORTS = 60.0
LOCK = ".gtp-vit-embed.lock"  # deleted at the end, so the name must not be one of a user's file

ImagesDone = Callable[[int, int | None, float], None]  # images done, total if it is known, images per second


@dataclass(frozen=True)
class EmbedResult:
    """The folder that a run has filled, its manifest, and the work of this start of the run."""

    folder: Path
    manifest: Manifest
    images: int  # number of images that this start of the run has done, unreadable ones included
    seconds: float

    @property
    def unreadable(self) -> list[str]:
        return [entry["image"] for entry in self.manifest["unreadable"]]

    @property
    def not_finite(self) -> list[str]:
        return [entry["image"] for entry in self.manifest["not_finite"]]


@dataclass(frozen=True)
class Layout:
    """File format of a folder, and the number of images in each batch and file."""

    form: str = "safetensors"  # or parquet
    batch_size: int = 64  # images at a time
    shard_size: int = 4096  # images in a file, a multiple of the batch size


def embed_to_folder(
    folder: Path,
    embedder: BatchEmbedder,
    dataset: Images,
    run: Mapping[str, object],
    layout: Layout = Layout(),  # noqa: B008  it is frozen
    *,
    workers: int = 2,
    restart: bool = False,
    progress: ImagesDone | None = None,
) -> EmbedResult | None:
    """Write the embeddings of all images to a folder; in several processes each writes its own shards.

    Args:
        folder: one folder for all processes, or one on each machine.
        embedder: computes the embeddings of a batch.
        dataset: the images.
        run: identity of the run: model, method and images, as JSON. A folder with files of another run is refused.
        layout: file format, batch size and shard size.
        workers: processes that read images.
        restart: delete the files of an earlier run first.
        progress: called after every batch.

    Returns the result in the first process, None in the others.
    """
    form, batch_size, shard_size = layout.form, layout.batch_size, layout.shard_size
    assert shard_size % batch_size == 0
    assert embedder.spec is not None
    output = dataclasses.asdict(embedder.spec)
    settings = {"output": output, "normalise": embedder.normalise, "stored": embedder.dtype}
    files = {"format": form, "batch_size": batch_size, "shard_size": shard_size}
    run = json.loads(json.dumps({**run, **settings, **files}))
    distributed.check_same_on_all_ranks("weights, images or settings", run)
    with _lock_folder(folder, run, restart):
        earlier_headers = finished_shards(folder, run)
        writer = ShardWriter(folder, embedder, run, form, shard_size, dataset.has_labels, time.perf_counter())
        pending = _batches_of_this_process(
            dataset, earlier_headers, batch_size, shard_size, workers, embedder.device.type == "cuda"
        )
        total = len(dataset) if hasattr(dataset, "__len__") else None
        num_done = sum(header.images for header in earlier_headers.values())
        if distributed.is_rank_zero() and num_done != total:
            write_manifest(folder, {"version": VERSION, "finished": False, "run": run})
        _write_all_shards(writer, pending, num_done, total, progress)
        headers = earlier_headers | {
            number: header for shards in distributed.all_gather(writer.written) for number, header in shards.items()
        }
        images = sum(distributed.all_gather(writer.images))
        if not distributed.is_rank_zero():
            return None
        manifest = make_manifest(run, headers, form, dataset.classes, total)
        write_manifest(folder, manifest)
    return EmbedResult(folder, manifest, images, time.perf_counter() - writer.begin)


@dataclass
class ShardWriter:
    """Embeds the batches of one process and writes its shards, one after the other."""

    folder: Path
    embedder: BatchEmbedder
    run: Mapping[str, object]
    file_format: str
    shard_size: int
    labels: bool
    begin: float
    images: int = 0  # number of images that this process has done
    written: dict[int, ShardHeader] = field(default_factory=dict)
    number: int = -1  # number of the current shard
    parts: list[EmbeddingBatch] = field(default_factory=list)  # of the current shard

    def add(self, batch: Batch) -> None:
        """Embed a batch; if it begins another shard, write the current one first."""
        number = _first_index(batch) // self.shard_size
        if number != self.number:
            self.close_shard()
            self.number = number
        self.parts.append(self.embedder(batch))
        self.images += len(batch.indices) + len(batch.unreadable)

    def close_shard(self) -> None:
        """Write the current shard, if it has any batches."""
        if not self.parts:
            return
        parts, self.parts = self.parts, []
        embeddings = torch.cat([part.embeddings for part in parts]).numpy()
        unreadable = {position: _printable(text) for part in parts for position, text in part.unreadable.items()}
        not_finite = {position: _printable(text) for part in parts for position, text in part.not_finite.items()}
        header = ShardHeader(
            shard=self.number,
            first=self.number * self.shard_size,
            images=len(embeddings) + len(unreadable) + len(not_finite),
            embedded=len(embeddings),
            unreadable=dict(sorted(unreadable.items())),
            not_finite=dict(sorted(not_finite.items())),
            run=self.run,
        )
        shard = Shard(
            tuple(_printable(name) for part in parts for name in part.names),
            _concatenate([part.indices for part in parts]),
            embeddings,
            _concatenate([part.labels for part in parts]) if self.labels else None,
            header,
        )
        header = dataclasses.replace(header, fingerprint=shard_fingerprint(shard))
        shard = dataclasses.replace(shard, header=header)
        write_atomically(
            self.folder / shard_file_name(self.number, self.file_format), FORMATS[self.file_format].serialize(shard)
        )
        self.written[self.number] = header


def _write_all_shards(
    writer: ShardWriter, pending: Iterator[Batch], num_done: int, total: int | None, progress: ImagesDone | None
) -> None:
    """Write all shards; processes report their progress to each other on the way, and wait until all are finished."""
    others = 0  # images that the other processes have done
    while True:
        next_report = time.perf_counter() + SECONDS_BETWEEN_REPORTS
        unfinished = False
        for batch in pending:
            writer.add(batch)
            if progress is not None:
                new = others + writer.images
                progress(num_done + new, total, new / (time.perf_counter() - writer.begin))
            if distributed.rank_and_world_size()[1] > 1 and time.perf_counter() > next_report:
                unfinished = True
                break
        else:
            writer.close_shard()
        reports = distributed.all_gather((writer.images, unfinished))
        others = sum(images for images, _ in reports) - writer.images
        if not any(is_unfinished for _, is_unfinished in reports):
            return


def _batches_of_this_process(
    dataset: Images, finished_shard_numbers: Container[int], batch_size: int, shard_size: int, workers: int, pin: bool
) -> Iterator[Batch]:
    """The batches of this process; of n processes, each takes every n-th of the shards that are not finished."""
    rank, processes = distributed.rank_and_world_size()
    if isinstance(dataset, StreamingImageDataset):
        stream = batches(dataset, batch_size=batch_size, workers=workers, rank_and_world_size=(rank, processes))
        return (batch for batch in stream if _first_index(batch) // shard_size not in finished_shard_numbers)
    count = len(dataset)
    shards = [number for number in range(-(-count // shard_size)) if number not in finished_shard_numbers][
        rank::processes
    ]

    def plan() -> Iterator[range]:
        for number in shards:
            end = min((number + 1) * shard_size, count)
            for begin in range(number * shard_size, end, batch_size):
                yield range(begin, min(begin + batch_size, end))

    return planned_batches(dataset, plan(), workers=workers, pin=pin) if shards else iter(())


def _first_index(batch: Batch) -> int:
    """The position of the first image of a batch in the data set, readable or not."""
    return min([*batch.indices[:1].tolist(), *batch.unreadable])


@contextlib.contextmanager
def _lock_folder(folder: Path, run: Mapping[str, object], restart: bool) -> Iterator[None]:
    """Keep other runs out of the folder, and refuse files of another run, or delete them with `restart`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_kept_if_used(folder))
        if distributed.is_rank_zero():
            stack.enter_context(_lock(folder))
        if distributed.is_rank_zero():
            prepare(folder, run, restart)
        # The others wait for the first one. Files of another run that are left after it are on a disk of their own.
        distributed.all_gather(None)
        if not distributed.is_rank_zero():
            prepare(folder, run, restart)
        distributed.all_gather(None)
        yield


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with Lock(folder / LOCK):
        try:
            yield
        except Exception:
            delete_unused_manifest(folder)
            raise


def _concatenate(parts: list[Tensor]) -> Integers:
    return torch.cat(parts).numpy()


def _printable(name: str) -> str:
    """A file name as valid text: bytes that are not UTF-8 become escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
