"""A command's own flags and the settings of the method chosen with --method, in one parse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gtp_vit.cli.help import help_text
from gtp_vit.cli.parser import Flag, build_command, flags_of, parse_arguments
from gtp_vit.cli.sources import value_of_flag
from gtp_vit.core.reducer import Method
from gtp_vit.errors import SettingError, UnknownNameError, check_name, unknown_flag
from gtp_vit.methods import known_methods, method_class
from gtp_vit.patching import host_of
from gtp_vit.recipes.defaults import DEFAULT_METHOD, default_method, deploy_method
from gtp_vit.recipes.recipe import DEPLOY, Recipe, is_recipe, read_recipe

Command = TypeVar("Command")
# Stands for the schedule of the default method if none is given, as it depends on the model.
MODEL_DEFAULT = "as patch(model)"


@dataclass(frozen=True)
class MethodFlags:
    """The flag --method; the flags of its settings are added by `parse_with_method`."""

    method: str = DEFAULT_METHOD.name
    """Name of a method, or a recipe; its settings are flags too. Without any, gtp_plus does what patch(model) does.
    deploy is gtp_plus with a schedule for engines."""


@dataclass(frozen=True)
class MethodChoice:
    """The method that the user chose, and which of its settings are given."""

    settings: Method
    given_settings: frozenset[str]  # names of the settings that were written as flags
    recipe: Recipe | None  # if --method names one
    uses_model_default: Callable[[Any], Method] = default_method  # the settings where the schedule depends on the model

    def for_model(self, model: Any) -> Method:
        """The settings for this model: GTP+ without a schedule does what patch(model) does, with the given flags."""
        host = host_of(model)
        if self.recipe is not None:
            self.recipe.check(host)
        if MODEL_DEFAULT not in vars(self.settings).values():
            return self.settings
        changes = {name: getattr(self.settings, name) for name in self.given_settings}
        return dataclasses.replace(self.uses_model_default(host), **changes)


def parse_flags(command: type[Command], arguments: Sequence[str]) -> Command:
    """The flags of a command; --help prints them and exits."""
    flags = flags_of(command)
    _show_help(command, arguments, flags)
    return build_command(command, {flag.field: value for flag, value in parse_arguments(arguments, flags).items()})


def parse_with_method(
    command: type[Command], arguments: Sequence[str], *, uses_model_default: bool = True
) -> tuple[Command, MethodChoice]:
    """The flags of a command, and the settings of its --method, which are flags too.

    Without `uses_model_default`, the settings of GTP+ without a schedule are those of its class.
    """
    own = flags_of(command)
    default = next(flag.default for flag in own if flag.field == "method")
    written = value_of_flag(arguments, "--method")
    name = str(default) if written is None else written
    recipe = read_recipe(name) if is_recipe(name) else None
    deploy = name == DEPLOY
    check_name("method", name, (*known_methods(), DEPLOY) if recipe is None else (name,))
    start = method_class(DEFAULT_METHOD.name if deploy else name)() if recipe is None else recipe.method
    if (uses_model_default or deploy) and recipe is None and type(start) is DEFAULT_METHOD:
        start = dataclasses.replace(start, **{str(DEFAULT_METHOD.schedule_field): MODEL_DEFAULT})
    taken = [spelling for flag in own for spelling in flag.spellings()]
    settings = flags_of(start, group=f"settings of {start.name}", taken=taken, prefix=start.name)
    _show_help(command, arguments, [*own, *settings])
    values = parse_arguments(arguments, [*own, *settings], unknown=_unknown_setting)
    changes = {flag.field: value for flag, value in values.items() if flag in settings}
    chosen = _with_calibration(dataclasses.replace(start, **changes))
    flags = build_command(command, {flag.field: value for flag, value in values.items() if flag in own})
    return flags, MethodChoice(chosen, frozenset(changes), recipe, deploy_method if deploy else default_method)


def _show_help(command: type[Any], arguments: Sequence[str], flags: Sequence[Flag]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(help_text(command, flags))
        raise SystemExit(0)


def _unknown_setting(written: str, named: Iterable[str]) -> UnknownNameError:
    """The error for an unknown flag; a setting of a different method is not a typing mistake."""
    setting = written[2:].replace("-", "_")
    owners = [m.name for m in known_methods().values() if setting in {field.name for field in dataclasses.fields(m)}]
    if not owners or not written.startswith("--"):
        return unknown_flag(written, named)
    has = "has" if len(owners) == 1 else "have"
    return UnknownNameError(
        f"{written} is not a setting of the chosen method; {' and '.join(owners)} {has} it: add --method {owners[0]}"
    )


def _with_calibration(settings: Method) -> Method:
    """The settings with the calibration of the recipe that their flag names."""
    named = getattr(settings, "calibration", None)
    if named is None or not is_recipe(named):
        return settings
    calibration = getattr(read_recipe(named).method, "calibration", None)
    if calibration is None:
        raise SettingError(f"--calibration is {named}, a recipe without one; make one with gtp-vit tune")
    return dataclasses.replace(settings, calibration=calibration)  # type: ignore[call-arg]
