"""All that a new command is: one file like this one in cli/commands/, and one line in COMMANDS."""

from dataclasses import dataclass
from typing import Annotated

from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import OutputFlags, print_table_result
from gtp_vit.cli.parser import Positional, Range


@dataclass(frozen=True)
class Toy(OutputFlags):
    """Say a word a few times.

    examples:
      gtp-vit toy hello --times 2
    """

    word: Positional[str] = "hello"
    """The word."""
    times: Annotated[int, Range(1, 9)] = 3
    """How often it is said."""


def main(words):
    flags = parse_flags(Toy, words)
    print_table_result(flags, words, "toy", ["said"], [[flags.word] * 1 for _ in range(flags.times)])
