"""Convert for ExecuTorch, and run its files: in an environment that has executorch and its own torch, not this package.

PYTHON -I executorch_script.py convert PROGRAM.pt2 FILE.pte PRECISION
PYTHON -I executorch_script.py run FILE.pte THREADS: arrays go in and out as engine_process.py sends them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor


def convert(source: str, path: str, precision: str) -> None:
    """Write a file whose large products XNNPACK computes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.load(source)
    program = program.run_decompositions({torch.ops.aten.scaled_dot_product_attention.default: attention})
    if precision == "int8":
        program = _quantise(program)
    own = [XnnpackDynamicallyQuantizedPartitioner()] if precision == "int8" else []
    edge = to_edge_transform_and_lower(program, partitioner=[*own, XnnpackPartitioner()])
    calls = [str(node.target) for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    delegates = sum("call_delegate" in call for call in calls)
    outside = sum("getitem" not in call for call in calls) - delegates
    with open(path, "wb") as file:
        edge.to_executorch().write_to_file(file)
    print(json.dumps({"delegates": delegates, "operators outside": outside}))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in plain products; torch's own decomposition has a dozen operators for rows that see no key."""
    if is_causal or enable_gqa:
        raise NotImplementedError("attention with a causal mask or shared keys")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    heads = query.shape[:-2]

    def flat(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, *tensor.shape[-2:])

    logits = torch.bmm(flat(query * scale), flat(key).transpose(1, 2)).reshape(*heads, query.shape[-2], key.shape[-2])
    if attn_mask is not None:
        logits = logits + attn_mask
    mixed = torch.bmm(flat(logits.softmax(-1)), flat(value))
    return mixed.reshape(*heads, query.shape[-2], value.shape[-1])


def _fold_constants(module: Any) -> Any:
    """Compute what depends on weights alone: XNNPACK takes no 8-bit layer whose bias is a slice of a tensor."""
    constants: dict[Any, Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            constants[node] = getattr(module.get_submodule(owner), name)
        elif node.op == "call_function" and node.all_input_nodes and all(n in constants for n in node.all_input_nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), constants.__getitem__)
            value = node.target(*args, **kwargs)
            if not isinstance(value, Tensor):
                continue
            value = value.detach().clone(memory_format=torch.contiguous_format)
            name = f"folded_{len(constants)}"
            module.register_buffer(name, value)
            with module.graph.inserting_before(node):
                folded = module.graph.get_attr(name)
            folded.meta = dict(node.meta)
            constants[folded] = value
            node.replace_all_uses_with(folded)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _quantise(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Linear layers in 8 bits, all else as it was: which tokens stay is decided in floating point.

    Weights have a scale for each channel; the ranges of features are found in each pass.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    class LinearQuantizer(XNNPACKQuantizer):  # type: ignore[misc]
        def transform_for_annotation(self, model: Any) -> Any:
            return model  # its own makes floats of the whole numbers that indices are added to

    settings = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantizer = LinearQuantizer().set_operator_type(torch.ops.aten.linear.default, settings)
    nodes = {node.name: node for node in program.graph.nodes}
    example = torch.zeros(nodes[program.graph_signature.user_inputs[0]].meta["val"].shape)
    prepared = prepare_pt2e(_fold_constants(program.module()), quantizer)
    with torch.no_grad():
        prepared(example)
        return torch.export.export(convert_pt2e(prepared), (example,))


def run(path: str, threads: int) -> None:
    """Answer arrays with arrays, one image at a time."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the engine prints is no answer
    if threads:
        torch.set_num_threads(threads)
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    if threads and hasattr(portable_lib, "_unsafe_reset_threadpool"):
        portable_lib._unsafe_reset_threadpool(threads)
    method = Runtime.get().load_program(path).load_method("forward")
    if method is None:
        raise ValueError("it has no method forward")
    _send(answers, torch.zeros(0))
    while line := requests.readline():
        shape = json.loads(line)
        images = torch.frombuffer(bytearray(requests.read(4 * math.prod(shape))), dtype=torch.float32).reshape(shape)
        _send(answers, torch.cat([method.execute([image[None]])[0] for image in images]))


def _send(stream: Any, tensor: Tensor) -> None:
    stream.write(json.dumps(list(tensor.shape)).encode() + b"\n")
    stream.write(tensor.contiguous().numpy().tobytes())
    stream.flush()


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        run(sys.argv[2], int(sys.argv[3]))
