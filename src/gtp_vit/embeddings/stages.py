"""Where the time of embedding goes: reading, decoding, resizing, the model, and writing, one after another."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gtp_vit.data import image_file
from gtp_vit.data.dataset import ImageDataset
from gtp_vit.data.items import NO_LABEL, Item, collate
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.writer import Layout, ShardWriter
from gtp_vit.errors import InputError, first_line

STAGES = ("read", "decode", "resize", "model", "write")
MOST_IMAGES = 512  # enough for shares; a whole data set would take as long as embedding it


@dataclass
class StageTimes:
    """Seconds that each stage took for some images, in one process and one thread of Python."""

    images: int = 0
    unreadable: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - begin


def time_stages(
    embedder: BatchEmbedder, dataset: ImageDataset, run: Mapping[str, object], layout: Layout
) -> StageTimes:
    """Embed the first images, at most 512, with a clock between the stages; what is written is deleted again."""
    times, count = StageTimes(), min(len(dataset), MOST_IMAGES)
    batch = collate([dataset[index] for index in range(min(count, layout.batch_size))])
    embedder(batch)  # the first pass takes longer
    with tempfile.TemporaryDirectory(prefix="gtp-vit-") as folder:
        writer = ShardWriter(Path(folder), embedder, run, layout.form, count, dataset.has_labels, time.perf_counter())
        writer.number = 0
        for begin in range(0, count, layout.batch_size):
            indices = range(begin, min(begin + layout.batch_size, count))
            batch = collate([_item(dataset, index, times) for index in indices])
            times.images, times.unreadable = times.images + len(indices), times.unreadable + len(batch.unreadable)
            with times.timed("model"):
                writer.parts.append(embedder(batch))
        with times.timed("write"):
            writer.close_shard()
    if times.images == times.unreadable:
        raise InputError("none of the images could be read, so there is nothing to time")
    return times


def _item(dataset: ImageDataset, index: int, times: StageTimes) -> Item:
    """An image as the data set gives it."""
    name = dataset.reader.name(index)
    try:
        with times.timed("read"):
            name, file, _ = dataset.reader.open(index)
            with contextlib.closing(file):
                stored = io.BytesIO(file.read()) if hasattr(file, "read") else file
        with times.timed("decode"):
            picture = image_file.decode(stored, ignore_exif=dataset.ignore_exif)
        with times.timed("resize"):
            return Item(index, dataset.transform(picture), NO_LABEL, name, "")
    except Exception as error:  # decoders raise many exception types
        return Item(index, torch.zeros(dataset.shape), NO_LABEL, name, first_line(error))
