"""torch.compile traces a forward pass into one graph, on every set of operators that it may meet."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode

from gtp_vit import METHODS, kernels, patch
from gtp_vit.kernels import Ops, triton_set
from gtp_vit.testing import families

QUICK = ("gtp_plus",)


class Traced(Exception):
    """Ends compiling: the graph is all that is looked at."""


def graph_of(fast, images):
    """The names of the operators in the one graph that a pass is traced into; none is run."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        raise Traced

    torch.compiler.reset()
    with torch.no_grad(), pytest.raises((Traced, BackendCompilerFailed)):
        torch.compile(fast, fullgraph=True, dynamic=False, backend=backend)(images)
    (graph,) = graphs
    return graph


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.time_limit(6) if name in QUICK else pytest.mark.slow)
        for name in METHODS
        if name != "ats"
    ],
)
def test_a_method_is_one_graph(name):
    fast = patch(families.make("vit"), METHODS[name](), kernels="torch", quiet=True)
    assert graph_of(fast, families.images("vit"))


@pytest.mark.slow
def test_ats_is_none_as_its_shapes_depend_on_the_image():
    fast = patch(families.make("vit"), METHODS["ats"](), kernels="torch", quiet=True)
    torch.compiler.reset()
    with torch.no_grad(), pytest.raises((Unsupported, torch._dynamo.exc.UserError)):
        torch.compile(fast, fullgraph=True, dynamic=False, backend="eager")(families.images("vit"))


# A program of its own, as Triton interprets in the process of the tests, and interpreted kernels cannot be traced.
TRACE = """
import json, timm, torch
from gtp_vit import GTP, GTPPlus, ToMe, patch
from gtp_vit.profiling.launches import count_launches
from gtp_vit.kernels import triton_set
from gtp_vit.testing import families

triton_set.why_not = triton_set.why_not_here = lambda *arguments, **options: None
traced, launched = {}, {}
deit = timm.create_model("deit_small_patch16_224")
for method in (GTPPlus(remove=7), GTP(propagate=7), ToMe(r=7)):
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        raise RuntimeError("the graph is all that is looked at")

    fast = patch(families.make("vit"), method, kernels="triton", quiet=True)
    try:
        with torch.no_grad():
            torch.compile(fast, fullgraph=True, dynamic=False, backend=backend)(families.images("vit"))
    except RuntimeError as error:
        assert "the graph is all" in str(error), error
    (graph,) = graphs
    traced[method.name] = [target.split(".")[1] for target in graph if target.startswith("gtp_vit_gpu.")]
    counted = count_launches(patch(deit, method, kernels="triton", quiet=True))
    launched[method.name] = [counted.per_layer, counted.total, len(counted.problems), len(counted.maps)]
print(json.dumps([traced, launched]))
"""


@pytest.mark.slow
def test_triton_kernels_are_in_the_one_graph():
    pytest.importorskip("triton")
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    traced, launched = json.loads(done.stdout)
    assert traced == {
        "gtp_plus": ["attention_statistics", "merge_by_cost"] * 3,  # the last layer has nobody who reads image tokens
        "gtp": ["attention_statistics", "propagate"] * 3,
        "tome": ["match_pairs", "merge_pairs"] * 3,
    }
    # launches of a layer and of DeiT-S, waits of the host, maps; docs/reference/devices.md
    assert launched == {"gtp_plus": [19, 225, 0, 0], "gtp": [19, 283, 0, 0], "tome": [17, 203, 0, 0]}


def test_compiled_for_a_gpu_without_triton_kernels_the_portable_set_runs(monkeypatch):
    """Of those in torch operators it moves fewer bytes there; with gradients and in eager mode the reference runs."""
    monkeypatch.setattr(triton_set, "why_not_here", lambda *arguments, **options: "the GPU has compute capability 7.5")
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(1, 5, 16, device="cuda")
        assert kernels.select_ops("auto", x) is Ops.LEAN
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(kernels, "is_exporting", lambda: False)
        assert kernels.select_ops("auto", x) is Ops.PORTABLE
        assert kernels.select_ops("torch", x) is Ops.PORTABLE
        with torch.enable_grad():
            assert kernels.select_ops("auto", x) is Ops.TORCH
        assert kernels.select_ops("torch", torch.empty(1, 5, 16)) is Ops.TORCH  # on a CPU


def test_on_a_gpu_triton_kernels_are_the_default(monkeypatch):
    monkeypatch.setattr(triton_set, "why_not_here", lambda *arguments, **options: None)
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(1, 5, 16, device="cuda", dtype=torch.float16)
        assert kernels.select_ops("auto", x) is Ops.TRITON
        assert kernels.select_ops("torch", x) is Ops.LEAN
        with torch.enable_grad():
            assert kernels.select_ops("auto", x) is Ops.TORCH
