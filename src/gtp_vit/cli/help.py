"""Help texts at the width of the terminal: the flags that a beginner needs first, then all others by their subject."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtp_vit.cli.parser import Flag

INDENT = "  "
COLUMN = 26  # where the texts of flags begin
SHORT = 12  # so many flags need no headings


def width() -> int:
    """Columns of the terminal, or what COLUMNS says; 80 for a file or a pipe."""
    return max(shutil.get_terminal_size().columns, 40)


def program_of(command: type) -> str:
    """The program a user types to run a command: `gtp-vit` and its name, or the command's PROGRAM."""
    program: str = getattr(command, "PROGRAM", f"gtp-vit {command.__name__.lower()}")
    return program


def help_text(command: type[Any], flags: Sequence[Flag]) -> str:
    """The help of a command. The flags of its examples come first: they are those that are needed most."""
    docstring = inspect.cleandoc(command.__doc__ or "")
    places = [flag for flag in flags if flag.positional]
    usage = " ".join(["usage:", program_of(command), *(f"[{place.metavar}]" for place in places), "[flags]"])
    parts = [usage, *map(_paragraph, docstring.split("\n\n"))]
    shown = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", docstring.partition("examples:")[2]))
    groups: dict[str, list[Flag]] = {"arguments": places}
    flags = [flag for flag in flags if not flag.positional]
    if len(flags) > SHORT:
        groups["most used"] = [flag for flag in flags if shown & set(flag.spellings())]
    own = "flags" if len(flags) <= SHORT else command.__name__.lower()
    groups[own] = []
    for flag in flags:
        if flag not in groups.get("most used", ()):
            groups.setdefault(own if len(flags) <= SHORT else flag.group or own, []).append(flag)
    return "\n\n".join([*parts, *(_group(heading, entries) for heading, entries in groups.items() if entries)])


def _group(heading: str, flags: Sequence[Flag]) -> str:
    return "\n".join([f"{heading}:", *(entry(_spelling(flag), _help_of(flag), COLUMN) for flag in flags)])


def _spelling(flag: Flag) -> str:
    if flag.positional:
        return flag.metavar
    if flag.switch:
        return f"--[no-]{flag.spelling[2:]}" if flag.default else flag.spelling
    return f"{', '.join([*flag.shorts, flag.spelling])} {flag.metavar}"


def _help_of(flag: Flag) -> str:
    """The text of a flag, and its default if that says something."""
    default = flag.default
    if default is True:
        return f"{flag.help} (default: on)"
    if default is None or default is False or default == "" or default == ():
        return flag.help
    words = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{flag.help} (default: {words})" if len(words) <= 40 else flag.help


def entry(name: str, text: str, column: int) -> str:
    """A name, and what it means from a column on; a name that is too long has a line for itself."""
    head, indent = f"{INDENT}{name}", " " * column
    lines = textwrap.wrap(text, width() - column, break_on_hyphens=False) or [""]
    if len(head) + 2 > column:
        written = name if len(head) <= width() else name.replace(",", ", ")  # choices that need several lines
        heads = textwrap.wrap(written, width(), initial_indent=INDENT, subsequent_indent=INDENT * 3)
        return "\n".join([*heads, *(indent + line for line in lines)]).rstrip()
    return "\n".join([f"{head:<{column}}{lines[0]}", *(indent + line for line in lines[1:])]).rstrip()


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if any(line.startswith(" ") for line in lines):  # examples
        return "\n".join(example(line) for line in lines)
    return textwrap.fill(" ".join(lines), width(), break_on_hyphens=False)


def example(line: str) -> str:
    """One command of a help text, continued with backslashes where it is too long."""
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
    return "\n".join(entry(name, text, 13) for name, text in entries)
