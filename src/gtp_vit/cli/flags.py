"""Flags from dataclasses: a command's own, and the settings of the method chosen with --method, in one parse."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gtp_vit.core.reducer import Method
from gtp_vit.errors import check_name
from gtp_vit.methods import METHODS
from gtp_vit.recipes import is_recipe, read_recipe

Command = TypeVar("Command")


def parse(command: type[Command], words: Sequence[str]) -> Command:
    """Read `words` into a command; tyro prints help and mistakes and exits."""
    import tyro

    check_words(words, command)
    words = _model_first(words, command)
    return tyro.cli(command, args=list(words), prog=f"gtp-vit {command.__name__.lower()}", description=command.__doc__)


def parse_with_method(command: type[Command], words: Sequence[str], default: str = "gtp") -> tuple[Command, Method]:
    """Read `words` into a command and the settings of its --method, whose flags have no prefix."""
    import tyro

    chosen = _chosen_method(words, default)
    start = read_recipe(chosen).method if is_recipe(chosen) else METHODS[check_name("method", chosen, METHODS)]()
    method = type(start)
    check_words(words, command, method)
    words = _model_first(words, command)
    both = dataclasses.make_dataclass(
        command.__name__,
        [
            ("run", Annotated[command, tyro.conf.arg(name="")]),
            ("settings", Annotated[method, tyro.conf.arg(name="")], dataclasses.field(default=start)),
        ],
    )
    both.__doc__ = command.__doc__
    parsed = tyro.cli(both, args=list(words), prog=f"gtp-vit {command.__name__.lower()}", description=command.__doc__)
    return parsed.run, parsed.settings


def check_words(words: Sequence[str], *sources: Any) -> None:
    """Unknown flags and unknown choices in one line, with close matches; the rest is left to the parser."""
    choices: dict[str, tuple[str, ...]] = {"help": ()}
    for source in sources:
        hints = get_type_hints(source)
        for field in dataclasses.fields(source):
            flag = field.name.replace("_", "-")
            choices[flag] = get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ()
            if hints[field.name] is bool:
                choices[f"no-{flag}"] = ()
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            check_name("flag", f"--{flag}", [f"--{known}" for known in choices])
            if choices[flag]:
                check_name(f"--{flag}", value or following, choices[flag])


def _model_first(words: Sequence[str], command: type[Any]) -> list[str]:
    """--model NAME, as timm's scripts have it, means the same as NAME in the first place, where that is the model's."""
    if get_origin(get_type_hints(command, include_extras=True).get("model")) is not Annotated:
        return list(words)
    value, others = _take(words, "--model")
    return others if value is None else [value, *others]


def _chosen_method(words: Sequence[str], default: str) -> str:
    value, _ = _take(words, "--method")
    return default if value is None else value


def _take(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag, None if it has none, and the other words."""
    found = list(words)
    for index, word in enumerate(found):
        if word == flag and index + 1 < len(found):
            return found[index + 1], found[:index] + found[index + 2 :]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1], found[:index] + found[index + 1 :]
    return None, found
