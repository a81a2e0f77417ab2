"""Convert for LiteRT: in an environment that has litert-torch and its own torch, not this package.

PYTHON -I litert_script.py PROGRAM.pt2 FILE.tflite PRECISION
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def convert(source: str, path: str, precision: str) -> None:
    """Write a file; in int8, the weights of its products have 8 bits."""
    import litert_torch
    import torch

    program = torch.export.load(source)
    nodes = {node.name: node for node in program.graph.nodes}
    example = torch.zeros(nodes[program.graph_signature.user_inputs[0]].meta["val"].shape)
    converted = litert_torch.convert(program.module(), (example,))
    if precision == "f32":
        converted.export(path)
        return
    from ai_edge_quantizer import quantizer, recipe

    with tempfile.TemporaryDirectory() as folder:
        plain = str(Path(folder) / "float.tflite")
        converted.export(plain)
        quantized = quantizer.Quantizer(plain)
        quantized.load_quantization_recipe(recipe.dynamic_wi8_afp32())
        quantized.quantize().export_model(path)


if __name__ == "__main__":
    convert(*sys.argv[1:])
