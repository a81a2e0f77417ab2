"""gtp-vit check: what this machine is; paste it into bug reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import OutputFlags, print_table_result
from gtp_vit.engines import ENGINES
from gtp_vit.jsonable import jsonable
from gtp_vit.profiling.environment import bf16_verdict, environment


@dataclass(frozen=True)
class Check(OutputFlags):
    """Show versions, hardware and known traps of this machine.

    examples:
      gtp-vit check
      gtp-vit check --json
    """


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(Check, arguments)
    report = {**jsonable(environment()), "bf16": bf16_verdict()}
    report |= {name: engine.status() for name, engine in ENGINES.items()}
    rows = [[key, str(value)] for key, value in report.items()]
    print_table_result(flags, arguments, "gtp-vit check", ["what", "found"], rows, report)
