"""Errors for the user to fix: what was found, what is allowed and what to do, in one line."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from numbers import Integral, Real


class GTPError(ValueError):
    """The base of every error that gtp_vit raises on purpose."""


class UnknownNameError(GTPError):
    """A method, selection, graph, schedule or model name that does not exist."""


class SettingError(GTPError):
    """A setting that is out of range, in itself or for this model."""


class ScheduleError(SettingError):
    """A schedule that does not fit the model's depth or removes every image token."""


class InputError(GTPError):
    """Images that the model cannot take."""


class IncompleteError(GTPError):
    """The run finished, but some figures do not cover all images or are missing."""


class ChecksFailedError(GTPError):
    """Checks that a command was asked for have failed."""


class UnreadableImagesError(IncompleteError):
    """The run finished, but some images could not be read."""


class UnsupportedModelError(GTPError):
    """A model with modules that are not supported; it is left unchanged."""


def short_repr(value: object) -> str:
    """A value for an error text: on one line, and cut if it is long.

    >>> short_repr("a" * 200)[-8:]
    'aaaaa...'
    """
    if isinstance(value, int) and abs(value) > 10**50:  # Python refuses to print very long ones
        return "a number of more than 50 digits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def plural(number: int, one: str, many: str) -> str:
    """A number and what is counted.

    >>> plural(1, "image is", "images are"), plural(2, "image is", "images are")
    ('1 image is', '2 images are')
    """
    return f"{number} {one if number == 1 else many}"


def printable(text: str) -> str:
    r"""A text that a terminal, a log or a page shows as it is: what would control them is written as an escape.

    >>> printable("red\x1b[31m.jpg")
    'red\\x1b[31m.jpg'
    """
    return "".join(_escape(sign) if _is_control(sign) else sign for sign in text)


BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of writing


def _is_control(sign: str) -> bool:
    """Control characters, marks that turn the direction of writing, and bytes of a name that are no text."""
    return sign not in "\n\t" and (sign in BIDI_CONTROLS or unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp"))


def _escape(sign: str) -> str:
    return sign.encode("ascii", "backslashreplace").decode() if ord(sign) > 127 else f"\\x{ord(sign):02x}"


def check_name(kind: str, name: object, allowed: Iterable[str]) -> str:
    """Return `name` if it is one of `allowed`, else raise UnknownNameError with the closest matches.

    >>> check_name("graph", "mixd", ["mixed", "spatial"])
    Traceback (most recent call last):
    ...
    gtp_vit.errors.UnknownNameError: unknown graph 'mixd'; did you mean 'mixed'? Allowed: mixed, spatial
    """
    names = list(allowed)
    if name in names:
        return str(name)
    close = difflib.get_close_matches(str(name)[:100].lower(), names, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    raise UnknownNameError(f"unknown {kind} {short_repr(name)}{hint} Allowed: {', '.join(names)}")


def unknown_flag(flag: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a flag that is not among those of a command."""
    close = difflib.get_close_matches(flag, list(known), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "--help shows all of them"
    return UnknownNameError(f"unknown flag {short_repr(flag)}; {hint}")


def check_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    exclude_low: bool = False,
    integer: bool = False,
    why: str = "",
) -> None:
    """Raise SettingError unless low <= value <= high (low < value with `exclude_low`)."""
    fits = isinstance(value, Integral if integer else Real) and not isinstance(value, bool)
    if fits and low <= value <= high and not (exclude_low and value == low):  # type: ignore[operator]
        return
    left = "(" if exclude_low else "["
    span = f"{'an integer' if integer else 'a number'} in {left}{low:g}, {high:g}]"
    raise SettingError(f"{name} is {short_repr(value)}; it must be {span}{' ' + why if why else ''}")


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or the name of its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
