"""gtp-vit finetune: train a model with the reduction active, alone or on many machines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gtp_vit.cli import render
from gtp_vit.cli.flags import MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import DataFlags, check_weights, data_settings, embedded_images, make_model
from gtp_vit.cli.output import JsonFlags, check_is_folder, check_readable, print_result, write_page
from gtp_vit.core.ranges import Range
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.loader import evenly_spaced_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.errors import GTPError
from gtp_vit.report.training_log import training_sections, training_text, validation_table
from gtp_vit.runs import distributed
from gtp_vit.training.checkpoint import WEIGHTS
from gtp_vit.training.data import open_training_images
from gtp_vit.training.log import LogEntry
from gtp_vit.training.loop import FinetuneOutput, StepsDone, check_trainable, finetune
from gtp_vit.training.settings import TrainingConfig


@dataclass(frozen=True)
class Finetune(JsonFlags, MethodFlags, TrainingConfig, DataFlags):
    """Finetune a model with a method active; the defaults of training are the paper's recipe, whose method is gtp.

    Without labels (--no-labels) it learns from the unreduced model. A run that was stopped resumes when the same
    command is started again, bit for bit, and with any number of processes that fits.

    examples:
      gtp-vit finetune deit_small_patch16_224 --pretrained --data-dir imagenet --method gtp --propagate 14 --output out
      gtp-vit finetune vit_tiny_patch16_224 --pretrained --data-dir calibration --no-labels --method tome --r 14
      torchrun --nproc-per-node 4 -m gtp_vit.cli.app finetune deit_small_patch16_224 --pretrained --data-dir imagenet
    """

    split: str = "train"
    """Split of the data set to learn from."""
    val_dir: Path | None = None
    """Folder of images to evaluate on after each epoch; by default the split --val-split of --data-dir."""
    val_split: str = "validation"
    """Split to evaluate on, where the data has splits."""
    limit: Annotated[int, Range(0, 10**9)] = 0
    """Learn from this many images only, spread over the data set; 0 = all."""
    val_limit: Annotated[int, Range(0, 10**9)] = 0
    """Evaluate on this many images only, spread over the data set; 0 = all."""
    device: str = "auto"
    """cpu, cuda, or auto: an accelerator for each process if there is one."""
    output: Path = Path("finetuned")
    """Folder for the weights, what is needed to resume, the log, and a page with the curves."""
    restart: bool = False
    """Start over instead of resuming a run that was stopped."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Finetune, arguments)
    check_is_folder(flags.output)
    check_weights(flags)
    settings = TrainingConfig(
        **{field.name: getattr(flags, field.name) for field in dataclasses.fields(TrainingConfig)}
    )
    settings.check()
    with distributed.process_group():
        model = make_model(flags)
        check_trainable(model)
        method = chosen.for_model(model)
        dataset, validation = make_datasets(flags, settings, model)
        with _training_bar() as progress:
            run = finetune(
                model,
                method,
                dataset,
                settings,
                output=FinetuneOutput(flags.output, flags.model, flags.restart),
                validation=validation,
                workers=flags.workers,
                progress=progress,
            )
        unreadable = sorted(set(itertools.chain(*distributed.all_gather(run.unreadable))))
        if not distributed.is_rank_zero():
            return
        title = f"{flags.model} with {method}"
        text, table = training_text(run.log), validation_table(run.log)
        write_page(flags, arguments, flags.output / "report.html", title, text, training_sections(run.log))
        text += f" Written: {flags.output / WEIGHTS}, the log and report.html beside it."
        result = {"flags": flags, "log": [entry.to_dict() for entry in run.log], "unreadable": unreadable}
        print_result(flags, result, *([] if table is None else [(title, *table)]), text=text)
        check_readable(unreadable)


def make_datasets(flags: Finetune, settings: TrainingConfig, model: Any) -> tuple[Any, Any]:
    """Images to learn from, and images to evaluate on if there are any."""
    own = embedded_images(flags)
    if own is not None:  # a demonstration: three quarters to learn from
        cut = 3 * len(own) // 4
        first, rest = (
            InMemoryDataset(own.images[:cut], own.labels[:cut]),
            InMemoryDataset(own.images[cut:], own.labels[cut:]),
        )
        return evenly_spaced_images(first, flags.limit), evenly_spaced_images(rest, flags.val_limit)
    folder = flags.data_dir
    if folder is not None and has_split(folder, *EVALUATION) and not has_split(folder, flags.split, *TRAINING):
        raise GTPError(
            f"{folder} has images to evaluate on, but no folder {flags.split} to learn from; give a different --split"
        )
    dataset = open_training_images(model, _data_of(flags, flags.data_dir, flags.split), settings)
    validation = open_validation(flags, model)
    return evenly_spaced_images(dataset, flags.limit), None if validation is None else evenly_spaced_images(
        validation, flags.val_limit
    )


def open_validation(flags: Finetune, model: Any) -> Any:
    """The images to evaluate on; None if the data has no separate split, as training images prove nothing."""
    folder = flags.val_dir or flags.data_dir
    if flags.val_dir is None and not flags.dataset and folder is not None:
        if not has_split(folder, flags.val_split, *EVALUATION):
            return None
    return open_images(model, _data_of(flags, folder, flags.val_split))


def _data_of(flags: Finetune, folder: Path | None, split: str) -> DataSettings:
    own = data_settings(flags, labels=flags.labels)
    return dataclasses.replace(own, data_dir=folder or Path(), split=split, limit=0)  # evenly_spaced_images limits it


TRAINING, EVALUATION = ("train", "training"), ("val", "valid", "validation", "eval", "evaluation")  # as timm names them


def has_split(folder: Path, *names: str) -> bool:
    return any((folder / name).is_dir() for name in names)


@contextmanager
def _training_bar() -> Iterator[StepsDone | None]:
    """A bar with the time that is left, in the first process."""
    if not distributed.is_rank_zero():
        yield None
        return
    with render.progress("finetuning") as update:

        def report(done: int, total: int, entry: LogEntry) -> None:
            line = "epoch {epoch:.2f}  loss {loss:.4f}  lr {lr:.2e}  {images_per_second:.0f} images/s"
            text = line.format(**entry.to_dict())
            update(done, total, best=text)

        yield report
