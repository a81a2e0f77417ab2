"""finetune: train a model with the reduction active; a run that was stopped resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Item
from gtp_vit.errors import GTPError, SettingError, check_range
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.classes import Classification
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.metrics.output_cache import OutputCache
from gtp_vit.metrics.registry import check_class_output
from gtp_vit.models.checkpoint import sizes_of_model
from gtp_vit.patching import host_of, patch, unpatch
from gtp_vit.profiling.environment import bf16_verdict
from gtp_vit.profiling.macs import macs
from gtp_vit.recipes.defaults import resolve
from gtp_vit.recipes.provenance import Finetuning, Measurements, Provenance
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.runs import distributed
from gtp_vit.runs.identity import images_identity, run_identity
from gtp_vit.training.checkpoint import STATE, RunState, lock_run_folder, read_state, write_state, write_weights
from gtp_vit.training.data import load_micro_batches, steps_of_epoch, without_labels
from gtp_vit.training.log import Log, LogEntry
from gtp_vit.training.settings import TrainingConfig
from gtp_vit.training.trainer import NonFiniteError, Trainer

StepsDone = Callable[[int, int, LogEntry], None]  # steps done, their total, and the figures of the last ones


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run."""

    model: nn.Module  # patched, in eval mode
    log: tuple[LogEntry, ...]
    unreadable: tuple[str, ...]  # images that were left out in this process since it started

    def validations(self) -> tuple[LogEntry, ...]:
        """The log entries of the validation passes: before training, and after each epoch."""
        return tuple(entry for entry in self.log if entry.kind == "validation")


@dataclass(frozen=True)
class FinetuneOutput:
    """Where a run writes, and under which name."""

    folder: str | Path
    """Folder for weights.safetensors, state.pt and the log."""
    model_name: str | None = None
    """Name of the model in the metadata; timm's if None."""
    restart: bool = False
    """Start again instead of resuming; the first checkpoint replaces what an earlier run wrote."""


def check_trainable(plain: nn.Module) -> None:
    """Refuse models around a ViT, and ViTs without classes."""
    host = host_of(plain)
    if host.path:
        raise SettingError(
            f"{type(plain).__name__} has its ViT at {host.path}, and only a ViT itself can be finetuned here; train "
            f"gtp_vit.patch(model) with its own library, or give model.{host.path} and put the result back"
        )
    check_class_output(plain)


def finetune(
    model: nn.Module,
    method: Method | Recipe | str | Path,
    dataset: Dataset[Item],
    settings: TrainingConfig | None = None,
    *,
    output: str | Path | FinetuneOutput,
    validation: Dataset[Item] | None = None,
    workers: int = 2,
    progress: StepsDone | None = None,
) -> FinetuneResult:
    """Finetune a copy of `model` with `method` active. A run that was stopped resumes from `output`, bit for bit.

    In processes that torchrun or accelerate started (`gtp_vit.runs.distributed.process_group`), all of them call this
    with the same arguments and each works on its share; only the first writes.

    Args:
        model: the unreduced model; it is not changed, and is the teacher where there is distillation.
        method: e.g. GTP(propagate=14), or a recipe.
        dataset: labelled images, augmented as they are read; `training.data.open_training_images` makes one.
        settings: the paper's recipe if None.
        output: folder for weights.safetensors, state.pt and the log; or a `FinetuneOutput`, which can also restart
            the run.
        validation: images for a pass before training and after each epoch.
        workers: processes that read images, for each process that computes.
        progress: called after every step.

    Returns:
        The finetuned model, patched and in eval mode; the log; and images that could not be read.

    Raises:
        SettingError: the settings do not fit the method, the images or the processes.
        NonFiniteError: the loss or a weight is not finite; the last checkpoint is kept.
        GTPError: the folder has a different run, or the model cannot be finetuned.

    >>> import torch, gtp_vit
    >>> from gtp_vit.data.dataset import InMemoryDataset
    >>> model, images = gtp_vit.create_model("test_vit"), InMemoryDataset(torch.rand(8, 3, 160, 160), torch.arange(8))
    >>> settings = gtp_vit.TrainingConfig(epochs=1, batch_size=8, micro_batch=8, repeats=1)
    >>> result = finetune(model, gtp_vit.ToMe(r=4), images, settings, output=getfixture("tmp_path"), workers=0)
    >>> gtp_vit.is_patched(result.model)
    True
    """
    settings = settings or TrainingConfig()
    settings.check()
    check_range("workers", workers, 0, 256, integer=True)
    output = output if isinstance(output, FinetuneOutput) else FinetuneOutput(output)
    plain = unpatch(model)
    check_trainable(plain)
    host = host_of(plain)
    method = resolve(method, host)
    if not isinstance(method, Method):
        raise SettingError(f"method is {method!r}; give settings, e.g. GTP(propagate=14)")
    check_processes(settings)
    if settings.amp != "off" and next(plain.parameters()).device.type == "cpu":
        verdict = bf16_verdict()  # in a subprocess, because it may crash
        if verdict != "works":
            raise GTPError(f"bfloat16 cannot be used here: {verdict}; remove --amp")
    folder, name = Path(output.folder), output.model_name or host.inputs.name
    run = finetune_identity(plain, name, method, settings, dataset, validation)
    distributed.check_same_on_all_ranks("settings, weights or data", run)
    with lock_run_folder(folder) if distributed.is_rank_zero() else nullcontext():
        state = read_state(folder, run) if distributed.is_rank_zero() and not output.restart else None
        images = FinetuneImages(
            dataset, validation if validation is None or settings.labels else without_labels(validation)
        )
        loop = TrainingLoop(plain, method, settings, images, RunFolder(folder, name, run), workers)
        try:
            loop.start(state)
            del state  # which holds on to the file
            return loop.run(progress)
        except NonFiniteError as error:
            saved = (
                f"the checkpoint of step {loop.saved} is kept in {folder / STATE}" if loop.saved else "nothing is saved"
            )
            raise NonFiniteError(f"{error}; {saved}; try a lower --lr, or --clip-grad 1") from None
        finally:
            loop.log.close()


