"""gtp-vit benchmark: is the model faster with the method, here and now?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from gtp_vit.cli import render
from gtp_vit.cli.exported import ExportedFile, timed_file
from gtp_vit.cli.flags import Chosen, MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import DataFlags, make_dataset, make_model
from gtp_vit.cli.output import OutputFlags, answer, write_page
from gtp_vit.cli.parser import Short
from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Batch
from gtp_vit.data.loader import batches
from gtp_vit.engines import ENGINES, check_precision, engine_of, is_exported
from gtp_vit.engines.runtime import Sized, in_engine
from gtp_vit.errors import GTPError, check_range
from gtp_vit.methods import method_from_dict
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import host_of, patch
from gtp_vit.profiling.benchmark import PAUSE, against, interleave
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.slicing import slicing_of
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.timing import Timed, cost_table, timing_table, verdict
from gtp_vit.runs.files import check_writable

EAGER = "eager torch, unreduced"


@dataclass(frozen=True)
class Benchmark(OutputFlags, MethodFlags, DataFlags):
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
      gtp-vit benchmark out/vit_tiny_patch16_224-gtp_plus-int8.xml
    """

    batch_size: Annotated[tuple[int, ...], Short("-b")] = (8,)  # type: ignore[assignment]
    """Images in a batch; several numbers are timed one after the other."""
    rounds: int = 20
    """How often each model is timed."""
    compile: bool = False
    """Compile both models with torch.compile first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and images in torch."""
    engine: Literal["torch", "onnxruntime", "openvino"] = "torch"
    """What runs the models. In an engine all are exported first, for a fixed batch, and eager torch is timed, too."""
    precision: Literal["f32", "bf16", "int8"] = "f32"
    """Precision in an engine."""


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Benchmark, words)
    for size in flags.batch_size:
        check_range("--batch-size", size, 1, 65536, whole=True)
    check_range("--rounds", flags.rounds, 3, 1_000_000, whole=True)
    check_writable(flags.report)
    file = None
    if is_exported(flags.model):
        file, flags = _named_file(flags, chosen, words)
    check_engine(flags)
    dtype = getattr(torch, flags.dtype)
    model = make_model(flags).to(dtype)
    method = chosen.for_model(model) if file is None else method_of(file)
    fast: Any = patch(model, method)
    inputs, device = host_of(model).inputs, next(model.parameters()).device
    images = torch.randn(max(flags.batch_size), inputs.channels, *inputs.size, dtype=dtype, device=device)
    layers = cost_table(model, fast, images=images[:8])
    timed = measure(flags, method, model, fast, images, file)
    times = timing_table(timed)
    precise = flags.dtype if flags.engine == "torch" else flags.precision
    lead = f"{flags.engine}, {torch.get_num_threads()} threads, {flags.rounds} interleaved rounds, {precise}"
    with torch.inference_mode():  # as it was timed: with gradients on, other kernels would run
        verdicts = [verdict(entry, model, fast, images) for entry in timed]
        cost = {"unreduced": int(macs(model)), method.name: int(macs(fast, images=images[:8]))}
        result = {"flags": flags, "settings": method.to_dict(), "threads": torch.get_num_threads()}
        result |= {"kernels": fast.kernels, "macs": cost, "timed": timed, "verdicts": verdicts}
    title = f"{flags.model}, {method.name}: cost of each layer"
    answer(flags, result, (title, *layers), (lead, *times), text="\n".join(verdicts))
    sections = [
        Section("Time", table(*times) + "".join(map(paragraph, verdicts))),
        Section("Cost of each layer", table(*layers)),
    ]
    write_page(flags, words, flags.report, f"{flags.model} with {method}", lead, sections)


def _named_file(flags: Benchmark, chosen: Chosen, words: Sequence[str]) -> tuple[ExportedFile, Benchmark]:
    """The file that is named in place of a model, and the flags of the model it was made from, in its engine."""
    own = ("--engine", "--precision", "--compile", "--dtype", "--checkpoint", "--pretrained")
    wrong = [word for word in words if word.partition("=")[0] in own]
    if wrong:
        raise GTPError(f"{flags.model} has its own engine, precision and weights; leave out {wrong[0]}")
    file, flags = timed_file(flags, chosen, words)
    engine, precision = engine_of(file.path), file.about.precision
    return file, dataclasses.replace(flags, engine=engine.name, precision=precision)  # type: ignore[arg-type]


def method_of(file: ExportedFile) -> Method:
    """What a file was reduced by."""
    stored = file.about.method
    return Identity() if stored is None else method_from_dict(stored)


def check_engine(flags: Benchmark) -> None:
    """Refuse combinations that make no sense."""
    if flags.engine == "torch":
        if flags.precision != "f32":
            raise GTPError(f"--precision is {flags.precision}, which is for engines; in torch give --dtype")
        return
    check_precision(ENGINES[flags.engine], flags.precision)
    others = {"--compile": flags.compile, "--dtype": flags.dtype != "float32", "--device": flags.device != "cpu"}
    wrong = [name for name, given in others.items() if given]
    if wrong:
        raise GTPError(f"{' and '.join(wrong)} is for torch; leave it out with --engine {flags.engine}")


def measure(
    flags: Benchmark, method: Method, model: Any, fast: Any, images: torch.Tensor, file: ExportedFile | None = None
) -> list[Timed]:
    """Time all models at every batch size, and with loading of images where there are some.

    A file stands for its model: the unreduced one beside it is exported for this, with random weights.
    """
    models = {"unreduced": model} if file is not None else {"unreduced": model, method.name: fast}
    sliced = None if file is not None else slicing_of(fast.reducer)
    if sliced is not None and method.name != "identity":
        models[sliced.name] = patch(model, sliced, quiet=True)
    if flags.engine != "torch":
        with render.steps("exporting") as step:
            step(f"{len(models)} models, some seconds each" if len(models) > 1 else "the unreduced model, some seconds")
            threads = torch.get_num_threads()
            loaded = in_engine(flags.engine, flags.precision, models, images, threads)
            with loaded as ready:
                if file is not None:
                    ready[file.path.name] = Sized(ENGINES[flags.engine], file.path, flags.precision, threads)
                return _measure(flags, {**ready, EAGER: model}, model, images)
    if flags.compile:
        models = {name: torch.compile(one) for name, one in models.items()}
    return _measure(flags, models, model, images)


def _measure(flags: Benchmark, models: dict[str, Any], model: Any, images: torch.Tensor) -> list[Timed]:
    files = None
    if flags.data_dir is not None or flags.dataset:
        files = make_dataset(dataclasses.replace(flags, batch_size=1), model, labels=False)  # type: ignore[arg-type]
        for size in flags.batch_size:
            Cycle(files, size, images).next_batch()  # fail now, not after the work, if there are too few
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
    if flags.engine == "torch":
        return Timed(size, loading, against(interleave(calls, rounds=flags.rounds, progress=progress), "unreduced"))
    samples = interleave(calls, rounds=flags.rounds, pause=PAUSE, progress=progress)
    over_torch = {timing.name: timing.speedup for timing in against(samples, EAGER)}
    return Timed(size, loading, against(samples, "unreduced"), flags.engine, over_torch)


class Cycle:
    """Whole batches of a data set, over and over; every model has its own, so all read the same images."""

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
            raise GTPError(f"a batch needs {self.size} images, but only {found} could be read; give a smaller -b")
        return batch.images.to(self.like)
