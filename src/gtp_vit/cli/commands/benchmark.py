"""gtp-vit benchmark: is the model faster with the method, here and now?"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import EngineFlags, check_engine, exported_file_of, flags_with_sizes
from gtp_vit.cli.flags import MethodChoice, MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import DataFlags, make_dataset, make_model, read_images
from gtp_vit.cli.output import OutputFlags, check_readable, print_result, write_page
from gtp_vit.cli.parser import Choices, Short
from gtp_vit.core.ranges import Range
from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Batch, Item
from gtp_vit.data.loader import batches
from gtp_vit.engines import TORCH, engine_names, is_exported
from gtp_vit.engines.comparison import EngineComparison
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.runtime import compile_for_engine, compiled_file
from gtp_vit.errors import ChecksFailedError, GTPError, IncompleteError
from gtp_vit.jsonable import jsonable
from gtp_vit.methods.identity import Identity
from gtp_vit.models import bundled
from gtp_vit.patching import host_of, patch, tower_of
from gtp_vit.profiling.benchmark import PAUSE_SECONDS, interleave, speedups_over
from gtp_vit.profiling.macs import layer_costs
from gtp_vit.profiling.operator_equality import worst_of
from gtp_vit.profiling.slicing import slicing_like
from gtp_vit.profiling.verify import BATCH_SIZES, kept_gain, verify
from gtp_vit.report.engines import ENGINE_NOTE, engine_table
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.timing import BatchTiming, cost_table, timing_table, verdict
from gtp_vit.report.verification import markdown
from gtp_vit.runs.files import check_writable, write_atomically

ALL = "all"
EAGER = "eager torch, unreduced"
# Flags that an exported file does not take: it was exported with a value for each.
SET_BY_EXPORT = ("--engine", "--precision", "--compile", "--dtype", "--checkpoint", "--pretrained")


def all_or_engines() -> tuple[str, ...]:
    """The values of --engines."""
    return (ALL, *engine_names())


@dataclass(frozen=True)
class Benchmark(OutputFlags, MethodFlags, EngineFlags, DataFlags):
    """Time a model with and without token reduction, interleaved in one process; in torch or in an engine.

    Slicing, timed beside it, drops as many tokens without looking at them: what the method would reach if its own work
    cost nothing.

    Weights are random unless --pretrained or --checkpoint: they do not change the time. With --data-dir or --dataset,
    reading a batch and then running the model is timed too, besides the model alone; in one process, one after the
    other, so that it is the time from the files to the result.

    examples:
      gtp-vit benchmark deit_small_patch16_224 --batch-size 1 8 32
      gtp-vit benchmark deit_small_patch16_224 --method tome --r 14 --compile
      gtp-vit benchmark deit_small_patch16_224 --method deploy --engine openvino --precision int8 --batch-size 1 8
      gtp-vit benchmark deit_small_patch16_224 --device cuda --verify --report gpu.md
      gtp-vit benchmark out/vit_tiny_patch16_224-gtp_plus-int8.xml
      gtp-vit benchmark vit_tiny_patch16_224 --pretrained --method deploy --engines all --data-dir images -b 1
    """

    batch_size: Annotated[tuple[int, ...], Short("-b"), Range(1, 65536)] = (8,)  # type: ignore[assignment]
    """Images in a batch; several numbers are timed one after the other."""
    rounds: Annotated[int, Range(3, 10**6)] = 20
    """Timing rounds per model."""
    compile: bool = False
    """Compile both models with torch.compile first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and images in torch; with --verify on a GPU float16, unless given."""
    engines: Annotated[tuple[str, ...], Choices(all_or_engines)] = ()
    """One table of these engines, or of all: file size, difference, damage, time, memory; each file is made for it."""
    images: Annotated[int, Range(8, 10**5)] = 64
    """Images for --engines: outputs are compared on them, and 8 bits get their ranges from them."""
    verify: bool = False
    """Check that operators, CUDA graphs and torch.compile are right on this device, then time eager, compiled and CUDA
    graph at batch 1, 8, 64 and 256 (or -b). Exit code 1 if a check fails."""
    report: Path | None = None
    """Write what --verify found here as Markdown, and as JSON beside it."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Benchmark, arguments)
    _check_verify(flags)
    check_writable(flags.html)
    if flags.engines:
        _compare_engines(flags, chosen, arguments)
        return
    file = None
    if is_exported(flags.model):
        file = exported_file_of(flags, chosen, arguments, *SET_BY_EXPORT)
        flags = flags_with_sizes(flags, file)
        flags = dataclasses.replace(flags, engine=file.engine.name, precision=file.metadata.precision)
    _check(flags)
    if flags.verify:
        if file is not None:
            raise GTPError(f"--verify is for torch; give a model, not the exported file {file.name}")
        _verify(flags, chosen, arguments)
        return
    dtype = getattr(torch, flags.dtype)
    model = make_model(flags).to(dtype)
    method = chosen.for_model(model) if file is None else file.metadata.method or Identity()
    fast: Any = patch(model, method)
    inputs, device = host_of(model).inputs, next(model.parameters()).device
    images = torch.randn(max(flags.batch_size), inputs.channels, *inputs.size, dtype=dtype, device=device)
    costs = layer_costs(model, fast, images=images[:8])
    layers = cost_table(costs)
    timed = measure(flags, method, model, fast, images, file)
    times = timing_table(timed)
    precise = flags.dtype if flags.engine == TORCH else flags.precision
    lead = f"{flags.engine}, {torch.get_num_threads()} threads, {flags.rounds} interleaved rounds, {precise}"
    with torch.inference_mode():  # as it was timed: with gradients on, other kernels would run
        verdicts = [verdict(entry, costs, fast.kernels, device.type) for entry in timed]
        cost = {"unreduced": costs.unreduced.total, method.name: costs.reduced.total}
        result = {"flags": flags, "settings": method.to_dict(), "threads": torch.get_num_threads()}
        result |= {"kernels": fast.kernels, "macs": cost, "timed": timed, "verdicts": verdicts}
    title = f"{flags.model}, {method.name}: cost of each layer"
    print_result(flags, result, (title, *layers), (lead, *times), text="\n".join(verdicts))
    sections = [
        Section("Time", table(*times) + "".join(map(paragraph, verdicts))),
        Section("Cost of each layer", table(*layers)),
    ]
    write_page(flags, arguments, flags.html, f"{flags.model} with {method}", lead, sections)