def check_processes(settings: TrainingConfig) -> None:
    """Raise SettingError unless each process gets the same number of parts."""
    processes = distributed.rank_and_world_size()[1]
    if settings.num_micro_batches % processes:
        fits = [
            number for number in range(1, settings.num_micro_batches + 1) if settings.num_micro_batches % number == 0
        ]
        raise SettingError(
            f"{processes} processes cannot share the {settings.num_micro_batches} parts of a step (--batch-size "
            f"{settings.batch_size} in parts of --micro-batch {settings.micro_batch_size}); start "
            f"{' or '.join(map(str, fits))}, or change one of these"
        )


def finetune_identity(
    model: nn.Module, name: str, method: Method, settings: TrainingConfig, dataset: object, validation: object
) -> dict[str, object]:
    """The settings that must be equal for a run to be resumed; the number of processes may differ."""
    hyperparameters = {
        key: value for key, value in settings.to_dict().items() if key not in ("log_every", "save_every")
    }
    validation_identity = {} if validation is None else images_identity(validation).to_dict()
    models = {UNREDUCED: model, method.name: patch(model, method, quiet=True)}
    return run_identity(
        name, models, dataset, method=method.to_dict(), **hyperparameters, validation=validation_identity
    ).to_dict()


@dataclass(frozen=True)
class FinetuneImages:
    """The images to train on, and those to evaluate on after each epoch."""

    training: Dataset[Item]
    validation: Dataset[Item] | None


@dataclass(frozen=True)
class RunFolder:
    """Where the run is kept, and what it is."""

    folder: Path
    model_name: str
    identity: dict[str, object]


