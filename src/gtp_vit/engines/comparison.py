"""One model in every engine: size, damage, time and memory of its files, a row for each engine and precision."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import primary_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines import ENGINES, TORCH
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.export import export
from gtp_vit.engines.output_check import compare_outputs
from gtp_vit.engines.program import output_spec
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError
from gtp_vit.profiling.benchmark import PAUSE_SECONDS, Timing, interleave, speedups_over

PRECISIONS = ("f32", "int8")
UNREDUCED, REDUCED = "unreduced", "reduced"
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EngineFigures:
    """Figures of the file of a reduced model."""

    megabytes: float | None  # of the file; None = there is none, in torch
    max_difference: float  # the largest to torch with the same method
    agreement: float | None  # in percent, with the unreduced model in torch; None without real images or classes
    kl: float | None  # to that model; likewise
    time: Timing  # with the speed-up over the unreduced model's file in the same engine and precision
    peak_megabytes: float | None  # of the process that runs the file; None = not known


@dataclass(frozen=True)
class EngineRow:
    """One engine in one precision."""

    engine: str
    precision: str
    figures: EngineFigures | None
    problem: str = ""  # why there are no figures
    failed: bool = False  # there should be figures: the engine is installed


@dataclass(frozen=True)
class EngineComparison:
    """A model and its reduced form, to be compared in engines."""

    model: nn.Module
    fast: nn.Module
    images: Tensor  # what outputs are compared on, and what ranges of 8-bit numbers are found with
    real_images: bool  # they are no noise: 8 bits and agreement mean something
    batch_size: int = 1
    rounds: int = 20
    threads: int = 0  # 0 = each engine's choice
    progress: Callable[[str], None] = lambda _: None

    def rows(self, name: str) -> Iterator[EngineRow]:
        """The rows of one engine, or of torch."""
        if name == TORCH:
            self.progress("timing torch")
            runs = {UNREDUCED: self._in_torch(self.model), REDUCED: self._in_torch(self.fast)}
            yield EngineRow(TORCH, "f32", self._figures(runs, None, None))
            return
        engine = ENGINES[name]
        for precision in (p for p in PRECISIONS if p in engine.precisions):
            missing = self._missing(engine, precision)
            if missing is not None:
                yield EngineRow(name, precision, None, missing)
                continue
            try:
                yield EngineRow(name, precision, self._in_engine(engine, precision))
            except GTPError as error:
                yield EngineRow(name, precision, None, str(error), failed=True)

    def _missing(self, engine: Engine, precision: str) -> str | None:
        missing = engine.missing() or (None if engine.converter is None else engine.converter.missing())
        missing = missing or engine.cannot_run()
        if missing is None and engine.precisions[precision].needs_images and not self.real_images:
            return "needs images to find the ranges of its numbers: --data-dir"
        return missing

    def _in_engine(self, engine: Engine, precision: str) -> EngineFigures:
        images = self.images if self.real_images else None
        with tempfile.TemporaryDirectory(prefix="gtp-vit-") as folder:
            runs, size = {}, 0
            for name, model in ((UNREDUCED, self.model), (REDUCED, self.fast)):
                self.progress(f"{engine.name} {precision}: the {name} model")
                exported = export(model, Path(folder) / f"{name}{engine.suffix}", precision=precision, images=images)
                size = sum(path.stat().st_size for path in exported.files[:-1])  # without the card
                runs[name] = ExportedModel(exported.path, precision, self.threads)
            self.progress(f"{engine.name} {precision}: timing")
            return self._figures(runs, size / 1e6, runs[REDUCED].run.peak_megabytes)

    def _in_torch(self, model: nn.Module) -> Call:
        kind = output_spec(model).kind

        def run(images: Tensor) -> Tensor:
            with torch.inference_mode(), eval_mode(model):
                return primary_output(model(images), kind)

        return run

    def _figures(
        self, runs: Mapping[str, Call], megabytes: float | None, peak: Callable[[], float | None] | None
    ) -> EngineFigures:
        some = self.images[: self.batch_size]
        calls = {name: lambda run=run: run(some) for name, run in runs.items()}
        _, time = speedups_over(interleave(calls, rounds=self.rounds, pause=PAUSE_SECONDS), UNREDUCED)
        classes = output_spec(self.model).kind == "classes"
        outputs = self._outputs(runs[REDUCED])
        own = compare_outputs(self._outputs(self._in_torch(self.fast)), outputs, classes)
        unreduced = compare_outputs(self._outputs(self._in_torch(self.model)), outputs, classes)
        return EngineFigures(
            megabytes=megabytes,
            max_difference=own.max_difference,
            agreement=unreduced.agreement if self.real_images else None,
            kl=unreduced.kl if self.real_images else None,
            time=time,
            peak_megabytes=None if peak is None else peak(),
        )

    def _outputs(self, run: Call) -> Tensor:
        return torch.cat([run(part) for part in self.images.split(max(self.batch_size, 8))])
