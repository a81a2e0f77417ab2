"""gtp-vit methods: which methods there are, and what can be set."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import OutputFlags, print_table_result
from gtp_vit.cli.parser import Positional
from gtp_vit.core.reducer import Method
from gtp_vit.methods import known_methods, method_class


@dataclass(frozen=True)
class Methods(OutputFlags):
    """List the methods, or with a name the settings of one.

    examples:
      gtp-vit methods
      gtp-vit methods gtp
    """

    name: Positional[str] = ""
    """A method, to see its settings and their defaults."""


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(Methods, arguments)
    if flags.name:
        method = method_class(flags.name)
        defaults = {field.name: field.default for field in dataclasses.fields(method)}
        rows = [[f"--{name.replace('_', '-')}", repr(value)] for name, value in defaults.items()]
        title = f"{method.name}: {_summary(method)}"
        print_table_result(flags, arguments, title, ["setting", "default"], rows, defaults)
        return
    rows = [
        [
            m.name,
            _summary(m),
            "needed" if m.needs_class_token else "",
            m.trained_parts,
            m.source.licence,
        ]
        for m in known_methods().values()
    ]
    columns = ["method", "what it does", "class token", "learned parts", "licence of the original"]
    print_table_result(flags, arguments, "methods", columns, rows)


def _summary(method: type[Method]) -> str:
    """The first line of a method's docstring."""
    return (method.__doc__ or "").splitlines()[0]
