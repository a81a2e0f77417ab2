"""gtp-vit benchmark: is the model faster with the method, here and now?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.macs import layer_rows
from gtp_vit.cli.output import command
from gtp_vit.cli.source import DataFlags, make_dataset, make_model
from gtp_vit.core.reducer import Method
from gtp_vit.errors import GTPError, check_range
from gtp_vit.inputs.data import Batch, batches
from gtp_vit.measure.benchmark import Timing, against, interleave
from gtp_vit.measure.macs import macs
from gtp_vit.patch import host_of, patch
from gtp_vit.runs.files import check_writable
from gtp_vit.show.page import Section, paragraph, table, write_report


@dataclass(frozen=True)
class Benchmark(DataFlags):
    """Time a model with and without token reduction, interleaved in one process.

    Weights are random unless --pretrained or --checkpoint: they do not change the time. With --data-dir or --dataset,
    reading a batch and then running the model is timed too, besides the model alone; in one process, one after the
    other, so that it is the time from the files to the result.

    examples:
      gtp-vit benchmark deit_small_patch16_224 --batch-size 1 8 32
      gtp-vit benchmark deit_small_patch16_224 --method tome --r 14 --compile
    """

    batch_size: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-b"])] = (8,)  # type: ignore[assignment]
    """Images in a batch; several numbers are timed one after the other."""
    method: str = "gtp_plus"
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does."""
    rounds: int = 20
    """How often each model is timed."""
    compile: bool = False
    """Compile both models with torch.compile first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and images."""
    report: Path | None = None
    """Write an HTML page here."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Timed:
    """The times of one batch size."""

    batch_size: int
    with_loading: bool
    timings: list[Timing]


COLUMNS = ["batch", "what", "model", "ms", "middle half", "img/s", "speed-up", "middle half"]


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Benchmark, words)
    for size in flags.batch_size:
        check_range("--batch-size", size, 1, 65536, whole=True)
    check_range("--rounds", flags.rounds, 3, 1_000_000, whole=True)
    check_writable(flags.report)
    dtype = getattr(torch, flags.dtype)
    model = make_model(flags).to(dtype)
    method = chosen.for_model(model)
    fast: Any = patch(model, method)
    inputs, device = host_of(model).inputs, next(model.parameters()).device
    images = torch.randn(max(flags.batch_size), inputs.channels, *inputs.size, dtype=dtype, device=device)
    layers = layer_rows(model, fast, images=images[:8])
    timed = measure(flags, method, model, fast, images)
    rows = timing_rows(timed)
    title = f"{torch.get_num_threads()} threads, {flags.rounds} interleaved rounds, {flags.dtype}"
    with torch.inference_mode():  # as it was timed: with gradients on, other kernels would run
        words_of_verdict = [verdict(entry, model, fast, images) for entry in timed]
        result = _result(flags, method, model, fast, images, timed) | {"verdicts": words_of_verdict}
    if flags.json:
        render.as_json(result)
    else:
        render.table(f"{flags.model}, {method.name}: cost of each layer", *layers)
        render.table(title, COLUMNS, rows)
        render.say("\n".join(words_of_verdict))
    if flags.report is not None:
        sections = [
            Section("Time", table(COLUMNS, rows) + "".join(paragraph(text) for text in words_of_verdict)),
            Section("Cost of each layer", table(*layers)),
        ]
        write_report(flags.report, f"{flags.model} with {method}", title, sections, command("benchmark", words))


def measure(flags: Benchmark, method: Method, model: Any, fast: Any, images: torch.Tensor) -> list[Timed]:
    """Time both models at every batch size, and with loading of images where there are some."""
    models = {"unreduced": model, method.name: fast}
    if flags.compile:
        models = {name: torch.compile(one) for name, one in models.items()}
    files = None
    if flags.data_dir is not None or flags.dataset:
        files = make_dataset(dataclasses.replace(flags, batch_size=1), model, labels=False)  # type: ignore[arg-type]
        for size in flags.batch_size:
            Cycle(files, size, images).next_batch()  # can so many be read? Not to find out after the work
    found = []
    with torch.inference_mode(), render.progress("timing") as progress:
        for size in flags.batch_size:
            calls = {name: functools.partial(one, images[:size]) for name, one in models.items()}
            found.append(_timed(flags, size, False, calls, progress))
            if files is not None:
                calls = {
                    name: functools.partial(_load_and_run, one, Cycle(files, size, images))
                    for name, one in models.items()
                }
                found.append(_timed(flags, size, True, calls, progress))
    return found


def _load_and_run(model: Any, cycle: Cycle) -> object:
    return model(cycle.next_batch())


def _timed(flags: Benchmark, size: int, loading: bool, calls: Any, progress: Any) -> Timed:
    return Timed(size, loading, against(interleave(calls, rounds=flags.rounds, progress=progress), "unreduced"))


class Cycle:
    """Whole batches of a data set, round and round; every model has one, so all read the same images."""

    def __init__(self, dataset: Any, size: int, like: torch.Tensor) -> None:
        self.dataset, self.size, self.like = dataset, size, like
        self.rest: Iterator[Batch] = iter(())

    def next_batch(self) -> torch.Tensor:
        batch = next(self.rest, None)
        if batch is None or len(batch.images) < self.size:
            self.rest = batches(self.dataset, batch_size=self.size, workers=0)
            batch = next(self.rest, None)
        if batch is None or len(batch.images) < self.size:
            found = 0 if batch is None else len(batch.images)
            raise GTPError(
                f"a batch of {self.size} images was to be read, but only {found} could be; give a smaller -b"
            )
        return batch.images.to(self.like)


def timing_rows(timed: Sequence[Timed]) -> list[list[str]]:
    return [
        [
            str(entry.batch_size),
            "with loading" if entry.with_loading else "model",
            timing.name,
            f"{timing.milliseconds:.1f}",
            f"{timing.quartiles[0]:.1f} .. {timing.quartiles[1]:.1f}",
            f"{1000 * entry.batch_size / timing.milliseconds:.1f}",
            f"{timing.speedup:.2f}",
            f"{timing.speedup_quartiles[0]:.2f} .. {timing.speedup_quartiles[1]:.2f}",
        ]
        for entry in timed
        for timing in entry.timings
    ]


def verdict(entry: Timed, model: Any, fast: Any, images: torch.Tensor) -> str:
    """What the figures mean, in one sentence, and why there is no gain where there is none."""
    timing = entry.timings[1]
    where = f"batch {entry.batch_size}{', with loading' if entry.with_loading else ''}"
    if timing.faster:
        return f"{where}: {timing.name} is {timing.speedup:.2f} times as fast as the unreduced model here."
    reason = why_no_gain(entry, model, fast, images)
    if timing.faster is None:
        return f"{where}: no clear difference ({timing.speedup:.2f}), because {reason}."
    return f"{where}: no gain here, {timing.name} is slower ({timing.speedup:.2f}), because {reason}."


def why_no_gain(entry: Timed, model: Any, fast: Any, images: torch.Tensor) -> str:
    """The most likely reason."""
    saved = 1 - macs(fast, images=images[:8]).total / macs(model).total
    if saved < 0.1:
        return f"only {saved:.0%} of the MACs are saved; remove more tokens"
    if entry.with_loading:
        return "reading and preparing the images takes most of the time"
    if not fast.kernels.startswith("native"):
        return f"the native kernels did not run ({fast.kernels})"
    if fast.reduction.vit.image_tokens < 128:
        return f"with {fast.reduction.vit.image_tokens} patches the work around the products takes most of the time"
    return "the noise of this machine is larger than the gain; use more rounds, or a quiet machine"


def _result(
    flags: Benchmark, method: Method, model: Any, fast: Any, images: torch.Tensor, timed: list[Timed]
) -> dict[str, Any]:
    return {
        "flags": flags,
        "settings": method.to_dict(),
        "threads": torch.get_num_threads(),
        "kernels": fast.kernels,
        "macs": {"unreduced": int(macs(model)), method.name: int(macs(fast, images=images[:8]))},
        "timed": timed,
    }
