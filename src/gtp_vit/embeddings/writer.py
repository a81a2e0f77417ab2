"""A run that writes a folder of embeddings, in one process or many.

A shard is a range of places in the data set, cut into batches at fixed places. So what is in a batch, and with it every
bit of the result, does not depend on how many processes there are, nor on where a run was interrupted. A shard is
written whole or not at all and says which images it covers: the files themselves are the record of what is finished.
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

# Processes report to each other this often. Often enough that none waits until the network gives up (after half an
# hour), seldom enough that waiting for the slowest costs nothing.
SECONDS_BETWEEN_REPORTS = 60.0
LOCK = ".gtp-vit-embed.lock"  # it is deleted at the end, so no user's file may be called like it

ImagesDone = Callable[[int, int | None, float], None]  # images done, their total if it is known, images a second


@dataclass(frozen=True)
class EmbedResult:
    """The result of a run: what it wrote."""

    folder: Path
    manifest: Manifest
    images: int  # embedded by this start of the run
    seconds: float

    @property
    def unreadable(self) -> list[str]:
        return [entry["image"] for entry in self.manifest["unreadable"]]

    @property
    def not_finite(self) -> list[str]:
        return [entry["image"] for entry in self.manifest["not_finite"]]


@dataclass(frozen=True)
class Layout:
    """The layout of a folder: its files, and the images in each."""

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
        folder: all processes may write to the same one, or each machine to its own.
        embedder: the model.
        dataset: the images.
        run: what makes the run: model, method, images, as JSON. A folder with files of another one is refused.
        layout: of the files.
        workers: processes that read images.
        restart: delete what another run has written, and begin anew.
        progress: called after every batch.

    Returns the result in the first process, None in the others.
    """
    form, batch_size, shard_size = layout.form, layout.batch_size, layout.shard_size
    assert shard_size % batch_size == 0
    assert embedder.spec is not None
    kind = dataclasses.asdict(embedder.spec)
    settings = {"output": kind, "normalise": embedder.normalise, "stored": embedder.dtype}
    files = {"format": form, "batch_size": batch_size, "shard_size": shard_size}
    run = json.loads(json.dumps({**run, **settings, **files}))
    distributed.check_same_on_all_ranks("weights, images or settings", run)
    with _lock_folder(folder, run, restart):
        finished = finished_shards(folder, run)
        work = ShardWriter(folder, embedder, run, form, shard_size, dataset.has_labels, time.perf_counter())
        todo = _batches_of_this_process(
            dataset, finished, batch_size, shard_size, workers, embedder.device.type == "cuda"
        )
        total = len(dataset) if hasattr(dataset, "__len__") else None
        done = sum(header.images for header in finished.values())
        if distributed.is_rank_zero() and done != total:
            write_manifest(folder, {"version": VERSION, "finished": False, "run": run})
        _run_all_processes(work, todo, done, total, progress)
        every = finished | {
            number: header for part in distributed.all_gather(work.written) for number, header in part.items()
        }
        images = sum(distributed.all_gather(work.images))
        if not distributed.is_rank_zero():
            return None
        manifest = make_manifest(run, every, form, dataset.classes, total)
        write_manifest(folder, manifest)
    return EmbedResult(folder, manifest, images, time.perf_counter() - work.begin)


@dataclass
class ShardWriter:
    """The shards of one process, of which it fills one at a time."""

    folder: Path
    embedder: BatchEmbedder
    run: Mapping[str, object]
    file_format: str
    shard_size: int
    labels: bool
    begin: float
    images: int = 0  # done by this process
    written: dict[int, ShardHeader] = field(default_factory=dict)
    number: int = -1  # of the shard that is being filled
    parts: list[EmbeddingBatch] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        number = _first_index(batch) // self.shard_size
        if number != self.number:
            self.close_shard()
            self.number = number
        self.parts.append(self.embedder(batch))
        self.images += len(batch.indices) + len(batch.unreadable)

    def close_shard(self) -> None:
        """Write the shard that has been filled."""
        if not self.parts:
            return
        parts, self.parts = self.parts, []
        embeddings = torch.cat([part.embeddings for part in parts]).numpy()
        unreadable = {place: _printable(text) for part in parts for place, text in part.unreadable.items()}
        not_finite = {place: _printable(text) for part in parts for place, text in part.not_finite.items()}
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


def _run_all_processes(
    work: ShardWriter, todo: Iterator[Batch], done: int, total: int | None, progress: ImagesDone | None
) -> None:
    """Do all batches; processes tell each other now and then how far they are, and wait until all have finished."""
    others = 0
    while True:
        report = time.perf_counter() + SECONDS_BETWEEN_REPORTS
        busy = False
        for batch in todo:
            work.add(batch)
            if progress is not None:
                every = others + work.images
                progress(done + every, total, every / (time.perf_counter() - work.begin))
            if distributed.rank_and_world_size()[1] > 1 and time.perf_counter() > report:
                busy = True
                break
        else:
            work.close_shard()
        reports = distributed.all_gather((work.images, busy))
        others = sum(images for images, _ in reports) - work.images
        if not any(still for _, still in reports):
            return


def _batches_of_this_process(
    dataset: Images, finished: Container[int], batch_size: int, shard_size: int, workers: int, pin: bool
) -> Iterator[Batch]:
    """The batches of this process: every n-th shard of those that are not finished."""
    rank, processes = distributed.rank_and_world_size()
    if isinstance(dataset, StreamingImageDataset):
        every = batches(dataset, batch_size=batch_size, workers=workers, rank_and_world_size=(rank, processes))
        return (batch for batch in every if _first_index(batch) // shard_size not in finished)
    count = len(dataset)
    own = [number for number in range(-(-count // shard_size)) if number not in finished][rank::processes]

    def plan() -> Iterator[range]:
        for number in own:
            end = min((number + 1) * shard_size, count)
            for begin in range(number * shard_size, end, batch_size):
                yield range(begin, min(begin + batch_size, end))

    return planned_batches(dataset, plan(), workers=workers, pin=pin) if own else iter(())


def _first_index(batch: Batch) -> int:
    return min([*batch.indices[:1].tolist(), *batch.unreadable])


@contextlib.contextmanager
def _lock_folder(folder: Path, run: Mapping[str, object], restart: bool) -> Iterator[None]:
    """The folder for this run alone: checked, or emptied of what is ours."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder_kept_if_used(folder))
        if distributed.is_rank_zero():
            stack.enter_context(_lock(folder))
        if distributed.is_rank_zero():
            prepare(folder, run, restart)
        distributed.all_gather(None)  # the others begin when this is done; what they find is on a disk of their own
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
    """A name as valid text: bytes that are none become escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
