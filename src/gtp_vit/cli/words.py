"""The words of a command line, checked before the parser sees them: each mistake gets one line that says what to do.

tyro's own answers take a dozen lines, and it silently accepts a flag that is given twice, or without its value.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gtp_vit.errors import BadSetting, UnknownName, check_name, shown, unknown_flag
from gtp_vit.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag or a positional word, and which values it takes."""

    name: str  # as it is written
    hint: Any  # type of its value
    default: Any
    positional: bool

    @property
    def many(self) -> bool:
        """Does it take several values?"""
        return any(get_origin(part) is tuple for part in _parts(self.hint))


def flags_of(*sources: Any) -> tuple[dict[str, Flag], list[Flag]]:
    """The flags of some dataclasses by all their spellings, and the positional ones."""
    import tyro

    marker = get_args(tyro.conf.Positional[str])[1]
    named: dict[str, Flag] = {}
    places: list[Flag] = []
    for source in sources:
        hints = get_type_hints(source, include_extras=True)
        for field in dataclasses.fields(source):
            hint, *extras = get_args(hints[field.name]) if _is_annotated(hints[field.name]) else (hints[field.name],)
            flag = Flag(f"--{field.name.replace('_', '-')}", hint, field.default, marker in extras)
            if flag.positional:
                places.append(flag)
            if not flag.positional or field.name == "model":  # --model NAME, as timm's scripts have it
                named[flag.name] = flag
            if hint is bool:
                named[f"--no-{flag.name[2:]}"] = flag
            for alias in (alias for extra in extras for alias in getattr(extra, "aliases", None) or ()):
                named[alias] = flag
    return named, places


def check_words(words: Sequence[str], *sources: Any) -> None:
    """Raise on unknown and doubled flags, values that are missing or cannot be read, and words that do not belong."""
    if {"-h", "--help"} & set(words):
        return
    named, places = flags_of(*sources)
    seen: set[str] = set()
    loose: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not looks_like_flag(word):
            loose.append(word)
            continue
        written, equals, value = word.partition("=")
        flag = named.get(written) or _unknown(written, named)
        if flag.name in seen:
            raise BadSetting(f"{written} is given twice; leave one of them out")
        seen.add(flag.name)
        values = [value] if equals else []
        if flag.hint is bool:
            if equals:
                raise BadSetting(f"{written} takes no value; write {flag.name} or --no-{flag.name[2:]}")
            continue
        while rest and not equals and (flag.many or not values) and not looks_like_flag(rest[0]):
            values.append(rest.pop(0))
        _check_values(flag, written, values)
    if "--model" in seen and any(place.name == "--model" for place in places):
        places = [place for place in places if place.name != "--model"]
    _check_loose(loose, places, named)


def looks_like_flag(word: str) -> bool:
    """Is it -x or --xyz, but not a negative number?"""
    return re.match(r"-(?![\d.])", word) is not None


def _check_values(flag: Flag, written: str, values: Sequence[str]) -> None:
    kind = _kind(flag.hint)
    if not values:
        several = ", or several" if flag.many else ""
        raise BadSetting(f"{written} needs a value: {kind}{several} behind it")
    for value in values:
        if not value and str not in _parts(flag.hint):  # an empty path would be the current folder
            raise BadSetting(f"{written} is empty; give {kind}, or leave it out")
        if get_origin(flag.hint) is Literal:
            check_name(written, value, get_args(flag.hint))
        if not any(_reads(value, part) for part in _parts(flag.hint)):
            raise BadSetting(f"{written} is {shown(value)}; it must be {kind}")


def _check_loose(loose: Sequence[str], places: Sequence[Flag], named: Iterable[str]) -> None:
    """Raise if there are more words without a flag than places for them."""
    if "" in loose:
        raise BadSetting("a word of the command is empty; leave it out")
    if any(place.many for place in places) or len(loose) <= len(places):
        return
    word = loose[len(places)]
    takes = " and ".join(f"one {place.name[2:]}" for place in places) or "none"
    hint = f"did you mean --{word}?" if f"--{word}" in named else f"without a flag in front it takes {takes}"
    raise UnknownName(f"the word {shown(word)} has no place in this command; {hint}")


def _unknown(written: str, named: Iterable[str]) -> Flag:
    """Raise with close matches; a setting of a different method is not a typing mistake."""
    setting = written[2:].replace("-", "_")
    owners = [m.name for m in METHODS.values() if setting in {field.name for field in dataclasses.fields(m)}]
    if owners and written.startswith("--"):
        has = "has" if len(owners) == 1 else "have"
        raise UnknownName(
            f"{written} is no setting of the chosen method; {' and '.join(owners)} {has} it: add --method {owners[0]}"
        )
    raise unknown_flag(written, named)


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _reads(value: str, hint: Any) -> bool:
    """Can this word be read as a value of this type?"""
    if get_origin(hint) is tuple:
        return _reads(value, get_args(hint)[0])
    try:
        if hint is int:
            return abs(int(value)) < 2**63
        if hint is float:
            return math.isfinite(float(value))
    except ValueError:
        return False
    return hint is not type(None) or value == "None"


def _kind(hint: Any) -> str:
    """The first type of a hint in words."""
    part = _parts(hint)[0]
    part = get_args(part)[0] if get_origin(part) is tuple else part
    return {int: "a whole number", float: "a finite number", Path: "a path"}.get(part, "a name")
