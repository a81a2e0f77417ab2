"""The flags of targets, made from their registry: one for each, with its range and help."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from gtp_vit.core.ranges import Range
from gtp_vit.errors import SettingError
from gtp_vit.metrics.base import Measure
from gtp_vit.tuning.settings import COSTS, Target, target_bounds


def target_flags() -> list[tuple[str, Any, Any]]:
    """A flag for each target: a name, a type, and a dataclass field with its help, as `with_flags` takes them."""
    flags = []
    for name, bounds in target_bounds().items():
        low, high = min(bound.low for _, bound in bounds), max(bound.high for _, bound in bounds)
        owners: dict[str, list[str]] = {}
        for measure, bound in bounds:
            owners.setdefault(bound.help, []).append(measure)
        texts = [f"{text} ({', '.join(names)})" if len(owners) > 1 else text for text, names in owners.items()]
        start = "Target: " if bounds[0][1] in COSTS else "Target: the cheapest schedule with "
        field = dataclasses.field(default=None, metadata={"help": f"{start}{', or '.join(texts)}.", "group": "target"})
        flags.append((name, Annotated[float | None, Range(low, high, exclude_low=True)], field))
    return flags


def target_of_flags(flags: Any, default: Target, measure: str | Measure = "auto") -> Target:
    """The one target of the flags, or the default; raises SettingError if there are several."""
    values = {name: getattr(flags, name) for name in target_bounds() if getattr(flags, name) is not None}
    if len(values) > 1:
        raise SettingError(f"{len(values)} targets are given; give one of {', '.join(target_bounds())}")
    name, value = next(iter(values.items()), (default.name, default.value))
    return Target(name, value, measure)
