"""The types of a method's settings, checked in one place from the annotations of its dataclass.

Settings come from Python, from flags and from untrusted files. What passes is plain Python that can be hashed and
stored as JSON; whether a number suits a model is checked by the method.
"""

from __future__ import annotations

import functools
import math
import re
import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gtp_vit.errors import SettingError, short_repr

MAX_INT = 2**63 - 1  # the largest integer that torch can hold
MAX_LENGTH = 4096  # entries of a list, characters of a string
MAX_OPAQUE_LENGTH = 2**20  # characters of a string that holds what was learned: some 100,000 for a large model


def coerce_setting(owner: type, name: str, value: object) -> Any:
    """`value` converted to the type of the field `name` of `owner`, lists to tuples; raises SettingError."""
    hint = _hints(owner)[name]
    longest = MAX_OPAQUE_LENGTH if name in getattr(owner, "opaque_fields", ()) else MAX_LENGTH
    coerced = _coerce(value, hint, longest)
    if coerced is _INVALID:
        raise SettingError(f"{name} is {short_repr(value)}; it must be {' or '.join(dict.fromkeys(_type_names(hint)))}")
    return coerced


_INVALID = object()


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _coerce(value: object, hint: object, max_length: int = MAX_LENGTH) -> object:
    """`value` converted to this type, or _INVALID."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next(
            (fit for fit in (_coerce(value, part, max_length) for part in parts) if fit is not _INVALID), _INVALID
        )
    if origin is tuple:  # tuple[int, ...], where a single entry needs no brackets, or tuple[int, int]
        entries = value if isinstance(value, (list, tuple)) else (value,)
        fits = len(entries) <= MAX_LENGTH if parts[-1] is ... else len(entries) == len(parts)
        coerced = tuple(_coerce(entry, parts[0]) for entry in entries) if fits else (_INVALID,)
        return _INVALID if _INVALID in coerced else coerced
    if hint is bool or hint is type(None):
        return value if isinstance(value, hint) else _INVALID
    if hint is int:
        if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= MAX_INT:
            return int(value)
        return _INVALID
    if hint is float:
        if isinstance(value, Integral):
            return _coerce(value, int)
        return float(value) if isinstance(value, Real) and math.isfinite(value) else _INVALID
    if hint is str or origin is Literal:  # names are checked where they are used, with a hint
        return value if isinstance(value, str) and len(value) <= max_length else _INVALID
    return tuple(value) if isinstance(value, list) else value  # a type that the method checks itself


def _type_names(hint: object) -> list[str]:
    """The names of a type for an error text."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for part in parts for word in _type_names(part)]
    if origin is tuple:
        number = "" if parts[-1] is ... else f"{len(parts)} "
        return [f"a list of {number}{re.sub(r'^an? ', '', _type_names(parts[0])[0])}s"]
    if origin is Literal:
        return [f"one of {', '.join(map(str, parts))}"]
    known: dict[object, str] = {
        bool: "True or False",
        int: "an integer",
        float: "a finite number",
        str: "a string",
        type(None): "None",
    }
    return [known.get(hint, str(hint))]
