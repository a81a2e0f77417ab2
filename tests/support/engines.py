"""Which engines can be tested here."""

import importlib.util

import pytest
import torch

from gtp_vit.engines import ENGINES
from gtp_vit.engines.onnx_export import OLDEST_TORCH, torch_can_export


def lacking(engine):
    """Why an engine cannot be tested here; empty if it can."""
    if not torch_can_export():
        return f"torch {torch.__version__} exports other programs, {OLDEST_TORCH} is needed"
    missing = [name for name in ENGINES[engine].needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install 'gtp-vit[{ENGINES[engine].extra}]'" if missing else ""


def needs(engine):
    return pytest.mark.skipif(bool(lacking(engine)), reason=lacking(engine))


needs_onnxruntime = needs("onnxruntime")
each_engine = pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ENGINES])
