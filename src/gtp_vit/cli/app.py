"""gtp-vit COMMAND: which commands there are, and how errors and exit codes look.

A command is a module of this folder and a line in COMMANDS. The module has a dataclass of the command's name, whose
fields are its flags, and a `main`. It is imported when the command runs: --help, --version and misspelled words are
answered before anything of this package imports torch.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TextIO

from gtp_vit.cli.help import listing
from gtp_vit.cli.sources import check_flag_names
from gtp_vit.errors import ChecksFailedError, GTPError, IncompleteError, check_name, printable, short_repr
from gtp_vit.version import __version__

COMMANDS = {
    "tour": "Half a minute on a small model in the package: what it does, and a page with pictures",
    "benchmark": "Measure the speed-up of a method on this machine, with per-layer cost",
    "evaluate": "Accuracy with a method on your images, against the unreduced model",
    "compare": "All methods at equal MACs on the same images: table, plot, page",
    "tune": "Search the schedule that meets a target with the least change",
    "embed": "Embeddings of a folder or data set, to files; distributed and resumable",
    "export": "Write a model to a file for an engine (ONNX Runtime, phones), checked there",
    "finetune": "Train with a method active, on one machine or many; no labels needed",
    "visualise": "Pictures of what is left of an image after each layer, and where the rest went",
    "demo": "An interactive web page on this machine: try methods on your images",
    "models": "List the models that can be patched",
    "methods": "List the methods and their settings",
    "macs": "Count MACs and tokens of each layer, without running the model",
    "check": "Show versions, hardware and known traps of this machine",
}
HELP = """\
usage: gtp-vit COMMAND [flags]

Make a pre-trained Vision Transformer faster in one call, without finetuning.

examples:
  gtp-vit benchmark deit_small_patch16_224 --batch-size 8
  gtp-vit macs vit_base_patch8_224 --method gtp --propagate linear:10:40
  gtp-vit check

commands (gtp-vit COMMAND --help shows its flags):
{commands}

--debug, after any command, shows where an error comes from.
"""


class ExitCode(IntEnum):
    """Exit codes of the command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCOMPLETE = 3  # done, but not all images could be read, or some outputs are not finite
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(_run_command, words, lambda: _resume_flag(words[0]))


def exit_code(run: Callable[[list[str]], None], arguments: Sequence[str], resume_flag: Callable[[], str | None]) -> int:
    """Run a program on its words, and print what went wrong in one line.

    `resume_flag` is asked after an interruption: which flag says where the program resumes from, if it does?
    """
    if sys.stderr is None:  # closed by whoever started the command
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        _print_error("standard output is closed, so nothing can be answered; send it to a file, or to /dev/null")
        return ExitCode.FAILED
    try:
        with warnings.catch_warnings(), _no_interrupt_is_lost():
            warnings.showwarning = _show_warning
            code = _run_with_errors(run, arguments, resume_flag)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
    except BrokenPipeError:  # the reader has enough, e.g. head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  nothing is left to flush at exit
        return ExitCode.FAILED
    return code


@contextlib.contextmanager
def _no_interrupt_is_lost() -> Iterator[None]:
    """Interrupt again where Ctrl-C came in a callback of Python's own, which prints it and goes on.

    An import has such callbacks. Not at once, as this would come in a callback as well.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _interrupt_ends_at_once() -> Iterator[None]:
    """End the process at Ctrl-C: while libraries are imported there is nothing to keep, and some crash at it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def end(*_: object) -> None:
        os.write(2, b"gtp-vit: interrupted; run it again\n")
        os._exit(ExitCode.INTERRUPTED)

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on one line, without the place in our source."""
    _print_error(str(message))


def _print_error(text: str) -> None:
    """A line on standard error; names of files may have anything in them."""
    print(printable(f"gtp-vit: {text}".replace("\n", " ")), file=sys.stderr)


def _run_command(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(commands=listing(COMMANDS.items())))
        raise SystemExit(ExitCode.OK if arguments else ExitCode.USAGE)
    if arguments[0] == "--version":
        print(f"gtp-vit {__version__}")
        return
    name = check_name("command", arguments[0], COMMANDS)
    check_flag_names(name, arguments[1:])
    with _interrupt_ends_at_once():
        command = importlib.import_module(f"gtp_vit.cli.commands.{name}")
    command.main(arguments[1:])


def _run_with_errors(
    run: Callable[[list[str]], None], arguments: Sequence[str], resume_flag: Callable[[], str | None]
) -> ExitCode:
    debug = "--debug" in arguments
    try:
        run([word for word in arguments if word != "--debug"])
    except IncompleteError as error:
        _print_error(str(error))
        return ExitCode.INCOMPLETE
    except ChecksFailedError as error:
        _print_error(str(error))
        return ExitCode.FAILED
    except GTPError as error:
        if debug:
            raise
        _print_error(str(error))
        return ExitCode.USAGE
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        flag = resume_flag()
        resumable = f"with {flag} what was finished is kept, and the same command resumes from there"
        print(f"gtp-vit: interrupted; {resumable if flag else 'run it again'}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except SystemExit as stop:  # help was printed
        return ExitCode.OK if stop.code in (0, None) else ExitCode.USAGE
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # asking whether it exists is enough
            _print_error(f"{short_repr(error.filename)} is too long for the name of a file; give a shorter one")
            return ExitCode.USAGE
        _print_error(f"{type(error).__name__}: {error} (--debug shows where)")
        return ExitCode.FAILED
    return ExitCode.OK


def _resume_flag(command: str) -> str | None:
    """The flag that says where an interrupted command resumes from; None if it does not, or had not begun."""
    flags = getattr(sys.modules.get(f"gtp_vit.cli.commands.{command}"), command.capitalize(), None)
    if not hasattr(flags, "restart"):
        return None
    return "--results-file" if hasattr(flags, "results_file") else "--output"


if __name__ == "__main__":
    sys.exit(main())