def _check_verify(flags: Benchmark) -> None:
    """Refuse flags that --verify does not know, or that only it knows."""
    if flags.report is not None:
        if not flags.verify:
            raise GTPError("--report is for --verify; give that, too")
        if flags.report.suffix != ".md":
            raise GTPError(f"--report is {flags.report}; its name must end in .md")
        check_writable(flags.report)
    if not flags.verify:
        return
    if flags.engine != TORCH:
        raise GTPError(f"--verify is for torch; leave out --engine {flags.engine}")
    if flags.engines:
        raise GTPError("--verify is for torch; leave out --engines")
    if flags.compile:
        raise GTPError("--verify times eager and compiled models; leave out --compile")
    if flags.html is not None:
        raise GTPError("--verify has a report in Markdown; give --report FILE.md, not --html")
    if flags.data_dir is not None or flags.dataset:
        raise GTPError("--verify needs no images; leave out --data-dir and --dataset")


def _verify(flags: Benchmark, chosen: MethodChoice, arguments: Sequence[str]) -> None:
    """Check and time the model on this device, and report."""
    model = make_model(flags)
    device = next(model.parameters()).device
    named = {word.partition("=")[0] for word in arguments}
    sizes = flags.batch_size if named & {"-b", "--batch-size"} else BATCH_SIZES if device.type == "cuda" else (1, 8)
    half = device.type == "cuda" and "--dtype" not in named
    dtype = torch.float16 if half else getattr(torch, flags.dtype)
    model = model.to(dtype)
    fast: Any = patch(model, chosen.for_model(model))
    inputs = host_of(model).inputs
    images = torch.randn(max(sizes), inputs.channels, *inputs.size, dtype=dtype, device=device)
    with render.status("verifying") as step:
        report = verify(model, fast, images, batch_sizes=sizes, rounds=flags.rounds, progress=step)
    text = markdown(report, worst_of(report.operators), kept_gain(report.speeds))
    if flags.report is not None:
        write_atomically(flags.report, text)
        result = {"command": shlex.join(["gtp-vit", "benchmark", *arguments]), **jsonable(report)}
        write_atomically(flags.report.with_suffix(".json"), json.dumps(result, indent=2) + "\n")
    if flags.json:
        render.print_json(report)
    else:
        render.print_text(text)
    if report.failed:
        names = ", ".join(f"{check.name} ({check.detail})" for check in report.failed)
        made = sum(check.passed is not None for check in report.checks)
        raise ChecksFailedError(
            f"{len(report.failed)} of {len(report.checks)} checks failed: {names}" if made else names
        )


