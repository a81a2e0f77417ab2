"""gtp-vit evaluate: what a method does to the accuracy of a model, on your images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import exported_file_of, flags_of_source, images_for_file
from gtp_vit.cli.flags import MethodChoice, MethodFlags, parse_with_method
from gtp_vit.cli.measure_flags import MeasureFlags, measure_flags, measure_of_flags, with_flags
from gtp_vit.cli.model_flags import DataFlags, check_weights, data_settings, make_dataset, make_model
from gtp_vit.cli.output import (
    OutputFlags,
    ResumeFlags,
    check_complete,
    check_results_file,
    model_columns,
    open_journal,
    print_result,
    write_page,
)
from gtp_vit.data.items import Item
from gtp_vit.data.loader import take_images
from gtp_vit.engines import is_exported
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.errors import GTPError, plural
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.patching import patch, tower_of
from gtp_vit.profiling.macs import macs
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.results import write_results
from gtp_vit.report.scores import explain_scores, score_row, score_table
from gtp_vit.runs import distributed
from gtp_vit.runs.files import check_writable


@dataclass(frozen=True)
class Evaluate(OutputFlags, MethodFlags, MeasureFlags, ResumeFlags, DataFlags):
    """Compare a reduced model with the unreduced one on your images, by the measure for its kind of output.

    Classes: top-1 and top-5 accuracy, agreement and KL divergence. Embeddings (CLIP, DINOv2, any model without a
    classifier): cosines, whether images keep their nearest neighbours, k-NN accuracy. Differences have paired 95 %
    intervals. An interrupted run resumes when it is started again with the same --results-file, also with a different
    number of processes; if weights, images or settings differ it is refused.

    A file that gtp-vit export has written is run in its engine, and compared with the float model that it
    was made from.

    examples:
      gtp-vit evaluate
      gtp-vit evaluate vit_tiny_patch16_224 --pretrained --data-dir imagenet/val --results-file gtp_plus.csv
      gtp-vit evaluate deit_tiny_patch16_224 --checkpoint deit.safetensors --data-dir val --method tome --r 14
      gtp-vit evaluate vit_small_patch14_dinov2 --pretrained --data-dir images
      gtp-vit evaluate vit_tiny_patch16_224 --pretrained --data-dir images --measure dense
      gtp-vit evaluate out/vit_tiny_patch16_224-gtp_plus-int8.xml --data-dir imagenet/val
      torchrun --nproc-per-node 4 -m gtp_vit.cli.app evaluate vit_tiny_patch16_224 --pretrained --data-dir imagenet/val
    """

    results_file: Path | None = None
    """Write the figures here: .csv with timm's columns and ours, or .json."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(with_flags(Evaluate, measure_flags()), arguments)
    file = None
    if is_exported(flags.model):
        file = exported_file_of(flags, chosen, arguments)
        flags = flags_of_source(flags, file)
    check_weights(flags)
    check_results_file(flags.results_file)
    with distributed.process_group():
        _evaluate(flags, chosen, arguments, file)


def _evaluate(flags: Evaluate, choice: MethodChoice, arguments: Sequence[str], file: ExportedFile | None) -> None:
    """Evaluate in all processes; only the first one writes and prints."""
    if distributed.is_rank_zero():
        check_writable(flags.results_file, flags.html)
    model = make_model(flags)
    measure = measure_of_flags(flags, model)
    if file is not None and measure.restores:
        raise GTPError(f"{file.name} returns what its model returns; dense features are measured in torch")
    labels, read = measure.needs_labels, data_settings(flags)
    if file is None:
        dataset = make_dataset(flags, model, labels=labels)
        method = choice.for_model(model)
        fast = patch(model, method, restore=measure.restores)
        name, title, own, cost = method.name, str(method), method.to_dict(), _cost(fast, dataset)
    else:
        file.check_model(model)
        fast = file.load(flags.threads)
        dataset = images_for_file(flags, file, labels=labels, model=model)
        preprocessing = file.metadata.preprocessing
        crop, how = read.crop_pct or preprocessing.crop_pct, read.interpolation or preprocessing.interpolation or ""
        read = dataclasses.replace(read, crop_pct=crop, interpolation=how)
        name, title, own, cost = file.name, file.name, file.settings(), file.metadata.exported_macs
    models = {UNREDUCED: model, name: fast}
    settings = {"methods": {name: own}, "batch_size": flags.batch_size, **measure.settings()}
    reading: dict[str, Any] = {"batch_size": flags.batch_size, "workers": flags.workers, "measure": measure}
    with open_journal(flags, flags.results_file, flags.model, models, dataset, **settings) as journal:
        if not distributed.is_rank_zero():
            evaluate(models, dataset, **reading)
            return
        costs = {UNREDUCED: macs(model).total, name: cost}
        with render.progress("evaluating") as progress:
            evaluation = evaluate(models, dataset, **reading, journal=journal, progress=progress)
        stored = {UNREDUCED: {}, name: own}
        rows = [
            score_row(model_columns(flags.model, model, read), evaluation, model_name, costs[model_name])
            | {"settings": stored[model_name]}
            for model_name in models
        ]
        if flags.results_file is not None:
            write_results(flags.results_file, rows)
        columns, cells = score_table(evaluation, costs)
        text, title = explain_scores(evaluation), f"{flags.model} with {title}"
        sections = [Section("Figures", table(columns, cells) + paragraph(text))]
        write_page(
            flags, arguments, flags.html, title, f"{plural(evaluation.scores[0].images, 'image', 'images')}.", sections
        )
    result = {"flags": flags, "rows": rows, "unreadable": evaluation.unreadable}
    print_result(flags, result, (title, columns, cells), text=text)
    check_complete(evaluation)


def _cost(fast: nn.Module, dataset: Dataset[Item]) -> int:
    """MACs of a patched model; of one that keeps a different number of tokens in each image, the mean over some."""
    return macs(fast, images=take_images(dataset, 64, fast) if tower_of(fast).reducer.adaptive else None).total
