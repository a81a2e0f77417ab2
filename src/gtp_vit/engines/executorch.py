"""ExecuTorch: programs for phones and boards. Both its converter and the engine run in an environment of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gtp_vit.engines.attachment import PLACE, attach, read_attachment, traced_graph
from gtp_vit.engines.converter import Converter
from gtp_vit.engines.engine import F32, INT8_DYNAMIC, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.engine_process import EngineProcess
from gtp_vit.engines.graph import StoredFile

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

PYTHON_EXAMPLE = """\
import torch
from executorch.runtime import Runtime

method = Runtime.get().load_program("{file}").load_method("forward")
outputs = method.execute([torch.from_numpy(images)])[0]"""
KOTLIN_EXAMPLE = """\
val module = Module.load("{file}")
val images = Tensor.fromBlob(pixels, longArrayOf(1, channels, height, width))
val outputs = module.forward(EValue.from(images))[0].toTensor().dataAsFloatArray"""
SWIFT_EXAMPLE = """\
import ExecuTorch

let module = Module(filePath: "{file}")
let images = Tensor<Float>(pixels, shape: [1, channels, height, width])
let outputs: Tensor<Float> = try module.forward(images)[0].tensor()!"""


class ExecuTorch(Engine):
    """Files that end in .pte, for one image at a time; XNNPACK computes what it can."""

    name = "executorch"
    title = "ExecuTorch with XNNPACK"
    format = "executorch"
    suffix = ".pte"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32, "int8": INT8_DYNAMIC}
    packages = ()
    extra = "executorch"
    metadata_place = PLACE
    batch = 1
    converter = Converter(
        "executorch", ("executorch==1.5.1", "torch==2.13.0"), ("executorch", "torch"), 1.5, 5, "executorch_script.py"
    )

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
        self.converter.call("convert", program.pt2, path, precision)
        attach(path, metadata, traced_graph(program, eight_bits=precision == "int8"))

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        return EngineProcess(self, path, precision, threads)

    def command(self, path: Path, precision: str, threads: int) -> list[str]:
        return self.converter.command("run", path, str(threads))

    def open(self, path: Path) -> StoredFile:
        return read_attachment(path)

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (
            UsageExample("python", PYTHON_EXAMPLE.format(file=file)),
            UsageExample("kotlin", KOTLIN_EXAMPLE.format(file=file), "Android; not run here"),
            UsageExample("swift", SWIFT_EXAMPLE.format(file=file), "iOS; not run here"),
        )

    def versions(self) -> dict[str, str]:
        return self.converter.versions()

    def missing(self) -> str | None:
        return self.converter.missing()