def _compare_engines(flags: Benchmark, chosen: MethodChoice, arguments: Sequence[str]) -> None:
    """Answer with one table of the engines."""
    flags_given = {word.partition("=")[0] for word in arguments}
    for word in ("--engine", "--precision", "--compile", "--dtype"):
        if word in flags_given:
            raise GTPError(f"{word} is for one engine; remove it with --engines")
    if is_exported(flags.model):
        raise GTPError(f"{flags.model} is for one engine; name the model it was made from with --engines")
    if flags.device != "cpu":
        raise GTPError(f"--device is {flags.device}; engines run on a CPU here; remove it")
    if len(flags.batch_size) > 1:
        raise GTPError("--batch-size has several numbers; give one with --engines")
    names = engine_names() if ALL in flags.engines else tuple(dict.fromkeys(flags.engines))
    model = make_model(flags)
    method = chosen.for_model(model)
    real = flags.data_dir is not None or bool(flags.dataset) or flags.model == bundled.NAME
    inputs = host_of(model).inputs
    unreadable: list[str] = []
    images = torch.randn(8, inputs.channels, *inputs.size, generator=torch.Generator().manual_seed(0))
    if real:
        images, unreadable = read_images(flags, model, flags.images, 8)
    images = images.repeat(-(-flags.batch_size[0] // len(images)), 1, 1, 1)
    with render.status("comparing") as step:
        comparison = EngineComparison(
            model,
            patch(model, method),
            images,
            real,
            flags.batch_size[0],
            flags.rounds,
            torch.get_num_threads(),
            step,
        )
        rows = [row for name in names for row in comparison.rows(name)]
    title = f"{flags.model} with {method.name} in each engine, batch {flags.batch_size[0]}"
    columns, cells = engine_table(rows)
    result = {"flags": flags, "settings": method.to_dict(), "threads": torch.get_num_threads(), "engines": rows}
    print_result(flags, result, (title, columns, cells), text=ENGINE_NOTE)
    write_page(
        flags, arguments, flags.html, title, "", [Section("Engines", table(columns, cells) + paragraph(ENGINE_NOTE))]
    )
    failed = [f"{row.engine} {row.precision}" for row in rows if row.failed]
    if failed:
        raise IncompleteError(f"no figures of {', '.join(failed)}; the table says why")
    check_readable(unreadable)


def _check(flags: Benchmark) -> None:
    """Refuse combinations that make no sense."""
    check_engine(flags.engine, flags.precision, flags.device)
    for_torch = {"--compile": flags.compile, "--dtype": flags.dtype != "float32"}
    wrong = [name for name, value in for_torch.items() if value and flags.engine != TORCH]
    if wrong:
        raise GTPError(f"{' and '.join(wrong)} applies to torch only; remove it with --engine {flags.engine}")


def measure(
    flags: Benchmark,
    method: Method,
    model: nn.Module,
    fast: nn.Module,
    images: torch.Tensor,
    file: ExportedFile | None = None,
) -> list[BatchTiming]:
    """Time all models at every batch size, and with loading of images where there are some.

    A file stands for its model: the unreduced one beside it is exported for this, with random weights.
    """
    models = {"unreduced": model} if file is not None else {"unreduced": model, method.name: fast}
    sliced = None if file is not None else slicing_like(tower_of(fast).reducer)
    if sliced is not None and method.name != "identity":
        models[sliced.name] = patch(model, sliced, quiet=True)
    if flags.engine != TORCH:
        with render.status("exporting") as step:
            step(f"{len(models)} models, some seconds each" if len(models) > 1 else "the unreduced model, some seconds")
            threads = torch.get_num_threads()
            with compile_for_engine(flags.engine, flags.precision, models, images, threads) as ready:
                if file is not None:
                    ready[file.name] = compiled_file(file.engine, file.path, flags.precision, threads)
                return _measure(flags, {**ready, EAGER: model}, model, images)
    if flags.compile:
        return _measure(flags, {name: torch.compile(one) for name, one in models.items()}, model, images)
    return _measure(flags, models, model, images)


def _measure(
    flags: Benchmark, models: Mapping[str, Callable[[torch.Tensor], object]], model: nn.Module, images: torch.Tensor
) -> list[BatchTiming]:
    files = None
    if flags.data_dir is not None or flags.dataset:
        files = make_dataset(dataclasses.replace(flags, batch_size=1), model, labels=False)  # type: ignore[arg-type]
        for size in flags.batch_size:
            BatchCycle(files, size, images).next_batch()  # fail now, not after the work, if there are too few
    timings = []
    with torch.inference_mode(), render.progress("timing") as progress:
        for size in flags.batch_size:
            calls = {name: functools.partial(one, images[:size]) for name, one in models.items()}
            timings.append(_timed(flags, size, False, calls, progress))
            if files is not None:
                calls = {
                    name: functools.partial(_load_and_run, one, BatchCycle(files, size, images))
                    for name, one in models.items()
                }
                timings.append(_timed(flags, size, True, calls, progress))
    return timings


def _load_and_run(model: Callable[[torch.Tensor], object], cycle: BatchCycle) -> object:
    return model(cycle.next_batch())


def _timed(
    flags: Benchmark, size: int, loading: bool, calls: Mapping[str, Callable[[], object]], progress: Any
) -> BatchTiming:
    if flags.engine == TORCH:
        return BatchTiming(
            size, loading, speedups_over(interleave(calls, rounds=flags.rounds, progress=progress), "unreduced")
        )
    samples = interleave(calls, rounds=flags.rounds, pause=PAUSE_SECONDS, progress=progress)
    over_torch = {timing.name: timing.speedup for timing in speedups_over(samples, EAGER)}
    return BatchTiming(size, loading, speedups_over(samples, "unreduced"), flags.engine, over_torch)


class BatchCycle:
    """Whole batches of a data set, over and over; every model has its own, so all read the same images."""

    def __init__(self, dataset: Dataset[Item], size: int, like: torch.Tensor) -> None:
        self.dataset, self.size, self.like = dataset, size, like
        self.iterator: Iterator[Batch] = iter(())

    def next_batch(self) -> torch.Tensor:
        batch = next(self.iterator, None)
        if batch is None or len(batch.images) < self.size:
            self.iterator = batches(self.dataset, batch_size=self.size, workers=0)
            batch = next(self.iterator, None)
        if batch is None or len(batch.images) < self.size:
            images = 0 if batch is None else len(batch.images)
            raise GTPError(f"a batch needs {self.size} images, but only {images} could be read; give a smaller -b")
        return batch.images.to(self.like)
