"""python -m reproduction: a table or figure of the paper beside our own values."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from gtp_vit.cli import render
from gtp_vit.cli.app import exit_code
from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.model_flags import NUM_CORES, DataFlags, check_weights, make_dataset, make_model
from gtp_vit.cli.output import (
    OutputFlags,
    ResumeFlags,
    check_readable,
    check_results_file,
    open_journal,
    print_result,
    write_page,
)
from gtp_vit.cli.parser import Positional
from gtp_vit.core.ranges import Range
from gtp_vit.data.loader import batches
from gtp_vit.errors import GTPError, IncompleteError, check_name
from gtp_vit.models import bundled
from gtp_vit.report.page import Section, table
from gtp_vit.report.results import write_results
from gtp_vit.runs.files import check_writable
from gtp_vit.runs.journal import Journal
from reproduction.experiments import COMPUTED, EXPERIMENTS
from reproduction.measure import Failed, Inputs, oversmoothing, reproduce
from reproduction.report import Reproduction, show_cells, show_complexity, show_oversmoothing


@dataclass(frozen=True)
class Reproduce(OutputFlags, ResumeFlags):
    """Print a table or figure of the paper with its printed values, ours, and the deviation.

    GMACs are counted for every cell. Accuracy needs the weights (--pretrained, or files in --weights-dir whose names
    begin with the model's) and ImageNet's images (--data-dir); a cell without a figure says what is missing.

    examples:
      python -m reproduction                        lists what there is
      python -m reproduction main
      python -m reproduction graph-type --pretrained --data-dir imagenet/val --html graphs.html
      python -m reproduction figure-oversmoothing --model vit_tiny_patch16_224 --pretrained --data-dir val
    """

    PROGRAM: ClassVar = "python -m reproduction"
    what: Positional[str] = ""
    """Name of a table or figure."""
    weights_dir: Path | None = None
    """Folder with files of weights."""
    pretrained: bool = False
    """Download timm's weights."""
    data_dir: Path | None = None
    """ImageNet's validation images, one folder for each class."""
    batch_size: Annotated[int, Range(1, 65536)] = 64
    """Images in a batch."""
    workers: Annotated[int, Range(0, 256)] = NUM_CORES
    """Processes that read images."""
    limit: Annotated[int, Range(0, 10**9)] = 0
    """Only the first images, at most this many; 0 = all."""
    ignore_exif: bool = True
    """Take pictures as they are stored, as the paper's figures were measured; other commands turn them upright."""
    model: str = bundled.NAME
    """Model of figure-oversmoothing."""
    checkpoint: Path | None = None
    """File of weights for figure-oversmoothing."""
    propagate: int = 14
    """Tokens removed in each layer, of figure-oversmoothing."""
    results_file: Path | None = None
    """Write the cells here, .csv or .json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one table or figure; returns the exit code, as those of gtp-vit are."""
    return exit_code(_run, sys.argv[1:] if arguments is None else arguments, lambda: "--results-file")


def _run(words: Sequence[str]) -> None:
    flags = parse_flags(Reproduce, words)
    titles = {**{name: experiment.title for name, experiment in EXPERIMENTS.items()}, **COMPUTED}
    if not flags.what:
        print_result(flags, titles, ("tables and figures", ["name", "what"], [list(pair) for pair in titles.items()]))
        return
    check_name("table or figure", flags.what, titles)
    check_results_file(flags.results_file)
    check_writable(flags.results_file, flags.html)
    if flags.weights_dir is not None and not flags.weights_dir.is_dir():
        raise GTPError(f"there is no folder {flags.weights_dir}; --weights-dir wants one with files of weights")
    with contextlib.ExitStack() as journals:  # all are kept until everything is written
        if flags.what == "figure-complexity":
            found = show_complexity()
        elif flags.what == "figure-oversmoothing":
            found = _oversmoothing(flags)
        else:
            found = _measured_cells(flags, journals)
        print_result(flags, found.records, (titles[flags.what], found.columns, found.rows))
        if flags.results_file is not None:
            write_results(flags.results_file, [{**record, "settings": {}} for record in found.records])
        section = Section(titles[flags.what], found.html + table(found.columns, found.rows))
        title, lead = f"GTP-ViT: {titles[flags.what]}", "Printed values, ours, and the deviation."
        write_page(flags, words, flags.html, title, lead, [section])
    failed = [str(figure) for record in found.records for figure in record.values() if isinstance(figure, Failed)]
    if failed:
        raise IncompleteError(f"{len(failed)} figures could not be measured; the first: {failed[0]}")
    check_readable(found.unreadable)


def _measured_cells(flags: Reproduce, journals: contextlib.ExitStack) -> Reproduction:
    def journal_for(model: str, methods: list[str], models: Any, dataset: Any) -> Journal | None:
        if flags.results_file is None:
            return None
        results = flags.results_file.with_name(f"{flags.results_file.name}.{model}")
        settings = {"what": flags.what, "methods": methods, "batch_size": flags.batch_size}
        return journals.enter_context(open_journal(flags, results, model, models, dataset, **settings))

    with render.progress("reproducing") as progress:
        found, unreadable = reproduce(
            EXPERIMENTS[flags.what].cells,
            Inputs(
                weights=flags.weights_dir,
                pretrained=flags.pretrained,
                images_for=None if flags.data_dir is None else functools.partial(make_dataset, _data_flags(flags)),
                batch_size=flags.batch_size,
                workers=flags.workers,
                journal_for=journal_for,
            ),
            progress,
        )
    return show_cells(found, unreadable)


def _oversmoothing(flags: Reproduce) -> Reproduction:
    data = _data_flags(flags)
    check_weights(data)
    model = make_model(data)
    batch = next(batches(make_dataset(data, model), batch_size=flags.batch_size, workers=0))
    check_readable(list(batch.unreadable.values()))
    found = oversmoothing(model, batch.images, flags.propagate)
    return show_oversmoothing(found, flags.model, len(batch.images))


def _data_flags(flags: Reproduce) -> DataFlags:
    """The flags that other commands have for models and images."""
    return DataFlags(
        model=flags.model,
        checkpoint=flags.checkpoint,
        pretrained=flags.pretrained,
        data_dir=flags.data_dir,
        ignore_exif=flags.ignore_exif,
        limit=flags.limit,
        batch_size=flags.batch_size,
        workers=flags.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
