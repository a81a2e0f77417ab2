"""The parser of the command line: the fields of dataclasses are flags, and each mistake gets one line.

A field is a flag of the same name. Its type says what values it takes, its docstring is its help, and the class that
declares it is its group in the help text. `Annotated` adds what a type cannot say: Positional, Short, Choices, Range;
and Nested, for a field that is a dataclass of settings itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gtp_vit.cli.sources import flag_spelling, looks_like_flag, read_source
from gtp_vit.cli.values import kind_of, metavar_of, takes_many, value_of_type
from gtp_vit.core.ranges import Range
from gtp_vit.errors import SettingError, UnknownNameError, check_name, short_repr, unknown_flag

Value = TypeVar("Value")
Command = TypeVar("Command")


class PositionalMarker:
    """Marks a field whose value is written without a flag in front."""


Positional = Annotated[Value, PositionalMarker()]


@dataclass(frozen=True)
class Short:
    """A second spelling of a flag, e.g. -b."""

    spelling: str


@dataclass(frozen=True)
class Choices:
    """The values that a flag takes: the names in a registry, or a function that returns them."""

    names: Iterable[str] | Callable[[], Iterable[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names() if callable(self.names) else self.names)


@dataclass(frozen=True)
class Nested:
    """Marks a field that is a dataclass, whose fields are flags of the command."""

    names: Mapping[str, str] = field(default_factory=dict)  # of fields that are spelled differently as flags
    without: tuple[str, ...] = ()  # fields that are no flags
    group: str = ""  # the heading of its flags in the help; "" = the command's own


@dataclass(frozen=True, eq=False)
class Flag:
    """One flag, or one value that is written without a flag."""

    field: str  # of the command; a nested one with the outer field and a dot in front
    spelling: str
    hint: object  # the type of its value
    extras: tuple[object, ...]  # what `Annotated` adds
    default: object
    help: str
    group: str

    @property
    def positional(self) -> bool:
        return any(isinstance(extra, PositionalMarker) for extra in self.extras)

    @property
    def switch(self) -> bool:
        return self.hint is bool

    @property
    def takes_many(self) -> bool:
        """Does it take several values?"""
        return takes_many(self.hint)

    @property
    def shorts(self) -> list[str]:
        return [extra.spelling for extra in self.extras if isinstance(extra, Short)]

    @property
    def choices(self) -> list[str]:
        if get_origin(self.hint) is Literal:
            return list(get_args(self.hint))
        return [name for extra in self.extras if isinstance(extra, Choices) for name in extra]

    def spellings(self) -> list[str]:
        """Everything that can be written for it, but for its place."""
        own = [] if self.positional and self.field != "model" else [self.spelling]  # --model NAME, as in timm's scripts
        return [*own, *self.shorts, *([f"--no-{self.spelling[2:]}"] if self.switch else [])]

    @property
    def kind(self) -> str:
        """The kind of its values, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return kind_of(self.hint)

    @property
    def metavar(self) -> str:
        """The placeholder of its value in a help text."""
        if self.positional or self.field in ("model", "method"):
            name = self.field.upper()
        elif self.choices:
            name = f"{{{','.join(self.choices)}}}"
        else:
            return metavar_of(self.hint)
        return f"{name} ..." if self.takes_many else name

    def read(self, written: str, arguments: Sequence[str]) -> Any:
        """The value that `arguments` stand for, behind `written`."""
        if not arguments:
            raise SettingError(f"{written} needs a value: {self.kind}")
        for word in arguments if self.choices else ():
            check_name(written, word, self.choices)
        value = value_of_type(written, arguments, self.hint)
        self._check_range(value)
        return value

    def _check_range(self, value: object) -> None:
        for limit in (extra for extra in self.extras if isinstance(extra, Range)):
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                limit.check(self.spelling, number, whole=isinstance(number, int))


def flags_of(source: object, *, group: str = "", taken: Iterable[str] = (), prefix: str = "") -> list[Flag]:
    """The flags of a dataclass, or of an instance whose values are the defaults.

    Args:
        source: the dataclass, or an instance of it.
        group: the heading of its flags in the help; by default the name of the class that declares each.
        taken: spellings of other flags; a field that is spelled like one of these gets `prefix` in front.
        prefix: the name in front.
    """
    kind = source if isinstance(source, type) else type(source)
    hints = get_type_hints(kind, include_extras=True)
    flags = []
    for member in dataclasses.fields(kind):
        hint = hints[member.name]
        hint, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        default = member.default if source is kind else getattr(source, member.name)
        nested = next((extra for extra in extras if isinstance(extra, Nested)), None)
        if nested is not None:
            flags += _nested_flags(member.name, default, nested)
            continue
        name = f"{prefix}_{member.name}" if flag_spelling(member.name) in taken else member.name
        text, heading = _help(kind, member), group or _group(kind, member)
        flags.append(Flag(member.name, flag_spelling(name), hint, tuple(extras), default, text, heading))
    return flags


