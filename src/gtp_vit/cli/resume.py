"""Flags and journals of the commands that resume where they were interrupted."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.data.dataset import InMemory
from gtp_vit.report.results import plain
from gtp_vit.runs import distributed
from gtp_vit.runs.identity import identity
from gtp_vit.runs.journal import Journal


@dataclass(frozen=True)
class ResumeFlags:
    """Whether to use the journal of an earlier run."""

    restart: bool = False
    """Discard what an interrupted run has finished, and start over instead of resuming it."""


def open_journal(
    flags: ResumeFlags, results: Path | None, name: str, models: Any, dataset: Any, **settings: Any
) -> AbstractContextManager[Journal | None]:
    """The journal beside a file of results, opened by the first process.

    All processes call this, and are refused if they were started with different weights, images or settings. Runs over
    images in memory take seconds and need no journal.
    """
    needed = results is not None and not isinstance(dataset, InMemory)
    if not needed and distributed.rank_and_world_size()[1] == 1:
        return nullcontext()
    run = identity(name, models, dataset, **plain(settings)).to_dict()
    distributed.check_same("weights, images or settings", run)
    if results is None or not needed or not distributed.is_rank_zero():
        return nullcontext()
    journal = Journal(results.with_name(f"{results.name}.journal"), run, restart=flags.restart)
    if journal.note:
        print(f"gtp-vit: {journal.note}", file=sys.stderr)
    return journal
