"""All that a new engine is: one file like this one, and one line in ENGINES.

It runs programs of torch.export, one image at a time; another Python, which needs torch only, writes its files.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from gtp_vit.engines.engine import F32, METADATA, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.graph import Graph, Port, StoredFile

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

CONVERTER = """
import sys, torch
program, path, metadata = sys.argv[1:]
torch.export.save(torch.export.load(program), path, extra_files={"gtp_vit": metadata})
"""


class ToyEngine(Engine):
    """Files that end in .toy."""

    name = "toy"
    title = "Toy Engine"
    format = "toy"
    suffix = ".toy"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32}
    packages = ("torch",)
    extra = "toy"
    batch = 1

    def convert(
        self,
        program: Program,
        path: Path,
        precision: str,
        images: Array | None,
        metadata: str,
        *,
        tune_smoothing: bool = True,
    ) -> None:
        made = program.folder / "made.pt2"
        subprocess.run([sys.executable, "-c", CONVERTER, program.pt2, made, metadata], check=True)
        made.replace(path)

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        model = _read(path)[0].module()

        def run(images: Array) -> Array:
            with torch.no_grad():
                return np.concatenate([model(torch.from_numpy(image[None])).numpy() for image in images])

        return run

    def open(self, path: Path) -> StoredFile:
        program, metadata = _read(path)
        return StoredFile(metadata or None, lambda: _graph(program))

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        lines = (
            "import torch",
            "",
            f'model = torch.export.load(open("{file}", "rb")).module()',
            "outputs = model(images)",
        )
        return (
            UsageExample("python", "\n".join(lines)),
            UsageExample("kotlin", "val outputs = run(images)", "Not run here"),
        )

    def problem(self) -> str | None:
        return "it is a toy"


def _read(path: Path) -> tuple[torch.export.ExportedProgram, str]:
    extra = {METADATA: ""}
    with path.open("rb") as file:
        return torch.export.load(file, extra_files=extra), extra[METADATA]


def _graph(program: torch.export.ExportedProgram) -> Graph:
    nodes = {node.name: node for node in program.graph.nodes}
    (inputs,), (outputs,) = program.graph_signature.user_inputs, program.graph_signature.user_outputs
    shapes = [tuple(nodes[name].meta["val"].shape) for name in (inputs, outputs)]
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        program.module()(torch.zeros(shapes[0]))
    ports = Port(inputs, "float32", shapes[0]), Port(None, "float32", shapes[1])  # outputs have no names
    return Graph(ports[:1], ports[1:], counted.get_total_flops() // 2, eight_bits=False)
