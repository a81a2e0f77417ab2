"""The command gtp-vit: answers at once what needs no model, and imports the rest, which takes seconds, only for work.

Importing anything of the package gtp_vit imports torch. So this is a package of its own, which reads three small files
of gtp_vit without it (commands, help, errors), and the names of flags from the sources.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from gtp_vit_command.flags import known_words, named_flags

SOURCE = Path(__file__).resolve().parent.parent / "gtp_vit"
USAGE, INTERRUPTED = 2, 130  # as gtp_vit.cli.app.Exit has them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = None if None in (sys.stdout, sys.stderr) else quick_answer(words)
        if code is not None:
            sys.stdout.flush()  # here, where a closed pipe can still be caught
            return code
        from gtp_vit.cli.app import main as run
    except KeyboardInterrupt:
        print("gtp-vit: interrupted; run it again", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has enough, e.g. head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  nothing is left to flush at exit
        return 1
    return run(words)


def quick_answer(words: Sequence[str]) -> int | None:
    """Print what needs no model, and return the exit code; None if there is work to do."""
    rest = [word for word in words if word != "--debug"]
    commands = _module("cli/commands")
    if not rest or rest[0] in ("-h", "--help"):
        print(commands.HELP.format(commands=_module("cli/help").listing(commands.COMMANDS.items())))
        return 0 if rest else USAGE
    errors = _module("errors")
    try:
        name = errors.check_name("command", rest[0], commands.COMMANDS) if rest[0] != "--version" else ""
        _check_flags(name, rest[1:], errors)
    except errors.GTPError as error:
        print(errors.printable(f"gtp-vit: {error}".replace("\n", " ")), file=sys.stderr)
        return USAGE
    if name == "models" and not {"-h", "--help"} & set(rest):
        print(
            "gtp-vit: building each model without weights, up to a minute for all of them", file=sys.stderr, flush=True
        )
    return None


def _check_flags(name: str, words: Sequence[str], errors: ModuleType) -> None:
    """Raise for a flag that no command and no method has; all other mistakes are found where flags are read."""
    if not name or {"-h", "--help"} & set(words):
        return
    for word in words:
        written = word.partition("=")[0]
        if re.match(r"-(?![\d.])", word) and written not in known_words(SOURCE):
            raise errors.unknown_flag(written, named_flags(SOURCE, name, words))


@cache
def _module(name: str) -> ModuleType:
    """A file of gtp_vit that needs no other of its files."""
    path = SOURCE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gtp_vit_command._{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
