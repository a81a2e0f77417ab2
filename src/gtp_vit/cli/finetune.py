"""gtp-vit finetune: train a model with the reduction active, alone or on many machines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from gtp_vit import embedded
from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.output import command
from gtp_vit.cli.source import DataFlags, check_weights, make_model
from gtp_vit.errors import GTPError, Unreadable, check_range
from gtp_vit.inputs.data import DataSettings, InMemory, open_images
from gtp_vit.inputs.idx import has_idx
from gtp_vit.runs import distributed
from gtp_vit.show.page import Section, paragraph, table, write_report
from gtp_vit.show.plot import curves
from gtp_vit.training.checkpoint import WEIGHTS
from gtp_vit.training.data import open_training_images
from gtp_vit.training.loop import Finetuned, finetune
from gtp_vit.training.settings import Training


@dataclass(frozen=True)
class Finetune(Training, DataFlags):
    """Finetune a model with a method active; the defaults of training are the paper's recipe, whose method is gtp.

    Without labels (--no-labels) it learns from the unreduced model. A run that was stopped resumes when the same
    command is started again, bit for bit, and with any number of processes that fits.

    examples:
      gtp-vit finetune deit_small_patch16_224 --pretrained --data-dir imagenet --method gtp --propagate 14 --output out
      gtp-vit finetune vit_tiny_patch16_224 --pretrained --data-dir calibration --no-labels --method tome --r 14
      torchrun --nproc-per-node 4 -m gtp_vit.cli.app finetune deit_small_patch16_224 --pretrained --data-dir imagenet
    """

    method: str = "gtp_plus"
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does."""
    split: str = "train"
    """Split of the data set to learn from."""
    val_dir: Path | None = None
    """Folder of images to evaluate on after each epoch; by default the split --val-split of --data-dir."""
    val_split: str = "validation"
    """Split to evaluate on, where the data has splits."""
    limit: int = 0
    """Learn from this many images only, spread over the data set; 0 = all."""
    val_limit: int = 0
    """Evaluate on this many images only, spread over the data set; 0 = all."""
    device: str = "auto"
    """cpu, cuda, or auto: an accelerator for each process if there is one."""
    output: Path = Path("finetuned")
    """Folder for the weights, what is needed to resume, the log, and a page with the curves."""
    restart: bool = False
    """Begin anew where an earlier run was stopped, instead of resuming it."""
    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Finetune, words)
    check_weights(flags)
    settings = Training(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Training)})
    settings.check()
    check_range("--workers", flags.workers, 0, 256, whole=True)
    check_range("--limit", flags.limit, 0, 10**9, whole=True)
    check_range("--val-limit", flags.val_limit, 0, 10**9, whole=True)
    with distributed.group():
        model = make_model(flags)
        method = chosen.for_model(model)
        dataset, validation = make_datasets(flags, settings, model)
        with _progress() as progress:
            found = finetune(
                model,
                method,
                dataset,
                settings,
                output=flags.output,
                validation=validation,
                workers=flags.workers,
                name=flags.model,
                restart=flags.restart,
                progress=progress,
            )
        unreadable = sorted(set(itertools.chain(*distributed.gather(found.unreadable))))
        if not distributed.is_first():
            return
        title = f"{flags.model} with {method}"
        write_report(flags.output / "report.html", title, lead(found), sections(found), command("finetune", words))
        if flags.json:
            render.as_json({"flags": flags, "log": found.log, "unreadable": unreadable})
        else:
            if found.figures():
                render.table(title, *figure_table(found))
            render.say(f"{lead(found)} Written: {flags.output / WEIGHTS}, the log and report.html beside it.")
        if unreadable:
            raise Unreadable(f"{len(unreadable)} of the images could not be read and were left out: {unreadable[0]}")


def make_datasets(flags: Finetune, settings: Training, model: Any) -> tuple[Any, Any]:
    """Images to learn from, and images to evaluate on if there are any."""
    if flags.data_dir is None and not flags.dataset:
        if flags.model != embedded.NAME:
            raise GTPError(f"{flags.model} needs images: give --data-dir, a folder with one folder for each class")
        images, labels = embedded.test_images()  # a demonstration: three quarters to learn from
        cut = 3 * len(images) // 4
        images = embedded.normalise(images)
        return InMemory(images[:cut], labels[:cut]), InMemory(images[cut:], labels[cut:])
    folder = flags.data_dir
    if folder is not None and has_split(folder, *EVALUATION) and not has_split(folder, flags.split, *TRAINING):
        raise GTPError(
            f"{folder} has images to evaluate on, but no folder {flags.split} to learn from; give another --split"
        )
    dataset = open_training_images(model, data_settings(flags, flags.data_dir, flags.split), settings)
    validation = open_validation(flags, model)
    return some_of(dataset, flags.limit), None if validation is None else some_of(validation, flags.val_limit)


