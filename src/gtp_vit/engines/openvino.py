"""OpenVINO, on a CPU."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gtp_vit.engines.engine import BF16, F32, INT8, METADATA, OPSET, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.graph import Graph, Port, StoredFile, convolution_macs, product_macs, total_macs
from gtp_vit.errors import GTPError, first_line

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

EXAMPLE = """\
import openvino

model = openvino.Core().compile_model("{file}", "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
outputs = model([images])[0]"""
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_FP16"
# How much of the range of activations is moved to the weights before both get 8 bits; -1 = none. On DeiT-Ti none is
# five times as close to the float model as 0.95, on ViT-Ti it is the other way round.
SMOOTHING = (-1.0, 0.95)
# A product in the precision that OpenVINO chooses by itself; one in 8 bits would use the same instructions.
_AMX_PROBE = """
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([64, 64], np.float32)
y = ops.matmul(x, ops.constant(np.ones((64, 64), np.float32)), False, True)
model = ov.Core().compile_model(ov.Model([y], [x]), "CPU")
assert float(model([np.ones((64, 64), np.float32)])[0][0, 0]) == 64
"""


class OpenVINO(Engine):
    """Files that end in .xml, with their weights in a .bin file of the same name."""

    name = "openvino"
    title = "OpenVINO"
    format = "openvino"
    suffix = ".xml"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32, "bf16": BF16, "int8": INT8}
    packages = ("onnx", "onnxscript", "openvino", "nncf")
    extra = "openvino"

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
        avoid_amx_crash()
        import openvino

        model = openvino.convert_model(program.onnx)
        if precision == "int8":
            assert images is not None
            model = _quantise(model, images, SMOOTHING if tune_smoothing else SMOOTHING[:1])
        model.set_rt_info(metadata, [METADATA])
        openvino.save_model(model, path, compress_to_fp16=False)

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        avoid_amx_crash()
        import openvino

        core = openvino.Core()
        model = _read(core, path)
        if batch is not None:
            shape = model.input(0).partial_shape
            shape[0] = batch
            model.reshape(shape)
        settings = {"INFERENCE_PRECISION_HINT": _hint(precision), "PERFORMANCE_HINT": "LATENCY"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        request = core.compile_model(model, "CPU", settings).create_infer_request()

        def run(images: Array) -> Array:
            # Copies on both sides: an 8-bit model rounds its input in place, and the next call reuses the output.
            return np.array(request.infer([images], share_inputs=False)[0])

        return run

    def open(self, path: Path) -> StoredFile:
        import openvino

        model = _read(openvino.Core(), path)
        metadata = model.get_rt_info([METADATA]).astype(str) if model.has_rt_info([METADATA]) else None
        return StoredFile(metadata, lambda: _graph(model))

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (UsageExample("python", EXAMPLE.format(file=file, hint=_hint(precision))),)

    def sidecars(self, path: Path) -> list[Path]:
        return [path.with_suffix(".bin")]

    def files(self, path: Path) -> list[Path]:
        return list(dict.fromkeys([path, path.with_suffix(".bin"), path.resolve().with_suffix(".bin")]))

    def versions(self) -> dict[str, str]:
        return {"ONNX opset": str(OPSET), **super().versions()}

    def problem(self) -> str | None:
        crash = None if ISA_VARIABLE in os.environ else probe_amx_crash()
        return None if crash is None else f"{crash}: set {ISA_VARIABLE}={SAFE_ISA}, as gtp-vit does"


def _hint(precision: str) -> str:
    return "bf16" if precision == "bf16" else "f32"


def _read(core: Any, path: Path) -> Any:
    """The model in a file, whose weights are in a second one; OpenVINO's own errors name neither."""
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise GTPError(f"its weights, {weights.name}, are not beside it; copy both files")
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise GTPError(
            f"it or its weights, {weights.name}, are damaged, or of two different exports ({_short_error(error)}); "
            "copy both files"
        ) from error


@functools.cache
def probe_amx_crash() -> str | None:
    """Whether OpenVINO's default settings crash a process: None, or how it ends. Takes a second or two.

    Some virtual machines advertise AMX and end the process that uses it. Only a process that may die can find out.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _AMX_PROBE], capture_output=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:  # a very busy machine, not this trap
        return None
    if done.returncode >= 0:
        return None
    return f"OpenVINO's own choice of instructions ends the process here (signal {-done.returncode})"


def avoid_amx_crash() -> None:
    """Choose instructions that this machine can run, and say so; before OpenVINO is used for the first time."""
    if ISA_VARIABLE in os.environ:
        return
    problem = probe_amx_crash()
    if problem is not None:
        os.environ[ISA_VARIABLE] = SAFE_ISA
        warnings.warn(
            f"{problem}; it runs with {ISA_VARIABLE}={SAFE_ISA}, set that wherever the file is used", stacklevel=3
        )


def _short_error(error: RuntimeError) -> str:
    """The message of an OpenVINO error without its first lines, which name places in its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    messages = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return next(iter(messages), first_line(error))


def _graph(model: Any) -> Graph:
    """The graph of a model, which is changed: its shapes are those for one image afterwards."""
    inputs, outputs = tuple(map(_port, model.inputs)), tuple(map(_port, model.outputs))
    if len(inputs) == 1 and inputs[0].shape:
        model.reshape([1, *(-1 if size is None else size for size in inputs[0].shape[1:])])
    parts, eight_bits = [], False
    for operation in model.get_ordered_ops():
        kind = operation.get_type_name()
        eight_bits = eight_bits or kind == "FakeQuantize"
        if kind == "MatMul":
            transposed = bool(operation.get_attributes().get("transpose_a"))
            left, out = _shape(operation.input(0)), _shape(operation.output(0))
            parts.append(product_macs(left, out, transposed=transposed))
        elif kind in ("Convolution", "GroupConvolution"):
            parts.append(convolution_macs(_shape(operation.input(1)), _shape(operation.output(0))))
        elif kind == "ScaledDotProductAttention":
            query, key, out = _shape(operation.input(0)), _shape(operation.input(1)), _shape(operation.output(0))
            scores = None if query is None or key is None else (*query[:-1], key[-2])
            parts += [product_macs(query, scores), product_macs(scores, out)]
    return Graph(inputs, outputs, total_macs(parts), eight_bits)


def _port(value: Any) -> Port:
    name = value.any_name if value.names else "without a name"
    return Port(name, str(value.element_type.to_dtype()), _shape(value))


def _shape(value: Any) -> tuple[int | None, ...] | None:
    shape = value.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(size.get_length() if size.is_static else None for size in shape)


def _quantise(model: Any, images: Array, smoothing: Sequence[float]) -> Any:
    """Products with constant weights in 8 bits, all else as it was: the choice of tokens stays in floating point.

    Of several degrees of `smoothing` the one whose outputs are nearest to the model's, on every fourth image; ranges
    are those of the others, as on the images it has seen smoothing always looks better.
    """
    fourth = np.arange(len(images)) % 4 == 3
    choosing = len(smoothing) > 1 and bool(fourth.any())
    calibration, unseen = (images[~fourth], images[fourth]) if choosing else (images, images)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        import nncf

        nncf.set_log_level(logging.ERROR)
        _keep_scales(model)
        operations = model.get_ordered_ops()
        quantised = {"MatMul", "Convolution"}
        passed = {"Parameter", "Constant", "Result", "Reshape", "Transpose"}  # nothing is computed there
        ignored = nncf.IgnoredScope(
            names=[operation.get_friendly_name() for operation in operations if _is_free_product(operation)],
            types=sorted({operation.get_type_name() for operation in operations} - quantised - passed),
            validate=False,
        )
        candidates = []
        for alpha in smoothing:
            smooth = nncf.quantization.advanced_parameters.AdvancedSmoothQuantParameters(matmul=alpha)
            candidates.append(
                nncf.quantize(
                    model.clone(),
                    nncf.Dataset([image[None] for image in calibration]),
                    model_type=nncf.ModelType.TRANSFORMER,
                    preset=nncf.QuantizationPreset.MIXED,
                    subset_size=len(calibration),
                    ignored_scope=ignored,
                    advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=smooth),
                )
            )
    if len(candidates) == 1:
        return candidates[0]
    reference = _outputs(model, unseen)
    return min(candidates, key=lambda candidate: float(np.square(_outputs(candidate, unseen) - reference).mean()))


def _outputs(model: Any, images: Array) -> Array:
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.concatenate([np.array(compiled([image[None].copy()])[0]) for image in images])


def _is_free_product(operation: Any) -> bool:
    """Is this a product of two arrays that depend on the image?"""
    if operation.get_type_name() != "MatMul":
        return False
    source = operation.input_value(1).get_node()
    while source.get_type_name() in ("Convert", "Transpose", "Reshape"):
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() != "Constant")


def _keep_scales(model: Any) -> None:
    """Let OpenVINO undo the scale of 8-bit numbers once, where tokens are reduced.

    It moves that product behind whatever it can, so that every reader of the features would do it again. It cannot
    move it behind a maximum, which changes nothing here.
    """
    from openvino import opset13 as ops

    done = set()
    for operation in model.get_ordered_ops():
        if operation.get_type_name() == "ReduceL2":  # the lengths of the features
            source = operation.input(0).get_source_output()
            if source.get_node().get_friendly_name() not in done:
                done.add(source.get_node().get_friendly_name())
                readers = list(source.get_target_inputs())
                barrier = ops.maximum(source, ops.constant(np.float32(-3e38)))
                for reader in readers:
                    reader.replace_source_output(barrier.output(0))
    model.validate_nodes_and_infer_types()