class TrainingLoop:
    """Epochs of training steps, validation and checkpoints: one call of `finetune`."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        settings: TrainingConfig,
        images: FinetuneImages,
        place: RunFolder,
        workers: int,
    ) -> None:
        self.method, self.settings, self.images, self.place, self.workers = method, settings, images, place, workers
        self.log = Log(None)
        self.epoch_steps = steps_of_epoch(len(images.training), settings)  # type: ignore[arg-type]
        self.steps = settings.epochs * self.epoch_steps
        self.saved = 0  # steps in the last checkpoint
        self.unreadable: dict[str, None] = {}
        self.trainer = Trainer(model, method, settings, self.steps)
        self.teacher_outputs = OutputCache(self.trainer.teacher, Classification())
        method.scaled(self.trainer.model.reduction.vit, settings.strength(0))  # raises now, not in the first epoch
        self.macs = macs(self.trainer.model).total if not self.trainer.model.reducer.adaptive else None
        self.macs_fraction = None if self.macs is None else round(self.macs / macs(model).total, 4)

    def start(self, state: RunState | None) -> None:
        """Start at the first step, or at the one in `state`, which only the first process has read."""
        folder = self.place.folder if distributed.is_rank_zero() else None
        known = distributed.broadcast(state and (state["step"], state["log"]))
        if known is None:
            self.log = Log(folder)
            self.validate(0)
        else:
            self.saved, lines = known
            self.trainer.load_state_dict(state)
            self.log = Log(folder, [LogEntry.from_dict(line) for line in lines])

    def run(self, progress: StepsDone | None) -> FinetuneResult:
        step = self.saved
        while step < self.steps:
            step = self.train_epoch(step, progress)
        return FinetuneResult(self.trainer.eval_model(), tuple(self.log.entries), tuple(self.unreadable))

    def train_epoch(self, done: int, progress: StepsDone | None) -> int:
        """Train for the rest of the epoch that step `done` is in; returns the number of steps then done."""
        epoch, within = divmod(done, self.epoch_steps)
        self.set_reduction(epoch)
        share, settings = distributed.rank_and_world_size(), self.settings
        parts = load_micro_batches(
            self.images.training, settings, epoch, within, rank_and_world_size=share, workers=self.workers
        )
        recent: list[dict[str, float]] = []
        begin = time.perf_counter()
        for step in range(done, (epoch + 1) * self.epoch_steps):
            batches = [next(parts) for _ in range(settings.num_micro_batches // share[1])]
            for batch in batches:
                self.unreadable |= dict.fromkeys(batch.unreadable.values())
            recent.append(self.trainer.train_step(step, self.epoch_steps, batches))
            rate = len(recent) * settings.batch_size / (time.perf_counter() - begin)
            entry = self.log_entry(step + 1, recent, rate)
            last = (step + 1) % self.epoch_steps == 0
            if last or (step + 1) % settings.log_every == 0:
                self.log.add(entry)
                recent, begin = [], time.perf_counter()
            if progress is not None:
                progress(step + 1, self.steps, entry)
            if last:
                self.validate(step + 1)
                self.save_checkpoint(step + 1)
            elif settings.save_every and (step + 1) % settings.save_every == 0:
                self.save_checkpoint(step + 1)
                self.set_reduction(epoch)
        return (epoch + 1) * self.epoch_steps

    def log_entry(self, done: int, recent: list[dict[str, float]], rate: float) -> LogEntry:
        """The mean figures of the steps since the last entry, and the last learning rate."""
        means = {key: sum(figures[key] for figures in recent) / len(recent) for key in recent[0]}
        figures = {**means, "lr": recent[-1]["lr"], "images_per_second": round(rate, 2)}
        return LogEntry("step", done, round(done / self.epoch_steps, 4), figures)

    def set_reduction(self, epoch: int) -> None:
        vit = self.trainer.model.reduction.vit
        method = self.method.scaled(vit, self.settings.strength(epoch))
        self.trainer.start_epoch(self.trainer.protocol.method_at(method, epoch / self.settings.epochs))

    def validate(self, step: int) -> None:
        if self.images.validation is None:
            return
        models = {UNREDUCED: self.trainer.teacher, self.method.name: self.trainer.eval_model()}
        with torch.random.fork_rng(devices=[]):
            evaluation = evaluate(
                models,
                self.images.validation,
                batch_size=self.settings.micro_batch_size,
                workers=self.workers,
                cache=self.teacher_outputs,
            )
        score = evaluation.scores[1]
        figures = {key: score[key].value for key in ("top1", "top5", "agreement", "kl")}
        figures["unreduced_top1"] = evaluation.scores[0]["top1"].value
        if not self.settings.labels:
            figures = {key: figures[key] for key in ("agreement", "kl")}
        self.log.add(LogEntry("validation", step, step // self.epoch_steps, figures))

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint in the first process; the others continue and wait for it in the next step."""
        state = self.trainer.state_dict()
        if distributed.is_rank_zero():
            lines = [entry.to_dict() for entry in self.log.entries]
            latest = [line for line in lines if line["kind"] == "validation"][-1:] or [{}]
            provenance = Provenance(finetuned=Finetuning(self.settings.to_dict(), step, self.steps))
            validation = {key: value for key, value in latest[0].items() if key != "kind"}
            measured = Measurements(macs=self.macs, fraction=self.macs_fraction, validation=validation)
            model = self.trainer.eval_model()
            # The state last: where it says that a step is done, the weights of that step must exist.
            recipe = Recipe(self.place.model_name, sizes_of_model(model), self.method, provenance, measured)
            write_weights(self.place.folder, model, recipe)
            write_state(self.place.folder, {"run": self.place.identity, "step": step, "log": lines, **state})
        self.saved = step
