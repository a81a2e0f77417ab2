"""Ranges of numbers, written once where a field is declared: its dataclass checks them, and so does its flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from gtp_vit.errors import check_range


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number that a field takes, as an addition to its type in `Annotated`."""

    low: float
    high: float
    exclude_low: bool = False  # is the smallest one not allowed itself?
    why: str = ""

    def check(self, name: str, value: object, *, whole: bool = False) -> None:
        check_range(name, value, self.low, self.high, exclude_low=self.exclude_low, integer=whole, why=self.why)


def check_ranges(settings: object) -> None:
    """Raise SettingError unless every field of a dataclass is in the range that its type has; None is not checked."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        kind, *extras = get_args(hint)
        whole = float not in (kind, *get_args(kind))
        for limit in (extra for extra in extras if isinstance(extra, Range)):
            if (value := getattr(settings, name)) is not None:
                limit.check(name, value, whole=whole)