def some_of(dataset: Any, limit: int) -> Any:
    """Some of the images of all classes, by which data sets are sorted."""
    if not limit or not hasattr(dataset, "__len__") or limit >= len(dataset):
        return dataset
    return Subset(dataset, [index * len(dataset) // limit for index in range(limit)])


def open_validation(flags: Finetune, model: Any) -> Any:
    """None if the data has no split of its own for that: images that were learned from prove nothing."""
    folder = flags.val_dir or flags.data_dir
    if flags.val_dir is None and not flags.dataset and folder is not None:
        if not has_idx(folder) and not has_split(folder, flags.val_split, *EVALUATION):
            return None
    return open_images(model, data_settings(flags, folder, flags.val_split))


def data_settings(flags: Finetune, folder: Path | None, split: str) -> DataSettings:
    return DataSettings(
        data_dir=folder or Path(),
        dataset=flags.dataset,
        split=split,
        img_size=flags.img_size,
        crop_pct=flags.crop_pct,
        interpolation=flags.interpolation,
        labels=flags.labels,
    )


TRAINING, EVALUATION = ("train", "training"), ("val", "valid", "validation", "eval", "evaluation")  # as timm has them


def has_split(folder: Path, *names: str) -> bool:
    return any((folder / name).is_dir() for name in names)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with the time that is left, in the first process."""
    if not distributed.is_first():
        yield None
        return
    with render.progress("finetuning", "{task.fields[best]}") as update:

        def report(done: int, total: int, entry: Any) -> None:
            text = "epoch {epoch:.2f}  loss {loss:.4f}  lr {lr:.2e}  {images_per_second:.0f} images/s".format(**entry)
            update(done, total, best=text)

        yield report


def figure_table(found: Finetuned) -> tuple[list[str], list[list[str]]]:
    """A row for each validation pass."""
    columns = [key for key in found.figures()[0] if key != "kind"]
    return columns, [[f"{entry[key]:.6g}" for key in columns] for entry in found.figures()]


def lead(found: Finetuned) -> str:
    """What the run did, in a sentence."""
    steps = [entry for entry in found.log if entry["kind"] == "step"]
    text = f"{steps[-1]['step']} steps, loss {steps[-1]['loss']:.4f} at the end"
    text += f" and {steps[0]['loss']:.4f} at the beginning." if len(steps) > 1 else "."
    passes = found.figures()
    if len(passes) > 1 and "top1" in passes[0]:
        first, last = passes[0], passes[-1]
        text += f" Top-1 {first['top1']:.2f} % before, {last['top1']:.2f} % after; "
        text += f"unreduced {last['unreduced_top1']:.2f} %."
    if len(passes) > 1:
        text += f" KL to the unreduced model {passes[0]['kl']:.4f} before, {passes[-1]['kl']:.4f} after."
    return text


def sections(found: Finetuned) -> list[Section]:
    """The curves, and the table of validation passes."""
    steps = [entry for entry in found.log if entry["kind"] == "step"]
    skip = ("kind", "step", "epoch", "lr", "gradient", "images_per_second")
    losses = {key: [(entry["epoch"], entry[key]) for entry in steps] for key in steps[0] if key not in skip}
    made = [Section("Loss", curves(losses, "epoch", "loss"))]
    passes = found.figures()
    if passes:
        for key, text in (("top1", "top-1, %"), ("agreement", "agreement with the unreduced model, %"), ("kl", "KL")):
            if key in passes[0]:
                series = {key: [(entry["epoch"], entry[key]) for entry in passes]}
                if key == "top1":
                    series["unreduced"] = [(entry["epoch"], entry["unreduced_top1"]) for entry in passes]
                made.append(Section(text, curves(series, "epoch", text)))
        made.append(Section("Validation", table(*figure_table(found))))
    rate = {"lr": [(entry["epoch"], entry["lr"]) for entry in steps]}
    speed = sorted(entry["images_per_second"] for entry in steps)[len(steps) // 2]
    made.append(Section("Learning rate", curves(rate, "epoch", "highest learning rate")))
    made.append(Section("Throughput", paragraph(f"{speed:.1f} images a second, median over the lines of the log.")))
    return made
