"""Flags that say how outputs are compared, made from the registered measures: their names, settings and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from torch import nn

from gtp_vit.cli.parser import Choices
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.registry import MEASURES, select_measure

Command = TypeVar("Command")


@dataclass(frozen=True)
class MeasureFlags:
    """By what measure a reduced model is compared with the unreduced one; `with_flags` adds the measures' settings."""

    measure: str = "auto"
    """How outputs are compared."""


def with_flags(command: type[Command], flags: Iterable[Any]) -> type[Command]:
    """The command with these fields as well: a name, a type, and a dataclass field with its help in the metadata."""
    extended = dataclasses.make_dataclass(command.__name__, flags, bases=(command,), frozen=True)
    extended.__doc__ = command.__doc__
    return extended


def measure_flags() -> list[tuple[str, Any, Any]]:
    """--measure, and the settings of every measure."""
    names = "; ".join(f"{name}: {measure.help}" for name, measure in MEASURES.items())
    text = f"How outputs are compared. {names}. auto chooses by what the model returns."
    kind = Annotated[str, Choices(("auto", *MEASURES))]
    return [
        ("measure", kind, dataclasses.field(default="auto", metadata={"help": text, "group": "measure"})),
        *(
            _flag(name, field, get_type_hints(measure))
            for name, measure in MEASURES.items()
            for field in _settings(measure)
        ),
    ]


def _settings(measure: type[Measure]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(measure) if field.name != "kind"]


def _flag(measure: str, field: dataclasses.Field[Any], hints: dict[str, Any]) -> tuple[str, Any, Any]:
    """The flag of a setting."""
    text = f"For --measure {measure}: {field.metadata['help']}."
    kind = field.metadata.get("type", hints[field.name])
    return field.name, kind, dataclasses.field(default=field.default, metadata={"help": text, "group": "measure"})


def measure_of_flags(flags: MeasureFlags, model: nn.Module) -> Measure:
    """The measure of the flags for this model."""
    settings = {
        field.name: getattr(flags, field.name)
        for measure in MEASURES.values()
        for field in _settings(measure)
        if getattr(flags, field.name) != field.default
    }
    return select_measure(model, flags.measure, **settings)
