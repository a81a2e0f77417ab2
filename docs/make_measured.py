"""Writes docs/measured.md, and the table of README.md, from docs/results: python docs/make_measured.py"""
# ruff: noqa: E501  (the texts of the page have long lines)

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sources import COMPARISON, link_to, load, sources_table, table, versions
from speeds import METHODS, engines_timed, libraries_timed, methods_timed, towers_timed

FOLDER = Path(__file__).parent
PAGE = """\
# Speed and damage

For readers who want to know what the figures in these pages mean and how far to trust them. There is one table for speed, one for damage, and one
that says which script and which file each row comes from. The tables are written by `python docs/make_measured.py` from `docs/results`.

| term | meaning |
|---|---|
| MACs | multiply-accumulate operations of one image's forward pass, counted from the operators that run; a method's own work is included |
| speed-up | time of the unreduced model divided by the time of the reduced one |
| slicing | the same model with the same number of tokens per layer, where choosing them costs nothing: it keeps the first tokens of each layer and drops the last |
| time / slicing | how much longer a method takes than slicing with the method's own schedule: the price of the method's own work |
| KL | KL divergence of the class probabilities from the unreduced model's, mean over images |
| agreement | share of images for which the first class is that of the unreduced model |
| P | tokens that GTP removes per layer; other methods are set to the same number of MACs, or to the same number of tokens where the table says so |

## Speed

Every model has random weights and runs on one or two threads of a CPU, in float32 where the table says nothing else. All candidates of a row take turns, round by round, so another process slows all of
them alike. A figure is the median over the rounds, and the middle half of the rounds is that of time / slicing. Where a case was timed several times, this is the run
with the most rounds; [the notebook](research/speed.md) has all of them.

{speed}

*Machine, date and commit of each source: [below](#sources). Rows of one source were measured together; rows of different sources were not. Most machines had other work at the
same time.*

Slicing runs on torch's fused attention. Where time / slicing is below 1, our attention kernel beat it on that machine.

## Damage

Two ImageNet classifiers, 2,000 validation images that took part in no search and no calibration, read without EXIF orientation, no finetuning. All methods
have the shortened last block.

{damage}

*"Calibrated" is after `gtp_vit.calibrate`; "recipe" is what the package has for these two models; rows of engines are compared with the float model. Date and commit of each source: [below](#sources). Paired differences, more
methods and more costs: [all methods at equal cost](comparison.md).*

- The standard error of a top-1 figure is about one point. Agreement and KL are paired with the unreduced model and much sharper.
- GTP is the paper's operator with θ = 1 and alpha = 0.2, which suits these models better than its θ = 0.6. These are Ti models: they neither confirm nor refute
  the accuracies that the paper prints for DeiT-S and larger models.

## Sources

The commit is the one that recorded the result. Damage does not depend on the machine beyond rounding, so most of its sources name none. Files have what pages print; the
settings of each row and figures that no page prints are in the files of that commit.

{sources}

*Sources with a machine: {versions}.*
"""
DEIT, VIT = "deit_tiny_patch16_224", "vit_tiny_patch16_224"


def speed() -> str:
    columns = ["model", "runs in", "batch", "method", "speed-up", "time / slicing", "middle half", "source"]
    cases = [*methods_timed(), *engines_timed(), *libraries_timed(), *towers_timed()]
    return table(columns, [case.cells() for case in cases])


def damage() -> str:
    """The same rows of both models side by side."""
    columns = [
        "method",
        "MACs",
        *(f"{model}: {figure}" for model in ("DeiT-Ti", "ViT-Ti") for figure in ("top-1", "agreement", "KL")),
        "source",
    ]
    paired, calibrated = COMPARISON["paired"], COMPARISON["calibrated"]
    rows = [["unreduced", "100 %", *_both(paired, 0), link_to("comparison", paired["commit"], _place("paired"))]]
    names = ("gtp", "tome", "gtp_plus")
    for place in range(1, 7):  # P = 8, then P = 14
        assert paired["rows"][DEIT][place]["method"] == names[(place - 1) % 3]
        label = f"{METHODS[names[(place - 1) % 3]]}, P = {8 if place < 4 else 14}"
        label = f"**{label}**" if "+" in label else label
        rows.append(
            [
                label,
                _share(paired, place),
                *_both(paired, place),
                link_to("comparison", paired["commit"], _place("paired")),
            ]
        )
    for place, row in enumerate(calibrated["rows"][DEIT][3:], 3):
        what = row["method"].removeprefix("gtp_plus, ")
        label = f"GTP+ calibrated, P = {8 if place == 3 else 14}" if what == "calibrated" else f"GTP+, {what}"
        rows.append(
            [label, _share(calibrated, place), *_both(calibrated, place), link_to("comparison", calibrated["commit"])]
        )
    return table(columns, [*rows, *_in_engines()])


