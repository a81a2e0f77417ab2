"""gtp-vit COMMAND: which commands there are, and how errors and exit codes look.

Each command is a module with a dataclass, whose fields are its flags, and a `main`. Settings of the method chosen with
--method are flags too, generated from the method's own dataclass.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TextIO

from gtp_vit.cli.commands import COMMANDS, HELP, RESUME_FLAG
from gtp_vit.cli.help import listing
from gtp_vit.errors import GTPError, Incomplete, check_name, printable, shown


class Exit(IntEnum):
    """Exit codes of the command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCOMPLETE = 3  # done, but not all images could be read, or some outputs are not finite
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(_run_command, words, RESUME_FLAG.get(next(iter(words), "")))


def exit_code(run: Callable[[list[str]], None], words: Sequence[str], resume_flag: str | None) -> int:
    """Run a program on its words, and print what went wrong in one line; `resume_flag` says where it resumes from."""
    if sys.stderr is None:  # closed by whoever started the command
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        _complain("standard output is closed, so nothing can be answered; send it to a file, or to /dev/null")
        return Exit.FAILED
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _attempt(run, words, resume_flag)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
    except BrokenPipeError:  # the reader has enough, e.g. head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  nothing is left to flush at exit
        return Exit.FAILED
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on one line, without the place in our source."""
    _complain(str(message))


def _complain(text: str) -> None:
    """A line on standard error; names of files may have anything in them."""
    print(printable(f"gtp-vit: {text}".replace("\n", " ")), file=sys.stderr)


def _run_command(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(commands=listing(COMMANDS.items())))
        raise SystemExit(Exit.OK if words else Exit.USAGE)
    if words[0] == "--version":
        import gtp_vit

        print(f"gtp-vit {gtp_vit.__version__}")
        return
    name = check_name("command", words[0], COMMANDS)
    importlib.import_module(f"gtp_vit.cli.{name}").main(words[1:])


def _attempt(run: Callable[[list[str]], None], words: Sequence[str], resume_flag: str | None) -> Exit:
    debug = "--debug" in words
    try:
        run([word for word in words if word != "--debug"])
    except Incomplete as error:
        _complain(str(error))
        return Exit.INCOMPLETE
    except GTPError as error:
        if debug:
            raise
        _complain(str(error))
        return Exit.USAGE
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        kept = f"with {resume_flag} what was finished is kept, and the same command resumes from there"
        print(f"gtp-vit: interrupted; {kept if resume_flag else 'run it again'}", file=sys.stderr)
        return Exit.INTERRUPTED
    except SystemExit as stop:  # tyro has printed help (0) or what was wrong (2)
        return Exit.OK if stop.code in (0, None) else Exit.USAGE
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # asking whether it exists is enough
            _complain(f"{shown(error.filename)} is too long for the name of a file; give a shorter one")
            return Exit.USAGE
        _complain(f"{type(error).__name__}: {error} (--debug shows where)")
        return Exit.FAILED
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
