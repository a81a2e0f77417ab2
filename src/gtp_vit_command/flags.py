"""flags: which flags there are, read from the sources: fields of dataclasses are flags, as gtp_vit.cli.words has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FIELD = re.compile(r"^    (\w+): (.*)", re.MULTILINE)
ALIASES = re.compile(r"aliases=\[([^\]]*)\]")
DEFAULT = "gtp_plus"  # the method of commands that are not told one


@dataclass(frozen=True)
class Class:
    """A class in a source: its bases and its fields."""

    bases: tuple[str, ...]
    fields: dict[str, str]  # name -> annotation and default
    body: str


@cache
def classes(source: Path) -> dict[str, Class]:
    """The classes of commands, methods and training, by name."""
    found = {}
    for path in [*source.glob("cli/*.py"), *source.glob("methods/**/*.py"), source / "training/settings.py"]:
        for part in re.split(r"^class (?=\w)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            head, _, body = part.partition(":\n")
            name, _, bases = head.partition("(")
            body = re.split(r"^\S", body, maxsplit=1, flags=re.MULTILINE)[0]
            fields = {key: text for key, text in FIELD.findall(body) if not text.startswith("ClassVar")}
            found[name] = Class(tuple(re.findall(r"\w+", bases)), fields, body)
    return found


@cache
def known_words(source: Path) -> frozenset[str]:
    """All flags of all commands and methods, and more: what is not among them is a mistake."""
    return frozenset(flag for each in classes(source).values() for flag in _flags(each)) | {"--model"}


def named_flags(source: Path, command: str, words: Sequence[str]) -> list[str]:
    """The flags of a command and of the method that is chosen, for what somebody may have meant."""
    every = classes(source)
    found = [flag for each in _with_bases(every, command.capitalize()) for flag in _flags(each)]
    if "--method" in found:
        given = [*words, ""]
        chosen = next((given[at + 1] for at, word in enumerate(words) if word == "--method"), DEFAULT)
        chosen = next((word.partition("=")[2] for word in words if word.startswith("--method=")), chosen)
        of_methods = {
            each.body.partition('name: ClassVar[str] = "')[2].partition('"')[0]: each for each in every.values()
        }
        method = of_methods.get(chosen) or of_methods[DEFAULT]
        found += _flags(method)
    return found


def _with_bases(every: dict[str, Class], name: str) -> Iterator[Class]:
    for base in every[name].bases:
        if base in every:
            yield from _with_bases(every, base)
    yield every[name]


def _flags(of: Class) -> list[str]:
    found = []
    for name, text in of.fields.items():
        flag = f"--{name.replace('_', '-')}"
        found.append(flag)
        if text.startswith("bool"):
            found.append(f"--no-{flag[2:]}")
        for aliases in ALIASES.findall(text):
            found += re.findall(r'"([^"]+)"', aliases)
    return found
