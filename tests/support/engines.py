"""Which engines can be tested here."""

import pytest
import torch

from gtp_vit.engines import ENGINES
from gtp_vit.engines.program import MIN_TORCH, torch_can_export


def lacking(engine):
    """Why an engine cannot be tested here; empty if it can."""
    if not torch_can_export():
        return f"torch {torch.__version__} exports other programs, {MIN_TORCH} is needed"
    return ENGINES[engine].missing() or ""


def needs(engine):
    return pytest.mark.skipif(bool(lacking(engine)), reason=lacking(engine))


ONNX_ENGINES = ("onnxruntime", "openvino")  # they convert from ONNX, in this Python
needs_onnxruntime = needs("onnxruntime")
each_onnx_engine = pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ONNX_ENGINES])
