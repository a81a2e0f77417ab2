"""An exported file as a module, and several models in one engine to be timed."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.engines import ENGINES, check_precision, check_runs, engine_of
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.engine_process import EngineProcess
from gtp_vit.engines.program import Program, check_exportable


class ExportedModel(nn.Module):
    """Runs an exported file on tensors, in a process of its own.

    Several files, of both engines, with torch in one process have ended it with a segmentation fault.
    """

    def __init__(self, path: Path, precision: str, threads: int = 0) -> None:
        super().__init__()
        check_runs(engine_of(path))
        self.run = EngineProcess(engine_of(path), path, precision, threads)

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.run(images.float().contiguous().numpy()))


@contextmanager
def compile_for_engine(
    name: str,
    precision: str,
    models: Mapping[str, nn.Module],
    images: Tensor,
    threads: int = 0,
    *,
    tune_smoothing: bool = False,
) -> Iterator[dict[str, Callable[[Tensor], Tensor]]]:
    """Models in an engine for a while.

    Args:
        name: of the engine.
        precision: of the files.
        models: name -> model.
        images: to find the ranges of 8-bit numbers with; noise is as good as any where only time is measured.
        threads: CPU threads; 0 = the engine's choice.
        tune_smoothing: outputs matter, as those of a file that `export` writes; else only time does.
    """
    engine = ENGINES[name]
    check_precision(engine, precision)
    engine.check_converter()
    check_runs(engine)
    some = images[: 128 if tune_smoothing else 8].float().cpu().numpy()
    with tempfile.TemporaryDirectory(prefix="gtp-vit-") as folder:
        loaded: dict[str, Callable[[Tensor], Tensor]] = {}
        for number, (key, model) in enumerate(models.items()):
            check_exportable(model)
            path, forms = Path(folder) / f"{number}{engine.suffix}", Path(folder) / "forms"
            forms.mkdir()
            engine.convert(
                Program(model, forms, engine.batch), path, precision, some, "", tune_smoothing=tune_smoothing
            )
            shutil.rmtree(forms)
            loaded[key] = compiled_file(engine, path, precision, threads)
        yield loaded


def compiled_file(engine: Engine, path: Path, precision: str, threads: int) -> Callable[[Tensor], Tensor]:
    """A file that is loaded once for every number of images, as a server with a fixed batch would."""
    loaded = functools.cache(lambda batch: engine.load(path, precision, threads, batch))
    return lambda images: torch.from_numpy(loaded(len(images))(images.numpy()))
