"""learning: the log of a training run as a sentence, a table of its validation passes, and the sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.plot import curves
from gtp_vit.report.results import Table

Entries = Sequence[Mapping[str, Any]]


def _of_kind(log: Entries, kind: str) -> list[Mapping[str, Any]]:
    return [entry for entry in log if entry["kind"] == kind]


def validation_table(log: Entries) -> Table | None:
    """A row for each validation pass; None if there was none."""
    passes = _of_kind(log, "validation")
    columns = [key for key in passes[0] if key != "kind"] if passes else []
    return (columns, [[f"{entry[key]:.6g}" for key in columns] for entry in passes]) if passes else None


def training_text(log: Entries) -> str:
    """What the run did, in a sentence."""
    steps, passes = _of_kind(log, "step"), _of_kind(log, "validation")
    text = f"{steps[-1]['step']} steps, loss {steps[-1]['loss']:.4f} at the end"
    text += f" and {steps[0]['loss']:.4f} at the beginning." if len(steps) > 1 else "."
    if len(passes) > 1 and "top1" in passes[0]:
        first, last = passes[0], passes[-1]
        text += f" Top-1 {first['top1']:.2f} % before, {last['top1']:.2f} % after; "
        text += f"unreduced {last['unreduced_top1']:.2f} %."
    if len(passes) > 1:
        text += f" KL to the unreduced model {passes[0]['kl']:.4f} before, {passes[-1]['kl']:.4f} after."
    return text


def training_sections(log: Entries) -> list[Section]:
    """The curves, and the table of validation passes."""
    steps, passes = _of_kind(log, "step"), _of_kind(log, "validation")

    def plot(entries: Entries, label: str, names: Mapping[str, str]) -> str:
        """A curve for each name, of the figure under its key."""
        series = {name: [(entry["epoch"], entry[key]) for entry in entries] for name, key in names.items()}
        return curves(series, "epoch", label)

    others = ("kind", "step", "epoch", "lr", "gradient", "images_per_second")
    made = [Section("Loss", plot(steps, "loss", {key: key for key in steps[0] if key not in others}))]
    for key, label in (("top1", "top-1, %"), ("agreement", "agreement with the unreduced model, %"), ("kl", "KL")):
        if passes and key in passes[0]:
            names = {key: key} | ({"unreduced": "unreduced_top1"} if key == "top1" else {})
            made.append(Section(label, plot(passes, label, names)))
    found = validation_table(log)
    if found is not None:
        made.append(Section("Validation", table(*found)))
    speed = sorted(entry["images_per_second"] for entry in steps)[len(steps) // 2]
    made.append(Section("Learning rate", plot(steps, "highest learning rate", {"lr": "lr"})))
    made.append(Section("Throughput", paragraph(f"{speed:.1f} images a second, median over the lines of the log.")))
    return made
