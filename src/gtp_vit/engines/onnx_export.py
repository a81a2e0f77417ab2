"""A model as an ONNX file of 32-bit floats, with any number of images in a batch and standard operators only."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines.engine import INPUT, OPSET
from gtp_vit.engines.metadata import output_name
from gtp_vit.errors import GTPError, first_line

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

MAX_FILE_BYTES = 1_500_000_000  # protobuf can write two gigabytes; larger models have their weights in a file beside


def write_onnx(program: Program, path: Path) -> None:
    """Write a program as ONNX."""
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    level = logging.getLogger("torch.onnx").level
    try:
        with torch.no_grad(), eval_mode(program.module), warnings.catch_warnings(), quiet[0], quiet[1]:
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            exported = torch.onnx.export(
                program.module,
                (program.images,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=program.dynamic_shapes,
                input_names=[INPUT],
                output_names=[output_name(program.output)],
                custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention},
                optimize=False,
            )
            assert exported is not None  # it is, with dynamo
            _simplify(exported.model)
            graph = exported.model.graph
            for node in graph.all_nodes():
                node.metadata_props.clear()  # where in whose source files each operator comes from
            _rename_inside(graph)
            size = sum(p.numel() * p.element_size() for p in program.module.parameters())
            exported.save(path, external_data=size > MAX_FILE_BYTES)
    except OSError:
        raise
    except Exception as error:  # the exporter raises errors of many classes
        raise GTPError(f"torch cannot export this model to ONNX: {first_line(error)}") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _simplify(model: Any) -> None:
    """Simplify a program, as torch's exporter does it, in less time.

    Constants are computed first: a third or more of the operators go, and patterns are looked for among fewer.
    """
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    optimizer.optimize(model)


def _rename_inside(graph: Any) -> None:
    """Give values in the middle other names than inputs and outputs have: torch has an operator `embedding`, too."""
    ends = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    inside = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*inside, *list(graph.initializers.values())):
        if ends.get(value.name, value) is not value:
            stored = graph.initializers.pop(value.name, None)
            value.name = f"{value.name}_inside"
            if stored is not None:
                graph.initializers[value.name] = value


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention in the operators that engines look for. Torch's own translation hides a transposition from them."""
    from onnxscript import opset18 as op

    if dropout_p or is_causal or enable_gqa:
        raise NotImplementedError("attention with dropout, a causal mask or shared keys")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = op.Mul(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), op.Constant(value_float=float(scale)))
    if attn_mask is not None:
        logits = op.Add(logits, attn_mask)
    return op.MatMul(op.Softmax(logits, axis=-1), value)
