"""The log of a training run as a sentence, a table of its validation passes, and the sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.plot import line_plot
from gtp_vit.report.results import Table


class LogEntry(Protocol):
    """The shown fields of a `training.log.LogEntry`."""

    @property
    def kind(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> float: ...
    @property
    def figures(self) -> dict[str, float]: ...


Entries = Sequence[LogEntry]


def _entries_of_kind(log: Entries, kind: str) -> list[LogEntry]:
    return [entry for entry in log if entry.kind == kind]


def validation_table(log: Entries) -> Table | None:
    """A row for each validation pass; None if there was none."""
    passes = _entries_of_kind(log, "validation")
    if not passes:
        return None
    rows = [[f"{value:.6g}" for value in (entry.step, entry.epoch, *entry.figures.values())] for entry in passes]
    return ["step", "epoch", *passes[0].figures], rows


def training_text(log: Entries) -> str:
    """A summary of the run, in a sentence."""
    steps, passes = _entries_of_kind(log, "step"), _entries_of_kind(log, "validation")
    text = f"{steps[-1].step} steps, loss {steps[-1].figures['loss']:.4f} at the end"
    text += f" and {steps[0].figures['loss']:.4f} at the beginning." if len(steps) > 1 else "."
    if len(passes) > 1:
        first, last = passes[0].figures, passes[-1].figures
        if "top1" in first:
            text += f" Top-1 {first['top1']:.2f} % before, {last['top1']:.2f} % after; "
            text += f"unreduced {last['unreduced_top1']:.2f} %."
        text += f" KL to the unreduced model {first['kl']:.4f} before, {last['kl']:.4f} after."
    return text


def training_sections(log: Entries) -> list[Section]:
    """The curves, and the table of validation passes."""
    steps, passes = _entries_of_kind(log, "step"), _entries_of_kind(log, "validation")

    def plot(entries: Entries, label: str, names: Mapping[str, str]) -> str:
        """A curve for each name, of the figure under its key."""
        series = {name: [(entry.epoch, entry.figures[key]) for entry in entries] for name, key in names.items()}
        return line_plot(series, "epoch", label)

    others = ("lr", "gradient", "images_per_second")
    losses = {key: key for key in steps[0].figures if key not in others}
    sections = [Section("Loss", plot(steps, "loss", losses))]
    for key, label in (("top1", "top-1, %"), ("agreement", "agreement with the unreduced model, %"), ("kl", "KL")):
        if passes and key in passes[0].figures:
            names = {key: key} | ({"unreduced": "unreduced_top1"} if key == "top1" else {})
            sections.append(Section(label, plot(passes, label, names)))
    validations = validation_table(log)
    if validations is not None:
        sections.append(Section("Validation", table(*validations)))
    speed = sorted(entry.figures["images_per_second"] for entry in steps)[len(steps) // 2]
    sections.append(Section("Learning rate", plot(steps, "highest learning rate", {"lr": "lr"})))
    text = f"{speed:.1f} images a second, median over the lines of the log."
    sections.append(Section("Throughput", paragraph(text)))
    return sections
