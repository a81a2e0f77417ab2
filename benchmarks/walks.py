"""The files that a call goes through, in the order of the first visit: python benchmarks/walks.py [patch forward ...]

A hop is a call of a function in another file than the one before. Of a patched model the forward pass is the second
one, so that nothing is loaded or chosen in it; commands are imported
before. patch-default is `patch(model)`, without a method, which finds a schedule for the model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gtp_vit
from gtp_vit import GTPPlus, create_model, patch
from gtp_vit.cli.app import main as command
from gtp_vit.errors import check_name

PACKAGE = f"{Path(gtp_vit.__file__).parent}/"
FEW = ("--limit", "20", "--batch-size", "10", "--workers", "0")
SHOWN = 24  # files


class Walk:
    """Files of the package while it is open, in the order of the first visit, and the hops between them."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.hops = 0
        self._last = ""

    def __enter__(self) -> Walk:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not a module or the body of a class
        if event != "call" or not path.startswith(PACKAGE) or not function:
            return
        name = path.removeprefix(PACKAGE).removesuffix(".py")
        if name != self._last:
            self._last, self.hops = name, self.hops + 1
        if name not in self.files:
            self.files.append(name)


def walks(folder: Path) -> dict[str, Callable[[], object]]:
    """What is walked through, by its name."""
    model = create_model("fashion_vit")
    fast = patch(model, GTPPlus())
    images = torch.zeros(1, 1, 28, 28)

    def forward() -> None:
        with torch.inference_mode():
            fast(images)

    forward()
    for name in ("compare", "tune", "export", "embed"):
        importlib.import_module(f"gtp_vit.cli.commands.{name}")
    few = ("--images", "20", "--batch-size", "10", "--workers", "0")
    return {
        "patch": lambda: patch(model, GTPPlus()),
        "patch-default": lambda: patch(model),
        "forward": forward,
        "compare": lambda: run("compare", "--methods", "gtp_plus", "tome", *FEW, "--rounds", "0", output=folder / "c"),
        "tune": lambda: run("tune", "--macs", "0.65", "--search-passes", "3", *few, output=folder / "recipe.json"),
        "export": lambda: run("export", "--format", "onnx", output=folder / "e"),
        "embed": lambda: run("embed", *FEW, output=folder / "v"),
    }


def run(*words: str, output: Path) -> None:
    """A command, quietly."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command([*words, "--output", str(output)])
    if code:
        raise SystemExit(f"{' '.join(words)}: exit code {int(code)}\n{said.getvalue()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="what to walk through; by default all")
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory() as folder:
        calls = walks(Path(folder))
        for name in names:
            check_name("walk", name, calls)
        for name, call in calls.items():
            if names and name not in names:
                continue
            with Walk() as walk:
                call()
            more = f" > ... ({len(walk.files) - SHOWN} more)" if len(walk.files) > SHOWN else ""
            print(f"{name}: {len(walk.files)} files, {walk.hops} hops\n  {' > '.join(walk.files[:SHOWN])}{more}")


if __name__ == "__main__":
    main()
