"""ONNX Runtime, on a CPU."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

from gtp_vit.engines.engine import METADATA, Array, Engine, Run

LARGEST_FILE = 1_900_000_000  # protobuf can write two gigabytes; larger models have their weights in a file beside


class OnnxRuntime(Engine):
    """Files that end in .onnx."""

    name = "onnxruntime"
    format = "onnx"
    suffix = ".onnx"
    precisions = ("f32", "int8")  # its CPU kernels have no bf16
    needs = ("onnx", "onnxscript", "onnxruntime")
    extra = "onnx"

    def make(
        self, onnx: Path, path: Path, precision: str, images: Array | None, about: str, *, careful: bool = True
    ) -> None:
        import onnx as format

        source = onnx
        if precision == "int8":
            source = path.with_suffix(".int8.onnx")
            _quantise(onnx, source)
        model = format.load(source)
        if source != onnx:
            source.unlink()
        entry = model.metadata_props.add()
        entry.key, entry.value = METADATA, about
        large = model.ByteSize() > LARGEST_FILE
        beside: dict[str, Any] = {"save_as_external_data": True, "location": f"{path.name}.data"} if large else {}
        format.save(model, path, **beside)

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Idle threads that spin would take the cores of whatever else runs: another session, torch, the caller.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if batch is not None:
            options.add_free_dimension_override_by_name("batch", batch)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda images: session.run(None, {name: images})[0]

    def about(self, path: Path) -> str | None:
        import onnx as format

        stored = format.load(path, load_external_data=False).metadata_props
        return next((entry.value for entry in stored if entry.key == METADATA), None)

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in self.needs}


def _quantise(onnx: Path, path: Path) -> None:
    """Products with constant weights in 8 bits, all else as it was: the choice of tokens stays in floating point.

    Ranges of features are found anew in every pass: as fast here as fixed ones, and far more exact. Weights have 7
    bits, because processors without VNNI add pairs of products in 16 bits, which 8 would overflow.
    """
    import onnx as format
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = format.load(onnx)
    del model.graph.value_info[:]  # shapes of weights among them, which are stored transposed below
    logger = logging.getLogger()  # it advises there a preparation that changes nothing here
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
            use_external_data_format=onnx.stat().st_size > LARGEST_FILE,
        )
    finally:
        logger.setLevel(level)
