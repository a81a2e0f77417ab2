"""gtp-vit reproduce: a table or figure of the paper beside our own values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from gtp_vit import embedded
from gtp_vit.cli import render
from gtp_vit.cli.evaluate import check_readable, check_results_file, write_results
from gtp_vit.cli.flags import parse
from gtp_vit.cli.output import command
from gtp_vit.cli.resume import ResumeFlags, open_journal
from gtp_vit.cli.source import CORES, DataFlags, check_weights, make_dataset, make_model
from gtp_vit.errors import GTPError, Incomplete, check_name
from gtp_vit.inputs.data import batches
from gtp_vit.paper_tables.experiments import COMPUTED, EXPERIMENTS
from gtp_vit.paper_tables.reproduce import Failed, Reproduced, complexity_table, oversmoothing, reproduce
from gtp_vit.runs.files import check_writable
from gtp_vit.runs.journal import Journal
from gtp_vit.show.page import Section, paragraph, table, write_report
from gtp_vit.show.plot import curves


@dataclass(frozen=True)
class Reproduce(ResumeFlags):
    """Print a table or figure of the paper with its printed values, ours, and the deviation.

    GMACs are counted for every cell. Accuracy needs the weights (--pretrained, or files in --weights-dir whose names
    begin with the model's) and ImageNet's images (--data-dir); a cell without a figure says what is missing.

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
    workers: int = CORES
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
        if flags.json:
            render.as_json(titles)
        else:
            render.table("tables and figures", ["name", "what"], [[name, title] for name, title in titles.items()])
        return
    check_name("table or figure", flags.what, titles)
    check_results_file(flags.results_file)
    check_writable(flags.results_file, flags.report)
    if flags.weights_dir is not None and not flags.weights_dir.is_dir():
        raise GTPError(f"there is no folder {flags.weights_dir}; --weights-dir wants one with files of weights")
    with contextlib.ExitStack() as journals:  # kept, all of them, until everything is written
        if flags.what == "figure-complexity":
            found = _complexity()
        elif flags.what == "figure-oversmoothing":
            found = _oversmoothing(flags)
        else:
            found = _cells(flags, journals)
        if flags.json:
            render.as_json(found.records)
        else:
            render.table(titles[flags.what], found.columns, found.rows)
        if flags.results_file is not None:
            write_results(flags.results_file, [{**record, "settings": {}} for record in found.records])
        if flags.report is not None:
            section = Section(titles[flags.what], found.html + table(found.columns, found.rows))
            lead = "Printed values, ours, and the deviation."
            write_report(flags.report, f"GTP-ViT: {titles[flags.what]}", lead, [section], command("reproduce", words))
    failed = [str(figure) for record in found.records for figure in record.values() if isinstance(figure, Failed)]
    if failed:
        raise Incomplete(f"{len(failed)} figures could not be measured; the first: {failed[0]}")
    check_readable(found.unreadable)


@dataclass(frozen=True)
class Found:
    """A table or figure as text for people, and as records for programs."""

    columns: list[str]
    rows: list[list[str]]
    records: list[dict[str, Any]]
    html: str = ""
    unreadable: Sequence[str] = ()


def _cells(flags: Reproduce, journals: contextlib.ExitStack) -> Found:
    def journal_for(model: str, methods: list[str], models: Any, dataset: Any) -> Journal | None:
        if flags.results_file is None:
            return None
        results = flags.results_file.with_name(f"{flags.results_file.name}.{model}")
        settings = {"what": flags.what, "methods": methods, "batch_size": flags.batch_size}
        return journals.enter_context(open_journal(flags, results, model, models, dataset, **settings))

    data = DataFlags(
        model="", data_dir=flags.data_dir, limit=flags.limit, batch_size=flags.batch_size, workers=flags.workers
    )

    def images_for(model: Any) -> Any:
        return make_dataset(data, model)

    with render.progress("reproducing") as progress:
        found, unreadable = reproduce(
            EXPERIMENTS[flags.what].cells(),
            weights=flags.weights_dir,
            pretrained=flags.pretrained,
            images_for=None if flags.data_dir is None else images_for,
            batch_size=flags.batch_size,
            workers=flags.workers,
            journal_for=journal_for,
            progress=progress,
        )
    columns = ["row", "column", "GMACs printed", "GMACs ours", "deviation", "top-1 printed", "top-1 ours", "difference"]
    rows = [_row(cell) for cell in found]
    return Found([*columns, "method"], rows, [_record(cell) for cell in found], _plot(found), unreadable)


def _record(found: Reproduced) -> dict[str, Any]:
    """Numbers as numbers, null where the paper prints none; a text says what is missing."""
    cell = found.cell
    return {
        "model": cell.model,
        "row": cell.row,
        "column": cell.column,
        "gmacs_printed": cell.gmacs,
        "gmacs": found.gmacs,
        "gmacs_deviation": found.gmacs_deviation,
        "top1_printed": cell.top1,
        "top1": found.top1,
        "top1_difference": found.top1_deviation,
        "method": None if cell.method is None else str(cell.method),
    }


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


def _complexity() -> Found:
    printed = {"DeiT-S": (20.1, 28.3), "DeiT-B": (40.5, 57.3)}
    records: list[dict[str, Any]] = []
    for name, gtp, tome, on_keys in complexity_table():
        both = zip(("GTP", "ToMe"), printed[name], (gtp, tome), (None, on_keys), strict=True)
        for method, theirs, ours, really in both:
            record = {"backbone": name, "method": method, "printed": theirs, "by the formula": ours}
            records.append(record | {"deviation": ours / theirs - 1, "on its keys": really})
    columns = list(records[0])
    rows = [
        [
            *(str(record[key]) for key in ("backbone", "method", "printed")),
            f"{record['by the formula']:.1f}",
            f"{record['deviation']:+.1%}",
            "" if record["on its keys"] is None else f"{record['on its keys']:.1f}",
        ]
        for record in records
    ]
    text = (
        "Extra MMACs at 8 tokens a layer. The paper's sum for ToMe takes all channels; ToMe compares keys averaged "
        "over heads, 64 channels of these models, so its real figure is the last column."
    )
    return Found(columns, rows, records, paragraph(text))


def _oversmoothing(flags: Reproduce) -> Found:
    data = DataFlags(
        model=flags.model,
        checkpoint=flags.checkpoint,
        data_dir=flags.data_dir,
        pretrained=flags.pretrained,
        batch_size=flags.batch_size,
        limit=flags.limit,
    )
    check_weights(data)
    model = make_model(data)
    batch = next(batches(make_dataset(data, model), batch_size=flags.batch_size, workers=0))
    check_readable(list(batch.unreadable.values()))
    images = batch.images
    found = oversmoothing(model, images, flags.propagate)
    depth = len(next(iter(found.values())))
    rows = [[str(layer), *(f"{values[layer]:.4f}" for values in found.values())] for layer in range(depth)]
    records = [{"layer": layer} | {name: values[layer] for name, values in found.items()} for layer in range(depth)]
    lines = {name: [(float(layer), value) for layer, value in enumerate(values)] for name, values in found.items()}
    text = f"{flags.model} without finetuning, {len(images)} images; the paper's figure is of finetuned DeiT-S models."
    drawn = curves(lines, "layer", "mean cosine similarity") + paragraph(text)
    return Found(["layer", *found], rows, records, drawn)
