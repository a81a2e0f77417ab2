"""Is training with GTP faster, and does it need less memory, than training the unreduced model on the same batch?

    python benchmarks/training.py                                            # DeiT-S and ViT-Ti at P = 14
    python benchmarks/training.py --cases deit_small_patch16_224:32:14 --rounds 20 --json training.json

A case is MODEL:BATCH:P[:IMAGE_SIZE]. One call is a whole step: forward pass, cross entropy with soft labels, backward
pass, AdamW. All are timed in turns in one process; only ratios are to be trusted. Peak memory is that of one step, each
candidate in a process of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import timm
import torch
import tyro
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

from gtp_vit import GTP, patch
from gtp_vit.profiling.benchmark import interleave, speedups_over
from gtp_vit.profiling.environment import environment
from memory import in_a_child, peak_of

CASES = ("deit_small_patch16_224:16:14", "vit_tiny_patch16_224:16:14")
NAMES = ("unreduced", "unreduced, checkpointed", "gtp", "gtp, checkpointed")


@dataclass(frozen=True)
class Options:
    """Time one step of training, interleaved, and measure its peak memory."""

    cases: tuple[str, ...] = CASES
    """MODEL:BATCH:P or MODEL:BATCH:P:IMAGE_SIZE."""
    rounds: int = 10
    """How often each is timed."""
    threads: int = 2
    """CPU threads."""
    checkpointing: bool = False
    """Also with gradient checkpointing."""
    memory: bool = True
    """Also measure the peak memory of a step, each in a process of its own; Linux only."""
    json: Path | None = None
    """Write the results to this file."""


@dataclass(frozen=True)
class Row:
    """One candidate of one case; speed-ups are over the unreduced model's steps in the same rounds."""

    case: str
    candidate: str
    images_per_second: float
    speedup: float
    speedup_quartiles: tuple[float, float]
    verdict: str  # faster or slower, where three quarters of the rounds agree
    peak_mb: float | None


def step_of(case: str, candidate: str) -> tuple[Callable[[], None], int]:
    """A function that takes one step, and the number of its images."""
    name, batch, number, *size = case.split(":")
    torch.manual_seed(0)
    model = timm.create_model(name, **({"img_size": int(size[0])} if size else {}))
    if candidate.startswith("gtp"):
        model = patch(model, GTP(propagate=int(number)))
    model = copy.deepcopy(model).train()
    model.set_grad_checkpointing(candidate.endswith("checkpointed"))
    optimiser = create_optimizer_v2(model, "adamw", lr=1e-5, weight_decay=0.05)
    images = torch.randn(int(batch), 3, *model.patch_embed.img_size)
    labels = torch.rand(int(batch), model.num_classes).softmax(dim=1)
    loss = SoftTargetCrossEntropy()

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss(model(images), labels).backward()
        optimiser.step()

    return step, int(batch)


def measure(case: str, options: Options) -> list[Row]:
    names = [name for name in NAMES if options.checkpointing or not name.endswith("checkpointed")]
    steps = {name: step_of(case, name) for name in names}
    samples = interleave({name: step for name, (step, _) in steps.items()}, rounds=options.rounds)
    rows = []
    for timing in speedups_over(samples, "unreduced"):
        verdict = {True: "faster", False: "SLOWER", None: "unclear"}[timing.faster]
        rate = 1000 * steps[timing.name][1] / timing.milliseconds
        peak = in_a_child(__file__, case, timing.name, str(options.threads)) if options.memory else None
        rows.append(Row(case, timing.name, rate, timing.speedup, timing.speedup_quartiles, verdict, peak))
    return rows


def child(case: str, candidate: str, threads: int) -> None:
    """What `measure` asks of another process: MB that a step adds to model, images and optimiser's state."""
    torch.set_num_threads(threads)
    step, _ = step_of(case, candidate)
    step()  # makes the optimiser's state and loads torch's libraries
    print(peak_of(step))


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    head = ("case", "candidate", "images/s", "speed-up", "middle half", "peak MB")
    print("{:<34}{:<26}{:>9}{:>10}{:>15}{:>9}".format(*head))
    for case in options.cases:
        for row in measure(case, options):
            low, high = row.speedup_quartiles
            peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
            print(
                f"{row.case:<34}{row.candidate:<26}{row.images_per_second:>9.2f}{row.speedup:>10.3f}"
                f"{f'{low:.3f} .. {high:.3f}':>15}{peak:>9}  {row.verdict}",
                flush=True,
            )
            rows.append(row)
        if options.json:  # after every case, so that an interruption loses nothing
            result = {
                "date": date.today().isoformat(),
                "environment": dataclasses.asdict(environment()),
                "options": {**dataclasses.asdict(options), "json": str(options.json)},
                "rows": [dataclasses.asdict(row) for row in rows],
            }
            options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(tyro.cli(Options, description=__doc__))
