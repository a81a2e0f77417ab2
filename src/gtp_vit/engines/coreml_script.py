"""Convert for Core ML, and run its files on macOS: in an environment that has coremltools, not this package.

PYTHON -I coreml_script.py convert PROGRAM.pt2 FILE.mlpackage.zip METADATA.json OUTPUT
PYTHON -I coreml_script.py run FILE.mlpackage.zip: arrays go in and out as engine_process.py sends them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "model.mlpackage"  # a folder; in the zip archive
CLOSE = 1e-4


def convert(source: str, path: str, metadata: str, output: str) -> None:
    """Write the package, and print what the graph of the converted program is."""
    import coremltools as ct
    import torch

    program = torch.export.load(source)
    nodes = {node.name: node for node in program.graph.nodes}
    shape = tuple(nodes[program.graph_signature.user_inputs[0]].meta["val"].shape)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = program.module()(images)
    program = _for_coreml(program.run_decompositions())
    with torch.no_grad():
        difference = float((program.module()(images) - expected).abs().max())
    if not difference <= CLOSE * max(1.0, float(expected.abs().max())):
        raise ValueError(f"the program that is converted is {difference:.2g} off the one that was exported")
    model = ct.convert(
        program,
        outputs=[ct.TensorType(name=output)],
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    model.user_defined_metadata["gtp_vit"] = Path(metadata).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / PACKAGE
        model.save(str(package))
        with zipfile.ZipFile(path, "w") as archive:
            for file in (
                package / "Manifest.json",
                *sorted((package / "Data").rglob("*")),
            ):  # the rest is for debugging
                archive.write(file, file.relative_to(folder))
    operations = list(_operations(model._mil_program.functions["main"]))
    description = model.get_spec().description
    print(
        json.dumps(
            {
                "inputs": [_port(port) for port in description.input],
                "outputs": [_port(port) for port in description.output],
                "macs": sum(map(_macs, operations)),
                "operators": len([operation for operation in operations if operation.op_type != "const"]),
            }
        )
    )


def _for_coreml(program: Any) -> Any:
    """The program without what coremltools does not take: aliases, and indices that it makes floats of."""
    import torch

    aten, graph = torch.ops.aten, program.graph
    for node in list(graph.nodes):
        if node.target is aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.index_select.default, aten.gather.default):
            source, dim, index, *others = node.args
            with graph.inserting_before(node):
                whole = graph.call_function(aten._to_copy.default, (index,), {"dtype": torch.int64})
            whole.meta = dict(index.meta)
            node.args = (source, dim, whole, *others)
    program.graph_module.recompile()
    return program


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


def _macs(operation: Any) -> int:
    """Multiply-accumulates of one operation of the converted program."""
    out = operation.outputs[0].shape if operation.outputs else ()
    if operation.op_type == "conv":
        return math.prod(out) * math.prod(operation.weight.shape[1:])
    if operation.op_type == "linear":
        return math.prod(out) * int(operation.x.shape[-1])
    if operation.op_type == "matmul":
        inner = operation.x.shape[-2 if operation.transpose_x.val else -1]
        return math.prod(out) * int(inner)
    return 0


def _port(feature: Any) -> dict[str, Any]:
    array = feature.type.multiArrayType
    kinds = {65568: "float32", 65552: "float16", 65600: "float64", 131104: "int32"}
    return {"name": feature.name, "type": kinds.get(array.dataType, "no array"), "shape": list(array.shape)}


def run(path: str) -> None:
    """Answer arrays with arrays, one image at a time; on macOS."""
    import coremltools as ct
    import numpy as np

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PACKAGE)])
        model = ct.models.MLModel(str(Path(folder) / PACKAGE), compute_units=ct.ComputeUnit.CPU_ONLY)

    def send(array: Any) -> None:
        answers.write(json.dumps(array.shape).encode() + b"\n" + np.ascontiguousarray(array, np.float32).tobytes())
        answers.flush()

    send(np.zeros(0, np.float32))
    while line := requests.readline():
        shape = json.loads(line)
        images = np.frombuffer(requests.read(4 * math.prod(shape)), np.float32).reshape(shape)
        send(np.concatenate([next(iter(model.predict({"images": image[None]}).values())) for image in images]))


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        run(sys.argv[2])
