"""A model as an ONNX file of 32-bit floats, with any number of images in a batch and standard operators only."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Output, main_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines.engine import INPUT
from gtp_vit.errors import BadSetting, GTPError, first_line
from gtp_vit.patching import host_of, is_patched, tower_of

OPSET = 18
OLDEST_TORCH = "2.9"  # older ones translate some operators wrongly, or not at all
LARGEST_FILE = 1_500_000_000  # protobuf can write two gigabytes; larger models have their weights in a file beside


def torch_can_export() -> bool:
    """Is this torch new enough? Builds before a release, such as 2.9.0a0, count as the release."""
    have, need = ([int(number) for number in text.split(".")[:2]] for text in (torch.__version__, OLDEST_TORCH))
    return have >= need


def check_exportable(model: nn.Module) -> None:
    """Refuse models whose program depends on the image, on other devices, and in other precisions."""
    if not torch_can_export():
        raise GTPError(
            f"export needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}: pip install --upgrade torch"
        )
    output_of(model)  # raises for models that are not supported
    if is_patched(model) and tower_of(model).reducer.adaptive:
        name = tower_of(model).reduction.method.name
        raise BadSetting(
            f"{name} keeps a different number of tokens in every image, and a program has fixed shapes; give it a "
            "budget (ats: budget=...), or use gtp_plus"
        )
    if is_patched(model) and tower_of(model).reduction.method.not_exported is not None:
        raise BadSetting(tower_of(model).reduction.method.not_exported)
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        found = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        raise BadSetting(
            f"the model is in {found}; export takes float32 on a CPU: model.float().cpu(), and choose the precision of "
            "the file with precision="
        )


def output_of(model: Any) -> Output:
    """What a model returns; raises GTPError if that is not known."""
    output = host_of(model).output
    if output is None:
        raise GTPError("it is not known what this model returns, so a file could not be checked; export its ViT alone")
    return output


def write_onnx(model: Any, path: Path) -> None:
    """Write a model, patched or not, as ONNX."""
    inputs, kind = host_of(model).inputs, output_of(model).kind
    images = torch.zeros(2, inputs.channels, *inputs.size)  # two: one would be taken as the only size
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    level = logging.getLogger("torch.onnx").level
    try:
        with torch.no_grad(), eval_mode(model), warnings.catch_warnings(), quiet[0], quiet[1]:
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            program: Any = torch.onnx.export(
                MainOutput(model, kind),
                (images,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=[INPUT],
                output_names=["logits" if kind == "classes" else kind],
                custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention},
                optimize=False,
            )
            _simplify(program.model)
            graph = program.model.graph
            for node in graph.all_nodes():
                node.metadata_props.clear()  # where in whose source files each operator comes from
            _rename_inside(graph)
            large = sum(p.numel() * p.element_size() for p in model.parameters()) > LARGEST_FILE
            program.save(path, external_data=large)
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


class MainOutput(nn.Module):
    """A model that returns one tensor, whatever else the original returns."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self.training = False  # only of this module; the model's own modules are as the caller left them

    def forward(self, images: Tensor) -> Any:
        return main_output(self.model(images), self.kind)


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
