"""JSON that others may have written: its fields, asked for by name and kind."""

from __future__ import annotations

from gtp_vit.errors import GTPError, short_repr

MAX_SIZE = 10**6


class Fields:
    """An object of JSON; what is missing or of another kind raises GTPError that names the field."""

    def __init__(self, value: object, name: str = "") -> None:
        if not isinstance(value, dict):
            raise GTPError(f"{name or 'the description'} is {short_repr(value)}; it must have fields")
        self.values: dict[str, object] = value
        self.prefix = f"{name}." if name else ""

    def take(self, name: str) -> object:
        if name not in self.values:
            raise GTPError(f"{self.prefix}{name} is missing")
        return self.values[name]

    def section(self, name: str) -> Fields:
        return Fields(self.take(name), f"{self.prefix}{name}")

    def text(self, name: str, *, empty: bool = False) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not (value or empty):
            raise GTPError(f"{self.prefix}{name} is {short_repr(value)}; it must be a string")
        return value

    def list(self, name: str) -> list[object]:
        value = self.take(name)
        if not isinstance(value, list):
            raise GTPError(f"{self.prefix}{name} is {short_repr(value)}; it must be a list")
        return value

    def integer(self, name: str, most: int = MAX_SIZE) -> int:
        value = self.take(name)
        if not is_integer(value, most):
            raise GTPError(f"{self.prefix}{name} is {short_repr(value)}; it must be an integer from 1 to {most}")
        return int(value)  # type: ignore[call-overload]

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.take(name)
        if value not in allowed:
            raise GTPError(f"{self.prefix}{name} is {short_repr(value)}; here it must be {' or '.join(allowed)}")
        return str(value)


def is_integer(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30  # NaN is not
