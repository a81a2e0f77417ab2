"""A new process in a blink: forked from a server that has loaded torch and the package, and done nothing else.

Three tests start Python itself, as a user does: tests/cli/test_cli.py, tests/runs/test_distributed.py (torchrun) and
tests/repository/test_architecture.py (what an import loads).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

START_METHOD = multiprocessing.get_start_method()
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.nn", "timm", "gtp_vit.cli.app", "support.process"])


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def start_python(code: str, *words: object, output: Path | None = None) -> BaseProcess:
    """Run code with these words as its arguments, in a session of its own; it prints to files in `output` if given."""
    process = CONTEXT.Process(target=_main, args=(code, tuple(map(str, words)), output))
    with _arguments_of_an_empty_program():
        process.start()
    return process


def run_python(code: str, *words: object) -> Done:
    """Run code to its end."""
    with TemporaryDirectory() as folder:
        process = start_python(code, *words, output=Path(folder))
        process.join()
        texts = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    assert process.exitcode is not None
    return Done(process.exitcode, *texts)


@contextlib.contextmanager
def _arguments_of_an_empty_program():
    """multiprocessing runs the parent's main module again in the child: here that would be pytest."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def _main(code: str, words: tuple[str, ...], output: Path | None) -> None:
    os.setsid()
    multiprocessing.set_start_method(START_METHOD, force=True)  # readers are its own children, as in any program
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.devnull if output is None else output / name
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *words]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
