"""LiteRT, once TensorFlow Lite: Android's own engine. Its converter has an environment of its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtp_vit.engines.attachment import PLACE, attach, read_attachment, traced_graph
from gtp_vit.engines.converter import Converter
from gtp_vit.engines.engine import F32, INT8_DYNAMIC, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.graph import StoredFile

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

PYTHON_EXAMPLE = """\
from ai_edge_litert.interpreter import Interpreter

runner = Interpreter("{file}").get_signature_runner()
outputs = next(iter(runner(args_0=images).values()))"""
KOTLIN_EXAMPLE = """\
val model = CompiledModel.create(context.assets, "{file}", CompiledModel.Options(Accelerator.CPU))
val inputs = model.createInputBuffers()
val results = model.createOutputBuffers()
inputs[0].writeFloat(pixels)
model.run(inputs, results)
val outputs = results[0].readFloat()"""
SWIFT_EXAMPLE = """\
import TensorFlowLite

let interpreter = try Interpreter(modelPath: "{file}")
try interpreter.allocateTensors()
try interpreter.copy(pixels, toInputAt: 0)
try interpreter.invoke()
let outputs = try interpreter.output(at: 0).data"""


class LiteRT(Engine):
    """Files that end in .tflite, for one image at a time."""

    name = "litert"
    title = "LiteRT"
    format = "litert"
    suffix = ".tflite"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32, "int8": INT8_DYNAMIC}
    packages = ("ai_edge_litert",)
    extra = "litert"
    metadata_place = PLACE
    batch = 1
    converter = Converter(
        "litert",
        ("litert-torch==0.10.0", "ai-edge-quantizer==0.10.0", "torch==2.13.0"),
        ("litert_torch", "ai_edge_quantizer", "torch"),
        2.1,
        6,
        "litert_script.py",
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
        self.converter.call(program.pt2, path, precision)
        attach(path, metadata, traced_graph(program, eight_bits=precision == "int8"))

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(str(path), num_threads=threads or None)
        interpreter.allocate_tensors()
        source, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]

        def run(images: Array) -> Array:
            results = []
            for image in images:
                interpreter.set_tensor(source, image[None])
                interpreter.invoke()
                results.append(interpreter.get_tensor(result))
            return np.concatenate(results)

        return run

    def open(self, path: Path) -> StoredFile:
        return read_attachment(path)

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (
            UsageExample("python", PYTHON_EXAMPLE.format(file=file)),
            UsageExample("kotlin", KOTLIN_EXAMPLE.format(file=file), "Android; not run here"),
            UsageExample("swift", SWIFT_EXAMPLE.format(file=file), "iOS; not run here"),
        )

    def versions(self) -> dict[str, str]:
        return {**self.converter.versions(), "ai-edge-litert": importlib.metadata.version("ai-edge-litert")}
