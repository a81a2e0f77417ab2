"""Help texts at the width of the terminal; commands that do not fit are continued with backslashes."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable

INDENT = "  "


def width() -> int:
    """Columns of the terminal, or what COLUMNS says; 80 for a file or a pipe."""
    return max(shutil.get_terminal_size().columns, 40)


def program_of(command: type) -> str:
    """What a user types to run a command: `gtp-vit` and its name, or what the command says itself."""
    program: str = getattr(command, "PROGRAM", f"gtp-vit {command.__name__.lower()}")
    return program


def description(docstring: str) -> str:
    """A docstring, its paragraphs filled and its examples continued with backslashes where they are too long.

    All lines are indented, as tyro joins those that are not.
    """
    return "\n\n".join(_paragraph(text) for text in inspect.cleandoc(docstring).split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if any(line.startswith(" ") for line in lines):  # examples
        return "\n".join(example(f"{INDENT}{line}") for line in lines)
    filled = textwrap.fill(" ".join(lines), width() - len(INDENT), break_on_hyphens=False)
    return textwrap.indent(filled, INDENT)


def example(line: str) -> str:
    """One command of a help text."""
    if len(line) <= width():
        return line
    indent = line[: len(line) - len(line.lstrip())]
    room = width() - 2  # for the backslash
    pieces = textwrap.wrap(
        line, room, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(pieces)


def listing(entries: Iterable[tuple[str, str]]) -> str:
    """Names and what they mean, in two columns."""
    return "\n".join(
        textwrap.fill(text, width(), initial_indent=f"  {name:<10} ", subsequent_indent=" " * 13)
        for name, text in entries
    )
