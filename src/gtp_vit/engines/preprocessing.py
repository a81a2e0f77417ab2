"""The image preprocessing of a file, under timm's names; each value has been checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gtp_vit.data.transforms import INTERPOLATIONS
from gtp_vit.engines.fields import is_number
from gtp_vit.errors import GTPError, short_repr

CROPS = ("center", "squash", "border")


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of an image; None = not known."""

    mean: tuple[float, ...] | None = None  # for each channel, as std
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    interpolation: str | None = None
    processor: Mapping[str, object] | None = None  # settings of an image processor that timm has no words for

    @classmethod
    def from_dict(cls, words: Mapping[str, object], channels: int, prefix: str = "") -> Preprocessing:
        """The words that are of a preparation; raises GTPError that names the first that is not right."""
        own = {field.name: words[field.name] for field in dataclasses.fields(cls) if field.name in words}
        problem = _validation_error(own, channels)
        if problem is not None:
            raise GTPError(f"{prefix}{problem}")
        return cls(**{word: tuple(value) if isinstance(value, list) else value for word, value in own.items()})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The words that are known."""
        return {word: value for word, value in vars(self).items() if value is not None}


def _validation_error(fields: Mapping[str, object], channels: int) -> str | None:
    """The error in a preprocessing; None if there is none."""
    for word in ("mean", "std"):
        if word in fields and not _are_numbers(fields[word], channels):
            return f"{word} is {short_repr(fields[word])}; it must be a finite number for each of {channels} channels"
    if ("mean" in fields) != ("std" in fields):
        return f"{'mean' if 'mean' in fields else 'std'} is there alone; mean and std belong together"
    std = fields.get("std", ())
    if isinstance(std, (list, tuple)) and any(value <= 0 for value in std):
        return f"std is {short_repr(std)}; its numbers must be above 0"
    crop = fields.get("crop_pct", 1)
    if not (isinstance(crop, (int, float)) and is_number(crop) and 0 < crop <= 1):
        return f"crop_pct is {short_repr(crop)}; it must be a number above 0, at most 1"
    for word, allowed in (("crop_mode", CROPS), ("interpolation", INTERPOLATIONS)):
        if word in fields and fields[word] not in allowed:
            return f"{word} is {short_repr(fields[word])}; it must be one of {', '.join(allowed)}"
    if not isinstance(fields.get("processor", {}), dict):
        return f"processor is {short_repr(fields['processor'])}; it must be the settings of an image processor"
    return None


def _are_numbers(values: object, count: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == count and all(map(is_number, values))
