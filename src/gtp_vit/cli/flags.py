"""Flags from dataclasses: a command's own, and the settings of the method chosen with --method, in one parse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from gtp_vit.cli.help import description, program_of
from gtp_vit.cli.words import check_words, flags_of, looks_like_flag
from gtp_vit.core.reducer import Method
from gtp_vit.errors import BadSetting, check_name
from gtp_vit.methods import METHODS
from gtp_vit.patching import host_of
from gtp_vit.recipes import DEFAULT, DEPLOY, Recipe, default_method, deploy_method, is_recipe, read_recipe

Command = TypeVar("Command")
# Stands for the schedule of the default method if none is given, as it depends on the model.
BY_MODEL = "as patch(model)"


def parse_flags(command: type[Command], words: Sequence[str]) -> Command:
    """Read `words` into a command; tyro prints help and exits."""
    check_words(words, command)
    return _parsed(command, command, words)


@dataclass(frozen=True)
class MethodFlags:
    """Which method; the flags of its settings are added by `parse_with_method`."""

    method: str = DEFAULT.name
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does.
    deploy is gtp_plus with a schedule for engines."""


@dataclass(frozen=True)
class Chosen:
    """The method that the user chose, and which of its settings are given."""

    settings: Method
    given: frozenset[str]  # names of the settings that were written as flags
    recipe: Recipe | None  # if --method names one
    by_model: Callable[[Any], Method] = default_method  # the settings where the schedule depends on the model

    def for_model(self, model: Any) -> Method:
        """The settings for this model: GTP+ without a schedule does what patch(model) does, with the given flags."""
        host = host_of(model)
        if self.recipe is not None:
            self.recipe.check(host)
        if BY_MODEL not in vars(self.settings).values():
            return self.settings
        changes = {name: getattr(self.settings, name) for name in self.given}
        return dataclasses.replace(self.by_model(host), **changes)


def parse_with_method(command: type[Command], words: Sequence[str], *, by_model: bool = True) -> tuple[Command, Chosen]:
    """Read `words` into a command and the settings of its --method, whose flags have no prefix.

    Without `by_model`, the settings of GTP+ without a schedule are those of its class.
    """
    import tyro

    default = next(field.default for field in dataclasses.fields(command) if field.name == "method")  # type: ignore[arg-type]
    value, _ = _take(words, "--method")
    chosen = str(default) if value is None else value
    recipe = read_recipe(chosen) if is_recipe(chosen) else None
    deploy = chosen == DEPLOY
    named = DEFAULT.name if deploy else chosen
    start = METHODS[check_name("method", named, (*METHODS, DEPLOY))]() if recipe is None else recipe.method
    if (by_model or deploy) and recipe is None and type(start) is DEFAULT:
        start = dataclasses.replace(start, **{str(DEFAULT.schedule): BY_MODEL})
    check_words(words, command, type(start))
    both = dataclasses.make_dataclass(
        command.__name__,
        [
            ("run", Annotated[command, tyro.conf.arg(name="")]),
            ("settings", Annotated[type(start), tyro.conf.arg(name="")], dataclasses.field(default=start)),
        ],
    )
    parsed: Any = _parsed(both, command, words)
    known = flags_of(type(start))[0]
    written = {word.partition("=")[0] for word in words if looks_like_flag(word)}
    given = frozenset(known[word].name[2:].replace("-", "_") for word in written if word in known)
    settings = _with_calibration(parsed.settings)
    return parsed.run, Chosen(settings, given, recipe, deploy_method if deploy else default_method)


def _with_calibration(settings: Method) -> Method:
    """The settings with the calibration of the recipe that their flag names."""
    named = getattr(settings, "calibration", None)
    if named is None or not is_recipe(named):
        return settings
    found = getattr(read_recipe(named).method, "calibration", None)
    if found is None:
        raise BadSetting(f"--calibration is {named}, a recipe without one; make one with gtp-vit tune")
    return dataclasses.replace(settings, calibration=found)  # type: ignore[call-arg]


def _parsed(what: type[Any], command: type[Any], words: Sequence[str]) -> Any:
    import tyro

    value, others = _take(words, "--model")
    if value is not None and any(place.name == "--model" for place in flags_of(command)[1]):
        words = [value, *others]  # --model NAME means the same as NAME as the first word
    return tyro.cli(what, args=list(words), prog=program_of(command), description=description(command.__doc__ or ""))


def _take(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag, None if it has none, and the other words."""
    found = list(words)
    for index, word in enumerate(found):
        if word == flag and index + 1 < len(found) and not looks_like_flag(found[index + 1]):
            return found[index + 1], found[:index] + found[index + 2 :]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1], found[:index] + found[index + 1 :]
    return None, found
