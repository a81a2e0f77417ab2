"""Core ML: Apple's engine. Files are converted and checked as programs on Linux, too, and run on macOS only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gtp_vit.engines.attachment import PLACE, attach, graph_from_dict, read_attachment
from gtp_vit.engines.converter import Converter
from gtp_vit.engines.engine import F32, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.engine_process import EngineProcess
from gtp_vit.engines.graph import StoredFile
from gtp_vit.engines.metadata import output_name

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

PYTHON_EXAMPLE = """\
import coremltools, zipfile

zipfile.ZipFile("{file}").extractall()
model = coremltools.models.MLModel("model.mlpackage")
outputs = next(iter(model.predict({{"images": images}}).values()))"""
SWIFT_EXAMPLE = """\
import CoreML

let model = try MLModel(contentsOf: try MLModel.compileModel(at: packageURL))  // model.mlpackage, unzipped
let input = try MLDictionaryFeatureProvider(dictionary: ["images": MLMultiArray(pixels)])
let outputs = try model.prediction(from: input)"""
NOT_RUN = "On macOS or iOS; not run here"


class CoreML(Engine):
    """Files that end in .mlpackage.zip, for one image at a time: a zip archive of the package."""

    name = "coreml"
    title = "Core ML"
    format = "coreml"
    suffix = ".mlpackage.zip"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32}
    packages = ()
    extra = "coreml"
    metadata_place = PLACE
    batch = 1
    converter = Converter(
        "coreml", ("coremltools==9.0", "torch==2.13.0"), ("coremltools", "torch"), 1.0, 3, "coreml_script.py"
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
        own = program.folder / "metadata.json"
        own.write_text(metadata, encoding="utf-8")
        said = self.converter.call("convert", program.pt2, path, own, output_name(program.output))
        attach(path, metadata, graph_from_dict({**json.loads(said.splitlines()[-1]), "eight_bits": False}))

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        return EngineProcess(self, path, precision, threads)

    def command(self, path: Path, precision: str, threads: int) -> list[str]:
        return self.converter.command("run", path)

    def open(self, path: Path) -> StoredFile:
        return read_attachment(path)

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (
            UsageExample("python", PYTHON_EXAMPLE.format(file=file), NOT_RUN),
            UsageExample("swift", SWIFT_EXAMPLE, NOT_RUN),
        )

    def versions(self) -> dict[str, str]:
        return self.converter.versions()

    def missing(self) -> str | None:
        return self.converter.missing()

    def cannot_run(self) -> str | None:
        return None if sys.platform == "darwin" else "Core ML runs on macOS only"

    def problem(self) -> str | None:
        reason = self.cannot_run()
        return None if reason is None else f"{reason}: files are converted and checked as programs here, and not run"
