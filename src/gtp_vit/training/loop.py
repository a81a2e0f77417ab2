"""finetune: train a model with the reduction active; a run that was stopped resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Item
from gtp_vit.errors import BadSetting, GTPError, check_range
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.classes import Classes
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.metrics.output_cache import OutputCache
from gtp_vit.metrics.registry import check_class_output
from gtp_vit.patching import host_of, patch, unpatch
from gtp_vit.profiling.environment import bf16_verdict
from gtp_vit.profiling.macs import macs
from gtp_vit.recipes import Recipe, resolve
from gtp_vit.runs import distributed
from gtp_vit.runs.identity import identity, images_identity
from gtp_vit.training.checkpoint import STATE, locked, read_state, write_state, write_weights
from gtp_vit.training.data import load, steps_of_epoch, without_labels
from gtp_vit.training.log import Entry, Log
from gtp_vit.training.protocols import protocol_of
from gtp_vit.training.settings import Training
from gtp_vit.training.trainer import NotFinite, Trainee

StepsDone = Callable[[int, int, Entry], None]  # steps done, their total, and the figures of the last ones


@dataclass(frozen=True)
class Finetuned:
    """The result of a run."""

    model: Any  # patched, in eval mode
    log: tuple[Entry, ...]
    unreadable: tuple[str, ...]  # images that were left out in this process since it started

    def figures(self) -> tuple[Entry, ...]:
        """The log entries of the validation passes: before training, and after each epoch."""
        return tuple(entry for entry in self.log if entry["kind"] == "validation")


def check_trainable(plain: Any) -> None:
    """Refuse models around a ViT, and ViTs without classes."""
    host = host_of(plain)
    if host.path:
        raise BadSetting(
            f"{type(plain).__name__} has its ViT at {host.path}, and only a ViT itself can be finetuned here; train "
            f"gtp_vit.patch(model) with its own library, or give model.{host.path} and put the result back"
        )
    check_class_output(plain)


def finetune(
    model: nn.Module,
    method: Method | Recipe | str | Path,
    dataset: Dataset[Item],
    settings: Training | None = None,
    *,
    output: str | Path,
    validation: Dataset[Item] | None = None,
    workers: int = 2,
    name: str | None = None,
    restart: bool = False,
    progress: StepsDone | None = None,
) -> Finetuned:
    """Finetune a copy of `model` with `method` active. A run that was stopped resumes from `output`, bit for bit.

    In processes that torchrun or accelerate started (`gtp_vit.runs.distributed.process_group`), all of them call this
    with the same arguments and each works on its share; only the first writes.

    Args:
        model: the unreduced model; it is not changed, and is the teacher where there is distillation.
        method: e.g. GTP(propagate=14), or a recipe.
        dataset: labelled images, augmented as they are read; `training.data.open_training_images` makes one.
        settings: the paper's recipe if None.
        output: folder for weights.safetensors, state.pt and the log.
        validation: images for a pass before training and after each epoch.
        workers: processes that read images, for each process that computes.
        name: of the model, for the metadata; timm's if None.
        restart: start again instead of resuming; the first checkpoint replaces what an earlier run wrote.
        progress: called after every step.
    """
    settings = settings or Training()
    settings.check()
    check_range("workers", workers, 0, 256, whole=True)
    plain: Any = unpatch(model)
    check_trainable(plain)
    host = host_of(plain)
    method = resolve(method, host)
    if not isinstance(method, Method):
        raise BadSetting(f"method is {method!r}; give settings, e.g. GTP(propagate=14)")
    check_processes(settings)
    if settings.amp != "off" and next(plain.parameters()).device.type == "cpu":
        verdict = bf16_verdict()  # in a subprocess, because it may crash
        if verdict != "works":
            raise GTPError(f"bfloat16 cannot be used here: {verdict}; leave out --amp")
    folder, name = Path(output), name or host.inputs.name
    run = run_identity(plain, name, method, settings, dataset, validation)
    distributed.check_same("settings, weights or data", run)
    with locked(folder) if distributed.is_rank_zero() else nullcontext():
        state = read_state(folder, run) if distributed.is_rank_zero() and not restart else None
        trip = _Run(plain, method, settings, dataset, validation, folder, name, workers, run)
        try:
            trip.begin(state)
            del state  # which holds on to the file
            return trip.go(progress)
        except NotFinite as error:
            kept = f"{folder / STATE}, of step {trip.saved}, is kept" if trip.saved else "nothing was saved yet"
            raise NotFinite(f"{error}; the last good checkpoint ({kept}); try a lower --lr, or --clip-grad 1") from None
        finally:
            trip.log.close()


def check_processes(settings: Training) -> None:
    """Raise BadSetting unless each process gets the same number of parts."""
    processes = distributed.rank_and_world_size()[1]
    if settings.parts % processes:
        fits = [number for number in range(1, settings.parts + 1) if settings.parts % number == 0]
        raise BadSetting(
            f"{processes} processes cannot share the {settings.parts} parts of a step (--batch-size "
            f"{settings.batch_size} in parts of --micro-batch {settings.part}); start {' or '.join(map(str, fits))}, "
            "or change one of these"
        )


def run_identity(
    model: Any, name: str, method: Method, settings: Training, dataset: Any, validation: Any
) -> dict[str, Any]:
    """What must be equal for a run to be resumed; the number of processes may differ."""
    kept = {key: value for key, value in settings.to_dict().items() if key not in ("log_every", "save_every")}
    seen = {} if validation is None else images_identity(validation).to_dict()
    models = {UNREDUCED: model, method.name: patch(model, method, quiet=True)}
    return identity(name, models, dataset, method=method.to_dict(), **kept, validation=seen).to_dict()


class _Run:
    """One call of `finetune`."""

    def __init__(
        self,
        model: Any,
        method: Method,
        settings: Training,
        dataset: Dataset[Item],
        validation: Dataset[Item] | None,
        folder: Path,
        name: str,
        workers: int,
        run: dict[str, Any],
    ) -> None:
        self.method, self.settings, self.dataset = method, settings, dataset
        self.validation = validation if validation is None or settings.labels else without_labels(validation)
        self.folder, self.name, self.workers, self.run = folder, name, workers, run
        self.log = Log(None)
        self.protocol = protocol_of(method, settings)
        self.epoch_steps = steps_of_epoch(len(dataset), settings)  # type: ignore[arg-type]
        self.steps = settings.epochs * self.epoch_steps
        self.saved = 0  # steps in the last checkpoint
        self.unreadable: dict[str, None] = {}
        self.trainee = Trainee(model, method, self.protocol, settings, self.steps)
        self.teacher_outputs = OutputCache(self.trainee.teacher, Classes())
        method.weakened(self.trainee.model.reduction.vit, settings.strength(0))  # raises now, not in the first epoch
        self.macs = macs(self.trainee.model).total if not self.trainee.model.reducer.adaptive else None
        self.share = None if self.macs is None else round(self.macs / macs(model).total, 4)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Start at the first step, or at the one in `state`, which only the first process has read."""
        folder = self.folder if distributed.is_rank_zero() else None
        known = distributed.broadcast(state and {"step": state["step"], "log": state["log"]})
        if known is None:
            self.log = Log(folder)
            self.validate(0)
        else:
            self.saved = known["step"]
            self.trainee.load(state)
            self.log = Log(folder, known["log"])

    def go(self, progress: StepsDone | None) -> Finetuned:
        done = self.saved
        while done < self.steps:
            done = self.epoch(done, progress)
        return Finetuned(self.trainee.result(), tuple(self.log.entries), tuple(self.unreadable))

    def epoch(self, done: int, progress: StepsDone | None) -> int:
        """The rest of the epoch that step `done` is in."""
        epoch, within = divmod(done, self.epoch_steps)
        self.set_reduction(epoch)
        share, settings = distributed.rank_and_world_size(), self.settings
        parts = load(self.dataset, settings, epoch, within, share=share, workers=self.workers)
        mine = settings.parts // share[1]
        recent: list[dict[str, float]] = []
        begin = time.perf_counter()
        for step in range(done, (epoch + 1) * self.epoch_steps):
            batches = [next(parts) for _ in range(mine)]
            for batch in batches:
                self.unreadable |= dict.fromkeys(batch.unreadable.values())
            recent.append(self.trainee.take(step, self.epoch_steps, batches))
            rate = len(recent) * settings.batch_size / (time.perf_counter() - begin)
            figures = {key: sum(line[key] for line in recent) / len(recent) for key in recent[0]}
            entry = {"kind": "step", "step": step + 1, "epoch": round((step + 1) / self.epoch_steps, 4), **figures}
            entry |= {"lr": recent[-1]["lr"], "images_per_second": round(rate, 2)}
            last = (step + 1) % self.epoch_steps == 0
            if last or (step + 1) % settings.log_every == 0:
                self.log.add(entry)
                recent, begin = [], time.perf_counter()
            if progress is not None:
                progress(step + 1, self.steps, entry)
            if last:
                self.validate(step + 1)
                self.save(step + 1)
            elif settings.save_every and (step + 1) % settings.save_every == 0:
                self.save(step + 1)
                self.set_reduction(epoch)
        return (epoch + 1) * self.epoch_steps

    def set_reduction(self, epoch: int) -> None:
        vit = self.trainee.model.reduction.vit
        method = self.method.weakened(vit, self.settings.strength(epoch))
        self.trainee.begin_epoch(self.protocol.method_at(method, epoch / self.settings.epochs))

    def validate(self, step: int) -> None:
        if self.validation is None:
            return
        models = {UNREDUCED: self.trainee.teacher, self.method.name: self.trainee.result()}
        with torch.random.fork_rng(devices=[]):
            found = evaluate(
                models, self.validation, batch_size=self.settings.part, workers=self.workers, cache=self.teacher_outputs
            )
        score = found.scores[1]
        figures = {key: score[key].value for key in ("top1", "top5", "agreement", "kl")}
        figures["unreduced_top1"] = found.scores[0]["top1"].value
        if not self.settings.labels:
            figures = {key: figures[key] for key in ("agreement", "kl")}
        epoch = step // self.epoch_steps
        self.log.add({"kind": "validation", "step": step, "epoch": epoch, **figures})

    def save(self, step: int) -> None:
        """Write a checkpoint in the first process; the others continue and wait for it in the next step."""
        state = self.trainee.state()
        if distributed.is_rank_zero():
            latest = self.log.of("validation")[-1:] or [{}]
            found = {"finetuned": self.settings.to_dict(), "step": step, "steps": self.steps}
            measured = {"macs": self.macs, "share": self.share, "validation": latest[0]}
            # The state last: where it says that a step is done, the weights of that step must exist.
            write_weights(self.folder, self.name, self.trainee.result(), self.method, found, measured)
            write_state(self.folder, self.run, {"step": step, "log": self.log.entries, **state})
        self.saved = step
