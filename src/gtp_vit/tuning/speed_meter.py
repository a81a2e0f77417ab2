"""The clock of a search: how fast settings are, in torch or in an engine, and what the engine makes of the outputs."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.reducer import Method
from gtp_vit.engines import ENGINES, TORCH, check_precision
from gtp_vit.engines.runtime import compile_for_engine
from gtp_vit.errors import SettingError, check_name
from gtp_vit.metrics.base import UNREDUCED, Measure
from gtp_vit.metrics.damage import Damage
from gtp_vit.patching import patch
from gtp_vit.profiling.benchmark import PAUSE_SECONDS, Timing, benchmark_models, interleave, speedups_over
from gtp_vit.recipes.provenance import EngineFigures


class SpeedMeter:
    """Times settings of a method on one model against the unreduced one, in turns."""

    def __init__(self, model: nn.Module, engine: str, precision: str, measure: Measure) -> None:
        check_name("engine", engine, (TORCH, *ENGINES))
        if engine == TORCH:
            if precision != "f32":
                raise SettingError(f"precision is {precision}, which is for engines; in torch convert the model")
        elif measure.restores:
            raise SettingError(
                f"engine is {engine}, and features of patches are compared in torch; tune in torch, then export"
            )
        else:
            check_precision(ENGINES[engine], precision)
        self.model, self.engine, self.precision, self.measure = model, engine, precision, measure
        self.files = contextlib.ExitStack()  # of the unreduced model, once it is needed
        self.unreduced: Any = None

    def __enter__(self) -> SpeedMeter:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def measure_speed(self, method: Method, images: Tensor, rounds: int) -> Timing:
        fast = patch(self.model, method, quiet=True)
        if self.in_torch:
            return benchmark_models({"unreduced": self.model, "reduced": fast}, images, rounds=rounds)[1]
        if self.unreduced is None:
            self.unreduced = self.files.enter_context(self._compile({"unreduced": self.model}, images))
        with self._compile({"reduced": fast}, images) as loaded:
            calls = {name: functools.partial(run, images) for name, run in {**self.unreduced, **loaded}.items()}
            return speedups_over(interleave(calls, rounds=rounds, pause=PAUSE_SECONDS), "unreduced")[1]

    @property
    def in_torch(self) -> bool:
        return self.engine == TORCH

    def figures(self, method: Method, images: Tensor, num_search_images: int) -> EngineFigures:
        """The damage of the reduced model in the engine against the unreduced one in torch, on held-out images.

        The first `num_search_images` images are those of the search; ranges of 8-bit numbers come from them.
        """
        unseen = images[num_search_images:]
        with self._compile(
            {"reduced": patch(self.model, method, quiet=True)}, images[:num_search_images], tune_smoothing=True
        ) as loaded:
            output = self.measure.check(self.engine, loaded["reduced"](unseen), len(unseen)).float()
        with torch.inference_mode():
            reference = self.measure.outputs(UNREDUCED, self.model, unseen)
        damage = Damage.between(self.measure, reference, output)
        return EngineFigures(damage.summary(), len(unseen), self.engine, self.precision)

    def _compile(
        self, models: Any, images: Tensor, *, tune_smoothing: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        return compile_for_engine(
            self.engine, self.precision, models, images, torch.get_num_threads(), tune_smoothing=tune_smoothing
        )
