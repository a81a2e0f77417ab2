"""ONNX Runtime, on a CPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gtp_vit.engines.engine import F32, INT8, METADATA, OPSET, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.graph import Graph, Port, StoredFile, convolution_macs, product_macs, total_macs

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

EXAMPLE = """\
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
outputs = session.run(None, {{"images": images}})[0]"""
MAX_FILE_BYTES = 1_900_000_000  # protobuf can write two gigabytes; larger models have their weights in a file beside


class OnnxRuntime(Engine):
    """Files that end in .onnx; those above two gigabytes have their weights in a second file."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    format = "onnx"
    suffix = ".onnx"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32, "int8": INT8}  # its CPU kernels have no bf16
    packages = ("onnx", "onnxscript", "onnxruntime")
    extra = "onnx"

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
        import onnx as format

        source = program.onnx
        if precision == "int8":
            source = path.with_suffix(".int8.onnx")
            _quantise(program.onnx, source)
        model = format.load(source)
        if source != program.onnx:
            source.unlink()
        entry = model.metadata_props.add()
        entry.key, entry.value = METADATA, metadata
        # Not its ByteSize, which protobuf cannot tell above two gigabytes.
        large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_FILE_BYTES
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

    def open(self, path: Path) -> StoredFile:
        import onnx as format

        model = format.load(path, load_external_data=False)
        metadata = next((entry.value for entry in model.metadata_props if entry.key == METADATA), None)
        return StoredFile(metadata, lambda: _graph(model, path.parent))

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (UsageExample("python", EXAMPLE.format(file=file)),)

    def sidecars(self, path: Path) -> list[Path]:
        return [path.with_name(f"{path.name}.data")]

    def files(self, path: Path) -> list[Path]:
        import onnx as format

        model = format.load(path, load_external_data=False)
        names = {
            entry.value
            for tensor in _external_tensors(model)
            for entry in tensor.external_data
            if entry.key == "location"
        }
        # Beside the file, or where it really is if it is a link: versions of the engine differ.
        beside = [folder / name for name in sorted(names) for folder in (path.parent, path.resolve().parent)]
        return list(dict.fromkeys([path, *beside]))

    def versions(self) -> dict[str, str]:
        return {"ONNX opset": str(OPSET), **super().versions()}


_MATMUL_OPS = {"MatMul", "MatMulInteger", "Gemm"}
_EIGHT_BIT_OPS = {"MatMulInteger", "DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear", "QLinearMatMul"}
_LARGE_TENSOR = 4096  # bytes; the numbers of larger constants decide no shape


def _external_tensors(model: Any) -> Iterator[Any]:
    """The tensors of a model whose numbers are in other files, in graphs inside the graph as well."""
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    return (tensor for tensor in _get_all_tensors(model) if uses_external_data(tensor))


def _graph(model: Any, folder: Path) -> Graph:
    """The graph of an ONNX model, which is changed: shapes are found anew for one image, not believed."""
    import onnx as format
    from onnx.external_data_helper import load_external_data_for_tensor

    graph = model.graph
    for tensor in _external_tensors(model):
        if math.prod(tensor.dims) <= _LARGE_TENSOR // 8:  # it may be a shape
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = format.TensorProto.DEFAULT
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    inputs = tuple(_port(value) for value in graph.input if value.name not in constants)
    outputs = tuple(map(_port, graph.output))
    del graph.value_info[:]
    for tensor in graph.initializer:
        if len(tensor.raw_data) > _LARGE_TENSOR:
            tensor.ClearField("raw_data")
    for value in graph.input:
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    known = format.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, Any] = {
        value.name: _port(value).shape for value in (*known.value_info, *known.input, *known.output)
    }
    shapes |= constants
    parts = []
    for node in known.node:
        if node.op_type in _MATMUL_OPS:
            transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
            parts.append(product_macs(shapes.get(node.input[0]), shapes.get(node.output[0]), transposed=transposed))
        elif node.op_type == "Conv":
            parts.append(convolution_macs(shapes.get(node.input[1]), shapes.get(node.output[0])))
    return Graph(inputs, outputs, total_macs(parts), any(node.op_type in _EIGHT_BIT_OPS for node in known.node))


def _port(value: Any) -> Port:
    import onnx as format

    kind = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    name = str(format.helper.tensor_dtype_to_np_dtype(kind.elem_type)) if kind.elem_type else "no tensor"
    return Port(value.name, name, tuple(sizes) if kind.HasField("shape") else None)


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
            use_external_data_format=onnx.stat().st_size > MAX_FILE_BYTES,
        )
    finally:
        logger.setLevel(level)
