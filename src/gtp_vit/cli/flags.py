"""Flags from dataclasses: a command's own, and the settings of the method chosen with --method, in one parse."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from gtp_vit.cli.help import description
from gtp_vit.cli.words import check_words, flags_of, looks_like_flag
from gtp_vit.core.reducer import Method
from gtp_vit.errors import check_name
from gtp_vit.methods import METHODS
from gtp_vit.methods.gtp_plus import GTPPlus
from gtp_vit.recipes import is_recipe, read_recipe

Command = TypeVar("Command")
# The schedule of GTP+ where none is given: known as soon as the model is, see source.settle.
BY_MODEL = "as patch(model)"


def parse(command: type[Command], words: Sequence[str]) -> Command:
    """Read `words` into a command; tyro prints help and exits."""
    check_words(words, command)
    return _parsed(command, command, words)


def parse_with_method(command: type[Command], words: Sequence[str], *, by_model: bool = True) -> tuple[Command, Method]:
    """Read `words` into a command and the settings of its --method, whose flags have no prefix.

    GTP+ without a schedule is what patch(model) does, so its settings must go through source.settle before they are
    used; without `by_model`, they are those of its class.
    """
    import tyro

    default = next(field.default for field in dataclasses.fields(command) if field.name == "method")  # type: ignore[arg-type]
    value, _ = _take(words, "--method")
    chosen = str(default) if value is None else value
    start = read_recipe(chosen).method if is_recipe(chosen) else METHODS[check_name("method", chosen, METHODS)]()
    if by_model and start == GTPPlus() and not is_recipe(chosen):
        start = dataclasses.replace(start, propagate=BY_MODEL)
    check_words(words, command, type(start))
    both = dataclasses.make_dataclass(
        command.__name__,
        [
            ("run", Annotated[command, tyro.conf.arg(name="")]),
            ("settings", Annotated[type(start), tyro.conf.arg(name="")], dataclasses.field(default=start)),
        ],
    )
    parsed: Any = _parsed(both, command, words)
    return parsed.run, parsed.settings


def _parsed(what: type[Any], command: type[Any], words: Sequence[str]) -> Any:
    import tyro

    value, others = _take(words, "--model")
    if value is not None and any(place.name == "--model" for place in flags_of(command)[1]):
        words = [value, *others]  # --model NAME means the same as NAME in the first place
    prog = f"gtp-vit {command.__name__.lower()}"
    return tyro.cli(what, args=list(words), prog=prog, description=description(command.__doc__ or ""))


def _take(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag, None if it has none, and the other words."""
    found = list(words)
    for index, word in enumerate(found):
        if word == flag and index + 1 < len(found) and not looks_like_flag(found[index + 1]):
            return found[index + 1], found[:index] + found[index + 2 :]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1], found[:index] + found[index + 1 :]
    return None, found
