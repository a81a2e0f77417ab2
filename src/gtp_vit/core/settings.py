"""The types of a method's settings, checked in one place from the annotations of its dataclass.

Settings come from Python, from flags and from untrusted files. What passes is plain Python that can be hashed and
stored as JSON; whether a number suits a model is checked by the method.
"""

from __future__ import annotations

import functools
import math
import types
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gtp_vit.errors import BadSetting, shown

LARGEST = 2**63 - 1  # a whole number that torch can hold
LONGEST = 4096  # entries of a list, characters of a text
LONGEST_LEARNED = 2**20  # characters of a text that holds what was learned: some 100,000 for a large model


def checked(owner: type, name: str, value: object) -> Any:
    """`value` converted to the type of the field `name` of `owner`, lists to tuples; raises BadSetting."""
    hint = _hints(owner)[name]
    longest = LONGEST_LEARNED if name in getattr(owner, "learned_texts", ()) else LONGEST
    found = _fitting(value, hint, longest)
    if found is WRONG:
        raise BadSetting(f"{name} is {shown(value)}; it must be {' or '.join(dict.fromkeys(_words(hint)))}")
    return found


WRONG = object()


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _fitting(value: object, hint: object, longest: int = LONGEST) -> object:
    """`value` converted to this type, or WRONG."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next(
            (found for found in (_fitting(value, part, longest) for part in parts) if found is not WRONG), WRONG
        )
    if origin is tuple:  # tuple[int, ...], where a single entry needs no brackets, or tuple[int, int]
        entries = value if isinstance(value, (list, tuple)) else (value,)
        fits = len(entries) <= LONGEST if parts[-1] is ... else len(entries) == len(parts)
        found = tuple(_fitting(entry, parts[0]) for entry in entries) if fits else (WRONG,)
        return WRONG if WRONG in found else found
    if hint is bool or hint is type(None):
        return value if isinstance(value, hint) else WRONG
    if hint is int:
        if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= LARGEST:
            return int(value)
        return WRONG
    if hint is float:
        if isinstance(value, Integral):
            return _fitting(value, int)
        return float(value) if isinstance(value, Real) and math.isfinite(value) else WRONG
    if hint is str or origin is Literal:  # names are checked where they are used, with a hint
        return value if isinstance(value, str) and len(value) <= longest else WRONG
    return tuple(value) if isinstance(value, list) else value  # a type that the method checks itself


def _words(hint: object) -> list[str]:
    """The names of a type for an error text."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for part in parts for word in _words(part)]
    if origin is tuple:
        number = "" if parts[-1] is ... else f"{len(parts)} "
        return [f"a list of {number}{_words(parts[0])[0].removeprefix('a ')}s"]
    if origin is Literal:
        return [f"one of {', '.join(map(str, parts))}"]
    known: dict[object, str] = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        type(None): "None",
    }
    return [known.get(hint, str(hint))]