def _nested_flags(owner: str, settings: Any, nested: Nested) -> list[Flag]:
    """The flags of a field that is a dataclass; `settings` are its defaults."""
    return [
        dataclasses.replace(
            flag, field=f"{owner}.{flag.field}", spelling=flag_spelling(nested.names.get(flag.field, flag.field))
        )
        for flag in flags_of(settings, group=nested.group)
        if flag.field not in nested.without
    ]


def build_command(command: type[Command], values: Mapping[str, Any]) -> Command:
    """The command with these values, by field; those of nested fields have the outer field's name in front."""
    own: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    defaults = {field.name: field.default for field in dataclasses.fields(command)}  # type: ignore[arg-type]
    for name, value in values.items():
        owner, dot, inner = name.partition(".")
        if dot:
            own[owner] = dataclasses.replace(own.get(owner, defaults[owner]), **{inner: value})
    return command(**own)


def parse_arguments(
    arguments: Sequence[str],
    flags: Sequence[Flag],
    unknown: Callable[[str, Iterable[str]], UnknownNameError] = unknown_flag,
) -> dict[Flag, Any]:
    """The values that are written, by flag. `unknown` makes the error for a flag that is none of these."""
    named = {spelling: flag for flag in flags for spelling in flag.spellings()}
    values: dict[Flag, Any] = {}
    loose: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not looks_like_flag(word):
            loose.append(word)
            continue
        written, equals, value = word.partition("=")
        if written not in named:
            raise unknown(written, named)
        flag = named[written]
        if flag in values:
            raise SettingError(f"{written} is given twice; remove one of them")
        if flag.switch:
            if equals:
                raise SettingError(f"{written} takes no value; write {flag.spelling} or --no-{flag.spelling[2:]}")
            values[flag] = written == flag.spelling
            continue
        texts = [value] if equals else []
        while rest and not equals and (flag.takes_many or not texts) and not looks_like_flag(rest[0]):
            texts.append(rest.pop(0))
        values[flag] = flag.read(written, texts)
    return values | _read_positionals(loose, [flag for flag in flags if flag.positional and flag not in values], named)


def _read_positionals(arguments: Sequence[str], positionals: Sequence[Flag], named: Iterable[str]) -> dict[Flag, Any]:
    """The values that are written without a flag."""
    if "" in arguments:
        raise SettingError("an argument is empty; remove it")
    values, rest = {}, list(arguments)
    for place in positionals:
        if rest:
            texts, rest = (rest, []) if place.takes_many else (rest[:1], rest[1:])
            values[place] = place.read(place.metavar, texts)
    if rest:
        takes = " ".join(place.metavar for place in positionals)
        hint = f"expected at most: {takes}" if takes else "nothing is expected without a flag in front"
        hint = f"did you mean --{rest[0]}?" if f"--{rest[0]}" in named else hint
        raise UnknownNameError(f"unexpected argument {short_repr(rest[0])}; {hint}")
    return values


def _owners(kind: type, name: str) -> list[type]:
    """The classes that declare a field, the most derived first."""
    return [owner for owner in kind.__mro__ if name in inspect.get_annotations(owner)]


def _group(kind: type, member: dataclasses.Field[Any]) -> str:
    """The heading of a field: its metadata's `group`, or by the first class that declared it, its GROUP or its name.

    It is empty for a command's own; a command with more flags, made while the program runs, has the command's name.
    """
    if "group" in member.metadata:
        return str(member.metadata["group"])
    owner = _owners(kind, member.name)[-1]
    is_own = owner.__name__ == kind.__name__
    return (
        ""
        if is_own
        else vars(owner).get("GROUP") or owner.__name__.removesuffix("Flags").removesuffix("Config").lower()
    )


def _help(kind: type, member: dataclasses.Field[Any]) -> str:
    """The docstring below a field, or its metadata's `help`, for fields that are made from a registry."""
    if "help" in member.metadata:
        return str(member.metadata["help"])
    for owner in _owners(kind, member.name):
        path = Path(getattr(inspect.getmodule(owner), "__file__", None) or "")
        declaration = read_source(path).classes.get(owner.__name__) if path.is_file() else None
        if declaration is not None and member.name in declaration.fields:
            return declaration.fields[member.name].help
    return ""
