"""gtp-vit reproduce: a table or figure of the paper beside our own values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from gtp_vit import embedded
from gtp_vit.cli import render
from gtp_vit.cli.evaluate import write_results
from gtp_vit.cli.flags import parse
from gtp_vit.cli.output import command
from gtp_vit.cli.source import DataFlags, make_dataset, make_model
from gtp_vit.errors import GTPError, check_name
from gtp_vit.tools.data import batches
from gtp_vit.tools.experiments import COMPUTED, EXPERIMENTS
from gtp_vit.tools.plot import curves
from gtp_vit.tools.report import Section, paragraph, table, write_report
from gtp_vit.tools.reproduce import Reproduced, complexity_table, oversmoothing, reproduce


@dataclass(frozen=True)
class Reproduce:
    """Print a table or figure of the paper with its printed values, ours, and the deviation.

    GMACs are counted for every cell. Accuracy needs the weights (--pretrained, or files in --weights-dir whose names
    begin with the model's) and ImageNet's images (--data-dir); a cell that cannot be had says what is missing.

    examples:
      gtp-vit reproduce                        lists what there is
      gtp-vit reproduce main
      gtp-vit reproduce graph-type --pretrained --data-dir imagenet/val --report graphs.html
      gtp-vit reproduce figure-oversmoothing --model vit_tiny_patch16_224 --checkpoint vit.safetensors --data-dir val
    """

    what: tyro.conf.Positional[str] = ""
    """Name of a table or figure."""
    weights_dir: Path | None = None
    """Folder with files of weights."""
    pretrained: bool = False
    """Download timm's weights."""
    data_dir: Path | None = None
    """ImageNet's validation images, one folder for each class."""
    batch_size: int = 64
    """Images in a batch."""
    workers: int = 2
    """Processes that read images."""
    limit: int = 0
    """Only the first so many images; 0 = all."""
    model: str = embedded.NAME
    """Of figure-oversmoothing: which model."""
    checkpoint: Path | None = None
    """Of figure-oversmoothing: its weights."""
    propagate: int = 14
    """Of figure-oversmoothing: tokens removed in each layer."""
    results_file: Path | None = None
    """Write the cells here, .csv or .json."""
    report: Path | None = None
    """Write an HTML page here."""
    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> None:
    flags = parse(Reproduce, words)
    titles = {**{name: experiment.title for name, experiment in EXPERIMENTS.items()}, **COMPUTED}
    if not flags.what:
        render.table("tables and figures", ["name", "what"], [[name, title] for name, title in titles.items()])
        return
    check_name("table or figure", flags.what, titles)
    if flags.what == "figure-complexity":
        columns, rows, html = _complexity()
    elif flags.what == "figure-oversmoothing":
        columns, rows, html = _oversmoothing(flags)
    else:
        columns, rows, html = _cells(flags)
    if flags.results_file is not None:
        stored = [{**dict(zip(columns, row, strict=True)), "settings": {}} for row in rows]
        write_results(flags.results_file, stored)
    if flags.report is not None:
        section = Section(titles[flags.what], html + table(columns, rows))
        lead = "Printed values, ours, and the deviation."
        write_report(flags.report, f"GTP-ViT: {titles[flags.what]}", lead, [section], command("reproduce", words))
    if flags.json:
        render.as_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        render.table(titles[flags.what], columns, rows)


def _cells(flags: Reproduce) -> tuple[list[str], list[list[str]], str]:
    def images_for(model: Any) -> Any:
        data = DataFlags(model="", data_dir=flags.data_dir, limit=flags.limit)
        return make_dataset(data, model)

    with render.progress("reproducing") as progress:
        found = reproduce(
            EXPERIMENTS[flags.what].cells(),
            weights=flags.weights_dir,
            pretrained=flags.pretrained,
            images_for=None if flags.data_dir is None else images_for,
            batch_size=flags.batch_size,
            workers=flags.workers,
            progress=progress,
        )
    columns = ["row", "column", "GMACs printed", "GMACs ours", "deviation", "top-1 printed", "top-1 ours", "difference"]
    return [*columns, "method"], [_row(cell) for cell in found], _plot(found)


def _row(found: Reproduced) -> list[str]:
    cell = found.cell
    return [
        cell.row,
        cell.column,
        "not printed" if cell.gmacs is None else f"{cell.gmacs:.1f}",
        found.gmacs if isinstance(found.gmacs, str) else f"{found.gmacs:.3f}",
        "" if found.gmacs_deviation is None else f"{found.gmacs_deviation:+.1%}",
        "not printed" if cell.top1 is None else f"{cell.top1:.1f}",
        found.top1 if isinstance(found.top1, str) else f"{found.top1:.2f}",
        "" if found.top1_deviation is None else f"{found.top1_deviation:+.2f}",
        "unreduced" if cell.method is None else str(cell.method),
    ]


def _plot(found: Sequence[Reproduced]) -> str:
    """Accuracy over GMACs, printed and ours, as far as they are there."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        if isinstance(one.gmacs, str):
            continue
        if one.cell.top1 is not None:
            lines.setdefault(f"{one.cell.row}, printed", []).append((one.gmacs, one.cell.top1))
        if not isinstance(one.top1, str):
            lines.setdefault(f"{one.cell.row}, ours", []).append((one.gmacs, one.top1))
    return curves(lines, "GMACs", "top-1 accuracy, %") if lines and len(lines) <= 20 else ""


def _complexity() -> tuple[list[str], list[list[str]], str]:
    printed = {"DeiT-S": (20.1, 28.3), "DeiT-B": (40.5, 57.3)}
    rows = [
        [name, f"{printed[name][0]}", f"{gtp:.1f}", f"{printed[name][1]}", f"{tome:.1f}", f"{really:.1f}"]
        for name, gtp, tome, really in complexity_table()
    ]
    columns = [
        "backbone",
        "GTP printed",
        "GTP by the formula",
        "ToMe printed",
        "ToMe by the formula",
        "ToMe on its keys",
    ]
    text = (
        "Extra MMACs at 8 tokens a layer. The paper's sum for ToMe takes all channels; ToMe compares keys averaged "
        "over heads, 64 channels of these models, so its real figure is the last column."
    )
    return columns, rows, paragraph(text)


def _oversmoothing(flags: Reproduce) -> tuple[list[str], list[list[str]], str]:
    data = DataFlags(
        model=flags.model, checkpoint=flags.checkpoint, data_dir=flags.data_dir, pretrained=flags.pretrained
    )
    if flags.model != embedded.NAME and flags.checkpoint is None and not flags.pretrained:
        raise GTPError(f"{flags.model} has random weights; give --pretrained or --checkpoint FILE")
    model = make_model(data)
    images = next(batches(make_dataset(data, model), batch_size=flags.batch_size, workers=0)).images
    found = oversmoothing(model, images, flags.propagate)
    depth = len(next(iter(found.values())))
    rows = [[str(layer), *(f"{values[layer]:.4f}" for values in found.values())] for layer in range(depth)]
    lines = {name: [(float(layer), value) for layer, value in enumerate(values)] for name, values in found.items()}
    text = f"{flags.model} without finetuning, {len(images)} images; the paper's figure is of finetuned DeiT-S models."
    return ["layer", *found], rows, curves(lines, "layer", "mean cosine similarity") + paragraph(text)
