"""Provenance and measurements of a recipe's settings: the typed halves of its JSON.

A field that has its default is left out of the file.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from gtp_vit.core.settings import coerce_setting
from gtp_vit.errors import SettingError, check_name, short_repr

Part = TypeVar("Part")


@dataclass(frozen=True)
class Finetuning:
    """The finetuning of a model with the settings."""

    settings: Mapping[str, object] = field(default_factory=dict)  # of the training
    step: int = 0  # done when this was written
    steps: int = 0  # of the whole run


@dataclass(frozen=True)
class Provenance:
    """The origin of a recipe's settings; what does not apply to a recipe has its default."""

    by: str = ""  # which program
    version: str = ""  # of this package
    target: Mapping[str, float] = field(default_factory=dict)  # its name and value
    limits: Mapping[str, int | None] = field(default_factory=dict)  # what the schedule had to respect
    calibration: str = ""  # how a search's calibration went, in one line
    data: str = ""  # what the images were
    seed: int | None = None
    images: int | None = None  # calibrated on
    fit: tuple[float | None, ...] = ()  # share of the variance that each layer's probe explains
    registers: tuple[int, ...] = ()  # cells
    candidates: int | None = None  # of a search
    interrupted: bool = False  # was the search ended before its time?
    minutes: float | None = None
    restore: bool = False  # was the model patched with restore?
    finetuned: Finetuning | None = None


@dataclass(frozen=True)
class SampleFigures:
    """Figures of a measure over some images."""

    figures: Mapping[str, float | None] = field(default_factory=dict)
    images: int = 0


@dataclass(frozen=True)
class EngineFigures(SampleFigures):
    """Figures of the reduced model in an engine, against the unreduced one in torch."""

    name: str = ""
    precision: str = "f32"


@dataclass(frozen=True)
class SpeedUp:
    """The speed relative to the unreduced model."""

    median: float
    quartiles: tuple[float, float]
    batch: int
    threads: int
    engine: str = "torch"
    precision: str = "f32"


@dataclass(frozen=True)
class Measurements:
    """The measurements of a recipe's settings: costs, and the figures of its measure."""

    macs: int | None = None  # for one image
    fraction: float | None = None  # of the unreduced model's
    measure: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)  # on the images of the search
    images: int = 0
    held_out: SampleFigures | None = None  # on those that it did not see
    speedup: SpeedUp | None = None
    engine: EngineFigures | None = None
    validation: Mapping[str, float | None] = field(default_factory=dict)  # the latest while finetuning


@dataclass(frozen=True, eq=False)
class Origin:
    """The recipe that the settings of a patched model are from, and the weights it was patched with."""

    provenance: Provenance
    measured: Measurements
    weights: Tensor  # fingerprint


def without_defaults(part: object) -> dict[str, Any]:
    """A part of a recipe as JSON."""
    from gtp_vit.jsonable import jsonable

    stored: dict[str, Any] = {}
    for member in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, member.name)
        missing = member.default_factory() if member.default_factory is not dataclasses.MISSING else member.default
        if value != missing:
            stored[member.name] = without_defaults(value) if dataclasses.is_dataclass(value) else jsonable(value)
    return stored


def read_part(kind: type[Part], name: str, stored: object) -> Part:
    """A part of a recipe from its JSON, checked; raises SettingError."""
    if not isinstance(stored, dict):
        raise SettingError(f"{name} is {short_repr(stored)}; it must be a dictionary")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in stored.items():
        hint = hints[check_name(f"key of {name}", key, hints)]
        inner = next((part for part in _alternatives(hint) if dataclasses.is_dataclass(part)), None)
        if inner is not None:
            values[key] = read_part(inner, f"{name}.{key}", value)  # type: ignore[arg-type]
        elif get_origin(hint) is not None and issubclass(_plain(hint), Mapping):
            values[key] = _mapping(f"{name}.{key}", value, only_numbers=get_args(hint)[1] is not object)
        else:
            values[key] = coerce_setting(kind, key, value)
    try:
        return kind(**values)
    except TypeError:
        needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]  # type: ignore[arg-type]
        raise SettingError(f"{name} lacks {', '.join(key for key in needed if key not in values)}") from None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _plain(hint: Any) -> type:
    """The class behind a type; object for a union."""
    origin = get_origin(hint)
    return origin if isinstance(origin, type) else object


def _mapping(name: str, value: object, *, only_numbers: bool) -> dict[str, Any]:
    """Names and what they stand for; null is a number that was not finite."""
    if not isinstance(value, dict):
        raise SettingError(f"{name} is {short_repr(value)}; it must be a dictionary")
    for key, number in value.items() if only_numbers else ():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise SettingError(f"{name}.{key} is {short_repr(number)}; it must be a number")
    return dict(value)
