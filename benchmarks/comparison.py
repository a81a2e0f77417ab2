"""Every method with its published schedule and with a tuned one, at five costs, on two real models: docs/comparison.md.

    python benchmarks/comparison.py --weights FOLDER --val FOLDER --calibration FOLDER --output FOLDER
    python benchmarks/comparison.py ... --costs 8 14 --collect docs/results/comparison.json

A run takes hours; each model at each cost is one `gtp-vit compare --tuned` in a folder of its own, which resumes where
it was interrupted. --collect puts what is finished into the file of results; `python docs/make_comparison.py` shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from gtp_vit.cli.app import main as gtp_vit
from gtp_vit.tuning.all_methods import tunable_methods
from subject import weights_of

MODELS = ("deit_tiny_patch16_224", "vit_tiny_patch16_224")


@dataclass(frozen=True)
class Options:
    """Compare all methods that have a schedule, as published and tuned."""

    weights: Path
    """Folder with a file of weights for each model, whose name begins with the model's."""
    val: Path
    """Folder of images to compare on, one folder for each class."""
    calibration: Path
    """Folder of images to tune on."""
    output: Path
    """Folder for what is measured."""
    costs: tuple[int, ...] = (14, 8, 11, 4, 16)
    """MACs of GTP that propagates so many tokens per layer."""
    models: tuple[str, ...] = MODELS
    """Names of models."""
    tuning_images: int = 100
    """Images to tune on, a fifth of them held out."""
    passes: int = 20
    """Passes over them for each method and cost."""
    collect: Path | None = None
    """Put what is finished into this file of results, as its part "tuned", and measure nothing."""


def folder(options: Options, model: str, cost: int) -> Path:
    return options.output / f"{model}-P{cost}"


def measure(options: Options, model: str, cost: int) -> int:
    weights = weights_of(options.weights, model)
    words = [
        "compare",
        model,
        "--checkpoint",
        str(weights),
        "--data-dir",
        str(options.val),
        "--ignore-exif",  # as ImageNet is scored
        "--gtp-budgets",
        str(cost),
    ]
    words += ["--methods", *tunable_methods(()), "--tuned", "--calibration-dir", str(options.calibration)]
    words += [
        "--tuning-images",
        str(options.tuning_images),
        "--search-passes",
        str(options.passes),
        "--rounds",
        "0",
    ]
    return int(gtp_vit([*words, "--workers", "0", "--output", str(folder(options, model, cost))]))


def collect(options: Options, file: Path) -> None:
    """Without the settings of every row, which no page prints."""
    results = json.loads(file.read_text())
    rows: dict[str, list[dict[str, Any]]] = {}
    for model in options.models:
        runs = [folder(options, model, cost) / "results.json" for cost in sorted(options.costs)]
        measured = [row for run in runs if run.exists() for row in json.loads(run.read_text())]
        rows[model] = [{key: value for key, value in row.items() if key != "settings"} for row in measured]
        print(f"{model}: {len(measured)} rows")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    origin = {"script": "python benchmarks/comparison.py", "date": str(date.today()), "commit": commit.stdout.strip()}
    file.write_text(json.dumps({**results, "tuned": {**origin, "rows": rows}}, indent=1) + "\n")


def main(options: Options) -> None:
    if options.collect is not None:
        collect(options, options.collect)
        return
    for cost in options.costs:
        for model in options.models:
            if not (folder(options, model, cost) / "results.json").exists():
                code = measure(options, model, cost)
                if code:
                    sys.exit(code)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
