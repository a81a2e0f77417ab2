"""The values of flags by their type: how words are read, and what they are called in errors and help."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from gtp_vit.errors import SettingError, short_repr

KINDS: dict[object, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a finite number", "numbers"),
    Path: ("a path", "paths"),
}
METAVARS: dict[object, str] = {int: "INT", float: "NUMBER", Path: "PATH"}


def value_of_type(written: str, arguments: Sequence[str], hint: object) -> Any:
    """The value of a type that `arguments` stand for, behind the flag `written`."""
    if "" in arguments and str not in map(_single, _parts(hint)):  # an empty path would be the current folder
        raise SettingError(f"{written} is empty; give {kind_of(hint)}, or remove it")
    for part in _parts(hint):
        try:
            return _converted(arguments, part)
        except ValueError:
            continue
    wrong = next((word for word in arguments if not _is_one(word, hint)), " ".join(arguments))
    raise SettingError(f"{written} is {short_repr(wrong)}; it must be {kind_of(hint)}")


def takes_many(hint: object) -> bool:
    """Are there several values of this type behind one flag?"""
    return any(get_origin(part) is tuple for part in _parts(hint))


def kind_of(hint: object) -> str:
    """The kind of a type's values, in words."""
    first = _parts(hint)[0]
    one, several = KINDS.get(_single(first), ("a name", "names"))
    if get_origin(first) is tuple and get_args(first)[-1] is not Ellipsis:
        return f"{len(get_args(first))} {several}"
    return f"{one}, or several {several}" if takes_many(hint) else one


def metavar_of(hint: object) -> str:
    """The placeholder of a type's value in a help text."""
    kinds = {_single(part) for part in _parts(hint)} - {type(None)}
    if len(kinds) > 1:  # a number, several, or a name such as linear:2:14
        return "SCHEDULE"
    name = METAVARS.get(next(iter(kinds)), "NAME")
    return f"{name} ..." if takes_many(hint) else name


def _parts(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _single(part: object) -> object:
    """The type of one value."""
    return get_args(part)[0] if get_origin(part) is tuple else part


def _converted(arguments: Sequence[str], part: object) -> object:
    """The words as a value of one type; ValueError if they are none."""
    if get_origin(part) is tuple:
        kinds = get_args(part)
        kinds = (kinds[0],) * len(arguments) if kinds[-1] is Ellipsis else kinds
        return tuple(_converted([word], kind) for word, kind in zip(arguments, kinds, strict=True))
    (word,) = arguments
    if part is int:
        number = int(word)
        if abs(number) >= 2**63:
            raise ValueError
        return number
    if part is float:
        if not math.isfinite(float(word)):
            raise ValueError
        return float(word)
    if part is type(None):
        if word != "None":
            raise ValueError
        return None
    return Path(word) if part is Path else word


def _is_one(word: str, hint: object) -> bool:
    """Can one word be read as a value of this type?"""
    for part in _parts(hint):
        try:
            _converted([word], _single(part))
        except ValueError:
            continue
        return True
    return False