def _in_engines() -> Iterator[list[str]]:
    """Rows of the recipe `deploy`, in torch and in 8 bits, and of 8 bits alone."""
    run = load("engines-damage")
    by_engine = {(row["model"], row["engine"]): row for row in run["rows"]}
    cases = [("GTP+, recipe deploy", "openvino", "deploy", "kl_deploy")]
    for engine, title in (("openvino", "OpenVINO int8"), ("onnxruntime", "ONNX Runtime int8")):
        cases += [(f"{title}, unreduced", engine, f"{engine} int8", "kl_int8")]
        cases += [(f"{title}, GTP+, recipe deploy", engine, f"{engine} int8 + deploy", "kl_int8_deploy")]
    for label, engine, key, kl in cases:
        cells = []
        for model in (DEIT, VIT):
            row = by_engine[model, engine]
            cells += [f"{row['top1'][key]:.1f}", f"{row['agreement'][key]:.1f}", f"{row[kl]:.4f}"]
        share = "100 %" if kl == "kl_int8" else f"{100 * by_engine[DEIT, engine]['share_of_macs']['deploy']:.0f} %"
        yield [label, share, *cells, link_to("engines-damage", run["commit"])]


def headline(readme: str) -> str:
    """The README with its table: what GTP, ToMe and GTP+ do at 55 % of the MACs."""
    columns = [
        "at 55 % of the MACs",
        "DeiT-S: speed-up",
        *(f"{model}: {figure}" for model in ("DeiT-Ti", "ViT-Ti") for figure in ("agreement", "KL")),
    ]
    speedups = {case.method: f"{case.speedup:.2f}" for case in methods_timed() if case.model == "DeiT-S"}
    parts = (
        ("GTP as published", "GTP, P = 14", "paired", 4),
        ("ToMe", "ToMe, r = 14", "paired", 5),
        ("**GTP+**", "GTP+, P = 14", "paired", 6),
        ("**GTP+**, calibrated", "GTP+, calibrated, P = 14", "calibrated", 4),
    )
    rows = []
    for title, method, part, place in parts:
        assert _share(COMPARISON[part], place) == "55 %"
        cells = _both(COMPARISON[part], place)
        rows.append([title, speedups[method], *cells[1:3], *cells[4:]])
    before, rest = readme.split("<!-- headline -->")
    return f"{before}<!-- headline -->\n{table(columns, rows)}\n\n<!-- end -->{rest.split('<!-- end -->')[1]}"


def _place(part: str) -> int:
    """Which of the runs with one commit it is."""
    before = list(COMPARISON)[: list(COMPARISON).index(part)]
    return sum(COMPARISON[name]["commit"] == COMPARISON[part]["commit"] for name in before)


def _share(part: dict[str, Any], place: int) -> str:
    shares = {f"{100 * rows[place]['gmacs'] / rows[0]['gmacs']:.0f} %" for rows in part["rows"].values()}
    return " / ".join(sorted(shares))


def _both(part: dict[str, Any], place: int) -> list[str]:
    cells = []
    for model in (DEIT, VIT):
        row = part["rows"][model][place]
        cells += [
            f"{row['top1']:.1f}",
            *(("-", "-") if place == 0 else (f"{row['agreement']:.1f}", f"{row['kl']:.4f}")),
        ]
    return cells


def pages() -> dict[str, str]:
    return {"measured.md": PAGE.format(speed=speed(), damage=damage(), sources=sources_table(), versions=versions())}


if __name__ == "__main__":
    README = FOLDER.parent / "README.md"
    README.write_text(headline(README.read_text()))
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
