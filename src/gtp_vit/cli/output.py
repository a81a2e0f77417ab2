"""Output of commands: tables or JSON, a page beside it, files to resume from, an error if something is missing."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from gtp_vit.cli import render
from gtp_vit.cli.help import program_of
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.open import DataSettings
from gtp_vit.errors import GTPError, IncompleteError, UnreadableImagesError
from gtp_vit.jsonable import jsonable
from gtp_vit.metrics.evaluate import Evaluation
from gtp_vit.patching import host_of
from gtp_vit.profiling.environment import commit, environment
from gtp_vit.report.page import Section, table, write_report
from gtp_vit.report.scores import ModelColumns
from gtp_vit.runs import distributed
from gtp_vit.runs.identity import run_identity
from gtp_vit.runs.journal import Journal

# Endings of files that commands write; no folder is meant by such a name.
FILE_ENDINGS = (".onnx", ".xml", ".safetensors", ".parquet", ".pt", ".pth", ".png", ".html", ".csv", ".json")


@dataclass(frozen=True)
class JsonFlags:
    """The flag for JSON output."""

    GROUP: ClassVar[str] = "output"
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class OutputFlags(JsonFlags):
    """Where the answer goes."""

    html: Path | None = None
    """Write an HTML page here."""


@dataclass(frozen=True)
class ResumeFlags:
    """Whether to use the journal of an earlier run."""

    restart: bool = False
    """Discard what an interrupted run has finished, and start over instead of resuming it."""


def print_table_result(
    flags: OutputFlags,
    arguments: Sequence[str],
    title: str,
    columns: list[str],
    rows: list[list[str]],
    result: object = None,
) -> None:
    """Answer with one table, or `result` as JSON (the table's rows if None), and write the page if one is wanted."""
    write_page(flags, arguments, flags.html, title, "", [Section("Found", table(columns, rows))])
    result = [dict(zip(columns, row, strict=True)) for row in rows] if result is None else result
    print_result(flags, result, (title, columns, rows))


def print_result(
    flags: JsonFlags, result: object, *tables: tuple[str, Sequence[str], Sequence[Sequence[str]]], text: str = ""
) -> None:
    """Print the result as JSON if the flags want that, else tables (title, columns, rows) and the text below them."""
    if flags.json:
        render.print_json(result)
        return
    for columns_and_rows in tables:
        render.print_table(*columns_and_rows)
    if text:
        render.print_text(text)


def model_columns(name: str, model: nn.Module, settings: DataSettings) -> ModelColumns:
    """Columns of a results file about a model and its image preprocessing."""
    inputs = host_of(model).inputs
    prepared = inputs.preprocessing or {}
    return ModelColumns(
        model=name,
        param_count=round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        img_size=settings.img_size or inputs.size[-1],
        crop_pct=settings.crop_pct or prepared.get("crop_pct", ""),
        interpolation=settings.interpolation or prepared.get("interpolation", ""),
        orientation="as stored" if settings.ignore_exif else "as EXIF says",
    )


def write_page(
    flags: object, arguments: Sequence[str], path: Path | None, title: str, lead: str, sections: Sequence[Section]
) -> None:
    """Write a page, with the command as it was typed, unless there is no path."""
    if path is not None:
        command = f"{program_of(type(flags))} {shlex.join(arguments)}".rstrip()
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        origin = {"command": command, "date": date, "commit": commit(), **dataclasses.asdict(environment())}
        write_report(path, title, lead, sections, origin)


def check_is_folder(output: Path) -> None:
    """Refuse an --output that is named as a file: a folder of that name would be made."""
    if output.suffix.lower() in FILE_ENDINGS and not output.is_dir():
        raise GTPError(f"--output is {output}, and it is a folder that is wanted, e.g. {output.with_suffix('')}")


def check_results_file(path: Path | None) -> None:
    """Refuse names whose ending does not say what to write."""
    if path is not None and path.suffix not in (".csv", ".json"):
        raise GTPError(f"--results-file is {path}; its name must end in .csv or .json")


def check_complete(evaluation: Evaluation) -> None:
    """Let the exit code say that something was left out, or is no number."""
    if evaluation.not_finite():
        more = f"; {len(evaluation.unreadable)} of the images could not be read" if evaluation.unreadable else ""
        raise IncompleteError(f"{'; '.join(evaluation.not_finite())}{more}")
    check_readable(evaluation.unreadable)


def check_readable(unreadable: Sequence[str]) -> None:
    """Let the exit code say that images were left out."""
    if unreadable:
        names = "; ".join(unreadable[:5])
        raise UnreadableImagesError(f"{len(unreadable)} of the images could not be read and were left out: {names}")


def open_journal(
    flags: ResumeFlags,
    results: Path | None,
    name: str,
    models: Mapping[str, nn.Module] | nn.Module,
    dataset: object,
    **settings: object,
) -> AbstractContextManager[Journal | None]:
    """The journal beside a file of results, opened by the first process.

    All processes call this, and are refused if they were started with different weights, images or settings. Runs over
    images in memory take seconds and need no journal.
    """
    needed = results is not None and not isinstance(dataset, InMemoryDataset)
    if not needed and distributed.rank_and_world_size()[1] == 1:
        return nullcontext()
    run = run_identity(name, models, dataset, **jsonable(settings)).to_dict()
    distributed.check_same_on_all_ranks("weights, images or settings", run)
    if results is None or not needed or not distributed.is_rank_zero():
        return nullcontext()
    journal = Journal(results.with_name(f"{results.name}.journal"), run, restart=flags.restart)
    if journal.damage_report:
        print(f"gtp-vit: {journal.damage_report}", file=sys.stderr)
    return journal
