"""Flags that say how outputs are compared, made from the registered measures: their names, settings and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import tyro
from torch import nn

from gtp_vit.errors import check_name
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.registry import MEASURES, measure_of

Command = TypeVar("Command")


@dataclass(frozen=True)
class MeasureFlags:
    """By what measure a reduced model is compared with the unreduced one; `with_flags` adds the measures' settings."""

    measure: str = "auto"
    """How outputs are compared."""


class Flag(NamedTuple):
    """A flag of a command that is made from a registry."""

    name: str
    type: Any
    default: Any
    help: str


def with_flags(command: type[Command], flags: Iterable[Flag]) -> type[Command]:
    """The command with more flags, or with other help for those it has."""
    fields: list[Any] = [
        (flag.name, Annotated[flag.type, tyro.conf.arg(help=flag.help)], dataclasses.field(default=flag.default))
        for flag in flags
    ]
    made = dataclasses.make_dataclass(command.__name__, fields, bases=(command,), frozen=True)
    made.__doc__ = command.__doc__
    return made


def measure_flags() -> list[Flag]:
    """--measure, and the settings of every measure."""
    names = "; ".join(f"{name}: {each.help}" for name, each in MEASURES.items())
    text = f"How outputs are compared. {names}. auto chooses by what the model returns."
    return [
        Flag("measure", str, "auto", text),
        *(_flag(name, field, get_type_hints(each)) for name, each in MEASURES.items() for field in _settings(each)),
    ]


def _settings(measure: type[Measure]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(measure) if field.name != "kind"]


def _flag(measure: str, field: dataclasses.Field[Any], hints: dict[str, Any]) -> Flag:
    """The flag of a setting."""
    text = f"For --measure {measure}: {field.metadata['help']}."
    return Flag(field.name, field.metadata.get("type", hints[field.name]), field.default, text)


def check_measure(flags: MeasureFlags) -> None:
    """Refuse a measure that does not exist, before a model is made."""
    check_name("--measure", flags.measure, ("auto", *MEASURES))


def chosen_measure(flags: MeasureFlags, model: nn.Module) -> Measure:
    """The measure of the flags for this model."""
    settings = {
        field.name: getattr(flags, field.name)
        for each in MEASURES.values()
        for field in _settings(each)
        if getattr(flags, field.name) != field.default
    }
    return measure_of(model, flags.measure, **settings)
