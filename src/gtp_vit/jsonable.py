"""Results as JSON has them: dataclasses become objects, and numbers that are not finite become null."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any


def jsonable(value: object) -> Any:
    """`value` with only what JSON has, all the way down.

    >>> jsonable({"kl": float("nan"), "layers": (1, 2)})
    {'kl': None, 'layers': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
