"""gtp-vit check: what this machine is; paste it into bug reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.cli import render
from gtp_vit.cli.flags import parse
from gtp_vit.tools.environment import environment


@dataclass(frozen=True)
class Check:
    """Show versions, hardware and known traps of this machine."""

    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str]) -> None:
    flags = parse(Check, words)
    found = environment()
    if flags.json:
        render.as_json(found)
    else:
        render.table("gtp-vit check", ["what", "found"], [[k, str(v)] for k, v in render.plain(found).items()])
