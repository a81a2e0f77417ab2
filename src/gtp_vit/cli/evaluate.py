"""gtp-vit evaluate: what a method does to the accuracy of a model, on your images."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.cli import render
from gtp_vit.cli.flags import Chosen, parse_with_method
from gtp_vit.cli.output import command
from gtp_vit.cli.resume import ResumeFlags, open_journal
from gtp_vit.cli.source import DataFlags, check_weights, make_dataset, make_model
from gtp_vit.errors import GTPError, Incomplete, Unreadable
from gtp_vit.inputs.data import first_images
from gtp_vit.measure.class_output import check_class_output
from gtp_vit.measure.evaluate import UNREDUCED, Evaluation, Interval, Score, evaluate
from gtp_vit.measure.macs import macs
from gtp_vit.patch import host_of, patch
from gtp_vit.runs import distributed
from gtp_vit.runs.files import check_writable, write_atomically
from gtp_vit.show.page import Section, paragraph, table, write_report


@dataclass(frozen=True)
class Evaluate(ResumeFlags, DataFlags):
    """Top-1 and top-5 accuracy of a reduced model, its agreement with and KL divergence to the unreduced one.

    Differences have paired 95 % intervals. An interrupted run resumes when it is started again with the same
    --results-file, also with a different number of processes; if weights, images or settings differ it is refused.

    examples:
      gtp-vit evaluate
      gtp-vit evaluate vit_tiny_patch16_224 --pretrained --data-dir imagenet/val --results-file gtp_plus.csv
      gtp-vit evaluate deit_tiny_patch16_224 --checkpoint deit.safetensors --data-dir val --method tome --r 14
      torchrun --nproc-per-node 4 -m gtp_vit.cli.app evaluate vit_tiny_patch16_224 --pretrained --data-dir imagenet/val
    """

    method: str = "gtp_plus"
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does."""
    results_file: Path | None = None
    """Write the figures here: .csv with timm's columns and ours, or .json."""
    report: Path | None = None
    """Write an HTML page here."""
    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Evaluate, words)
    check_weights(flags)
    check_results_file(flags.results_file)
    with distributed.group():
        run(flags, chosen, words)


def check_results_file(path: Path | None) -> None:
    if path is not None and path.suffix not in (".csv", ".json"):
        raise GTPError(f"--results-file is {path}; its name must end in .csv or .json")


def run(flags: Evaluate, chosen: Chosen, words: Sequence[str]) -> None:
    """All processes evaluate; the first one writes and prints, and only it must be able to."""
    if distributed.is_first():
        check_writable(flags.results_file, flags.report)
    model = make_model(flags)
    check_class_output(model)
    method = chosen.for_model(model)
    dataset = make_dataset(flags, model)
    fast = patch(model, method)
    models = {UNREDUCED: model, method.name: fast}
    settings = {"methods": {method.name: method.to_dict()}, "batch_size": flags.batch_size}
    with open_journal(flags, flags.results_file, flags.model, models, dataset, **settings) as journal:
        if not distributed.is_first():
            evaluate(models, dataset, batch_size=flags.batch_size, workers=flags.workers)
            return
        cost = {UNREDUCED: macs(model).total, method.name: _cost(fast, dataset)}
        with render.progress("evaluating") as progress:
            found = evaluate(
                models, dataset, batch_size=flags.batch_size, workers=flags.workers, journal=journal, progress=progress
            )
        rows = [result_row(flags, model, name, cost, found) for name in models]
        for row in rows:
            row["settings"] = method.to_dict() if row["method"] == method.name else {}
        if flags.results_file is not None:
            write_results(flags.results_file, rows)
        if flags.report is not None:
            columns, cells = score_table(found, cost)
            sections = [Section("Figures", table(columns, cells) + paragraph(explanation(found)))]
            title = f"{flags.model} with {method}"
            write_report(flags.report, title, f"{found.scores[0].images} images.", sections, command("evaluate", words))
    if flags.json:
        render.as_json({"flags": flags, "rows": rows, "unreadable": found.unreadable})
    else:
        render.table(f"{flags.model}, {method}", *score_table(found, cost))
        render.say(explanation(found))
    check_complete(found)


def _cost(fast: Any, dataset: Any) -> int:
    """MACs of a patched model; of one that keeps another number of tokens in each image, the mean over some."""
    return macs(fast, images=first_images(dataset, 64, fast) if fast.reducer.adaptive else None).total


def result_row(flags: Any, model: Any, name: str, cost: dict[str, int], found: Evaluation) -> dict[str, Any]:
    """One line of the results file: timm's columns first, then ours."""
    score = next(score for score in found.scores if score.name == name)
    inputs = host_of(model).inputs
    wanted = inputs.preparation or {}
    return {
        "model": flags.model,
        "top1": round(score.top1.value, 4),
        "top1_err": round(100 - score.top1.value, 4),
        "top5": round(score.top5.value, 4),
        "top5_err": round(100 - score.top5.value, 4),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": flags.img_size or inputs.size[-1],
        "crop_pct": flags.crop_pct or wanted.get("crop_pct", ""),
        "interpolation": flags.interpolation or wanted.get("interpolation", ""),
        "method": "" if name == UNREDUCED else name,
        "gmacs": round(cost[name] / 1e9, 6),
        "images": score.images,
        "unreadable": len(found.unreadable),
        "not_finite": score.not_finite,
        **with_bounds("agreement", score.agreement),
        **with_bounds("kl", score.kl),
        **with_bounds("top1_change", score.top1_change),
    }


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def write_results(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """As CSV or JSON, whole or not at all."""
    if path.suffix == ".json":
        write_atomically(path, json.dumps(render.plain(rows), indent=1, allow_nan=False) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({**row, "settings": json.dumps(row["settings"])} for row in rows)
    write_atomically(path, text.getvalue())


def score_table(found: Evaluation, cost: dict[str, int]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the figures."""
    rows = [
        [
            score.name,
            f"{cost[score.name] / 1e9:.3f}",
            f"{score.top1.value:.2f}",
            f"{score.top5.value:.2f}",
            change_text(score.top1_change),
            f"{score.agreement.value:.2f}",
            kl_text(score),
        ]
        for score in found.scores
    ]
    return ["model", "GMACs", "top-1 %", "top-5 %", "top-1 change", "agreement %", "KL to unreduced"], rows


def change_text(interval: Interval) -> str:
    return f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def kl_text(score: Score) -> str:
    if score.not_finite:
        return f"none: {score.not_finite} not finite"
    return f"{score.kl.value:.4f} [{score.kl.low:.4f}, {score.kl.high:.4f}]"


def explanation(found: Evaluation) -> str:
    """What the intervals mean, and what was not counted."""
    count = found.scores[0].images
    text = f"{count} images; brackets are paired 95 % intervals over images."
    if found.unreadable:
        text += f" {len(found.unreadable)} could not be read and are not counted, e.g. {found.unreadable[0]}"
    if found.not_finite():
        text += f" {'; '.join(found.not_finite())}: they count as wrong and as disagreement, and there is no KL."
    return text


def check_complete(found: Evaluation) -> None:
    """Let the exit code say that something was left out, or is no number."""
    if found.not_finite():
        more = f"; {len(found.unreadable)} of the images could not be read" if found.unreadable else ""
        raise Incomplete(f"{'; '.join(found.not_finite())}{more}")
    check_readable(found.unreadable)


def check_readable(unreadable: Sequence[str]) -> None:
    """Let the exit code say that something was left out."""
    if unreadable:
        names = "; ".join(unreadable[:5])
        raise Unreadable(f"{len(unreadable)} of the images could not be read and were not counted: {names}")
