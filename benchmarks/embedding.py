"""What does `gtp-vit embed` cost beyond the model, and does its memory stay flat?

    python benchmarks/embedding.py --json docs/results/embedding.json
    python benchmarks/embedding.py --no-speed

Speed: writing a folder of embeddings against the bare loop over the same batches, interleaved; once with images in
memory (`model(batch)` and nothing else), once with images in files, read by as many workers in both (a DataLoader,
whose reading overlaps with the model). All that the command does once it runs is in it: names, checks, files. Beside
the ratio of times, which needs a quiet machine, that of the processors' work, of readers too, which hardly does.
Memory: resident memory of the process and of its readers while 20,000 generated pictures are embedded; of the readers
also without what they share with others.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from torch.utils.data import DataLoader

from gtp_vit import create_model, patch
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.writer import Layout, embed_to_folder
from gtp_vit.profiling.benchmark import interleave, speedups_over
from gtp_vit.profiling.environment import environment


@dataclass(frozen=True)
class Options:
    """Measure the overhead and the memory of embedding."""

    model: str = "vit_tiny_patch16_224"
    """Name of a model for the speed; random weights will do."""
    images: int = 256
    """Images that are embedded in each round."""
    batch_size: int = 32
    """Images at a time."""
    workers: int = 2
    """Processes that read images."""
    rounds: int = 7
    """How often each is timed."""
    speed: bool = True
    """Measure the speed."""
    memory: int = 20_000
    """Pictures that are embedded while memory is watched; 0 does not measure it."""
    json: Path | None = None
    """Write the figures here as well."""


def pictures(folder: Path, count: int, side: int) -> None:
    """Photographs in name only: smooth noise, as JPEG."""
    generator, kinds = np.random.default_rng(0), []
    for _ in range(32):
        file = io.BytesIO()
        small = Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        kinds.append(file.getvalue())
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:06}.jpg").write_bytes(kinds[number % len(kinds)])


def speed(options: Options, folder: Path) -> list[dict[str, Any]]:
    """Embedding to files over the bare loop, with images in memory and in files."""
    pictures(folder / "speed", options.images, 256)
    fast: Any = patch(create_model(options.model, num_classes=0))
    files = open_images(fast, DataSettings(folder / "speed", split="", labels=False))
    prepared = torch.stack([files[place].image for place in range(len(files))])
    memory = InMemoryDataset(prepared, torch.full((len(prepared),), -1))

    def written(dataset: Any) -> Callable[[], None]:
        def call() -> None:
            shutil.rmtree(folder / "out", ignore_errors=True)
            layout = Layout(batch_size=options.batch_size, shard_size=8 * options.batch_size)
            embed_to_folder(folder / "out", BatchEmbedder(fast), dataset, {}, layout, workers=options.workers)

        return call

    def bare(batches: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            with torch.inference_mode():
                for batch in batches():
                    fast(batch)

        return call

    def loader() -> Iterator[torch.Tensor]:
        return iter(DataLoader(Only(files), options.batch_size, num_workers=options.workers))

    candidates = {
        "memory, embed": written(memory),
        "memory, bare": bare(lambda: prepared.split(options.batch_size)),
        "files, embed": written(files),
        "files, bare": bare(loader),
    }
    work: dict[str, list[float]] = {name: [] for name in candidates}
    calls = {name: counted(call, work[name]) for name, call in candidates.items()}
    samples = interleave(calls, rounds=options.rounds, warmup=1)
    rows = []
    for where in ("memory", "files"):
        timing = next(each for each in speedups_over(samples, f"{where}, bare") if each.name == f"{where}, embed")
        rows.append(
            {
                "images in": where,
                "speed over the bare loop": round(timing.speedup, 3),
                "quartiles": [round(value, 3) for value in timing.speedup_quartiles],
                "of the fastest rounds": round(timing.best_speedup, 3),
                "processor time over the bare loop": round(
                    statistics.median(work[f"{where}, embed"]) / statistics.median(work[f"{where}, bare"]), 3
                ),
                "images a second": round(1000 * options.images / timing.milliseconds, 1),
            }
        )
    return rows


def counted(call: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """A call that also notes the processor time that it and the processes it started have used."""

    def again() -> None:
        before = os.times()
        call()
        seconds.append(sum(os.times()[:4]) - sum(before[:4]))

    return again


class Only(torch.utils.data.Dataset[torch.Tensor]):
    """The images of a data set, without anything else: what a plain loop would read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.dataset[place].image


def memory(options: Options, folder: Path) -> dict[str, Any]:
    """Resident memory at 2,000 images and the most after that, of this process and of its readers."""
    pictures(folder / "memory", options.memory, 48)
    model = patch(create_model("test_vit", img_size=64, num_classes=0), "tome")
    dataset = open_images(model, DataSettings(folder / "memory", split="", img_size=64, labels=False))
    seen: list[tuple[int, float, float, float]] = []

    def watch(done: int, total: int | None, rate: float) -> None:
        if done >= 2000:
            readers = children()
            seen.append((done, resident(os.getpid()), sum(map(resident, readers)), sum(map(private, readers))))

    begin = time.perf_counter()
    layout = Layout(shard_size=1024)
    embed_to_folder(folder / "flat", BatchEmbedder(model), dataset, {}, layout, workers=options.workers, progress=watch)
    _, own, readers, alone = seen[0]
    return {
        "images": seen[-1][0],
        "MB at 2,000 images": round(own, 1),
        "growth in MB": round(max(each[1] for each in seen) - own, 1),
        "MB of the readers": round(readers, 1),
        "growth of the readers in MB": round(max(each[2] for each in seen) - readers, 1),
        "MB of the readers alone": round(alone, 1),
        "growth of the readers alone in MB": round(max(each[3] for each in seen) - alone, 1),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def resident(process: int) -> float:
    """MB of a process, with what it shares with others."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has just ended
        return 0.0
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS:")).split()[1]) / 1024


def private(process: int) -> float:
    """MB of a process that it shares with no other."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")) / 1024


def children() -> list[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def main(options: Options) -> None:
    found: dict[str, Any] = {"date": str(date.today()), "environment": dataclasses.asdict(environment())}
    found["options"] = {key: value for key, value in dataclasses.asdict(options).items() if key != "json"}
    with tempfile.TemporaryDirectory(prefix="gtp-vit-") as folder:
        if options.speed:
            found["speed"] = speed(options, Path(folder))
            for row in found["speed"]:
                print(json.dumps(row), flush=True)
        if options.memory:
            found["memory"] = memory(options, Path(folder))
            print(json.dumps(found["memory"]))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
