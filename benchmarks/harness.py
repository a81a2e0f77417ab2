"""What the benchmarks that time models share: flags, one ratio, and the file of results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gtp_vit.profiling.benchmark import Samples, Timing, speedups_over
from gtp_vit.profiling.environment import environment


@dataclass(frozen=True)
class Options:
    """How to time, interleaved."""

    rounds: int = 20
    """How often each is timed."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the results to this file."""


def of(samples: Samples, name: str, baseline: str) -> Timing:
    """The times of one candidate against those of another."""
    return next(timing for timing in speedups_over(samples, baseline) if timing.name == name)


def over(timing: Timing) -> tuple[float, tuple[float, float], float]:
    """Time as a multiple of the baseline's: median, quartiles, and of the fastest rounds."""
    low, high = timing.speedup_quartiles
    return 1 / timing.speedup, (1 / high, 1 / low), 1 / timing.best_speedup


def over_slicing(samples: Samples, name: str, slicing: str) -> dict[str, Any]:
    """The columns of a row that compare a reduced model with slicing."""
    median, quartiles, best = over(of(samples, name, slicing))
    return {
        "over_slicing": round(median, 3),
        "over_slicing_quartiles": [round(each, 3) for each in quartiles],
        "over_slicing_best": round(best, 3),
    }


def run_record(options: Options, rows: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Rows with when, where and how they were measured."""
    chosen = {key: str(value) for key, value in dataclasses.asdict(options).items() if key != "json"}
    return {
        "date": date.today().isoformat(),
        "environment": dataclasses.asdict(environment()),
        "options": chosen,
        "rows": list(rows),
        **more,
    }


def write_run(options: Options, rows: Sequence[Any], **more: Any) -> None:
    """Write the results of one run where the options say; again after each row, so that an interruption loses none."""
    if options.json is not None:
        options.json.write_text(json.dumps(run_record(options, rows, **more), indent=1) + "\n")


def add_run(options: Options, rows: Sequence[Any]) -> None:
    """Add the results of a run to those of earlier ones in the same file."""
    if options.json is not None:
        runs = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*runs, run_record(options, rows)], indent=1) + "\n")
