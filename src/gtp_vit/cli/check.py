"""gtp-vit check: what this machine is; paste it into bug reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import OutputFlags, answer_with_table
from gtp_vit.engines import ENGINES
from gtp_vit.engines.engine import Engine, missing
from gtp_vit.engines.openvino import ISA, SAFE_ISA, trap
from gtp_vit.jsonable import jsonable
from gtp_vit.profiling.environment import bf16_verdict, environment


@dataclass(frozen=True)
class Check(OutputFlags):
    """Show versions, hardware and known traps of this machine.

    examples:
      gtp-vit check
      gtp-vit check --json
    """


def main(words: Sequence[str]) -> None:
    flags = parse_flags(Check, words)
    found = {**jsonable(environment()), "bf16": bf16_verdict()}
    found |= {name: _status(engine) for name, engine in ENGINES.items()}
    rows = [[key, str(value)] for key, value in found.items()]
    answer_with_table(flags, words, "gtp-vit check", ["what", "found"], rows, found)


def _status(engine: Engine) -> str:
    """Version and trap of an engine, or what it lacks."""
    problem = missing(engine)
    if problem is not None:
        return problem
    trapped = trap() if engine.name == "openvino" and ISA not in os.environ else None
    warning = "" if trapped is None else f"; {trapped}: set {ISA}={SAFE_ISA}, as gtp-vit does"
    return f"{engine.versions()[engine.name]}{warning}"
