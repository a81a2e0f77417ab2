"""GPUs that are not here: what a forward pass would do on one, counted on fake tensors, and held to budgets.

No copy between devices, no wait of the host, no tensor left on the CPU, no attention map that the method does not need,
and as many launches as docs/results/launches.json says, which may only fall: python benchmarks/launches.py
"""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import timm
import torch

from gtp_vit import GTP, MCTF, EViT, GTPPlus, ToMe, TriLevel, kernels, patch
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import tower_of
from gtp_vit.profiling.launches import SEVERAL, WaitsError, count_launches
from gtp_vit.testing import cases, families
from support.settings import DEFAULTS, OPTIONS

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "docs/results/launches.json").read_text())
# Of a layer of DeiT-S that removes 8 tokens. They may only fall.
LIMITS = {"unreduced": 10, "slicing": 10, "GTP": 45, "GTP+": 60, "ToMe": 45}
MAIN = [GTP(propagate=6), GTPPlus(remove=6), GTPPlus(remove=6, calibration=families.calibration()), ToMe(r=6)]
FLOAT32_ONLY = {"rope_mixed", "open_clip_all_tokens"}  # their libraries mix dtypes
NOT_COUNTED = {
    "hf_dinov3",
    "hf_dinov3_gated",
}  # transformers caches their positions, so fake tensors of two counts meet
POSITIONS_IN_LOGITS = {"beit", "beit_shared", "beit_only_shared"}  # their bias is as large as the map
pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")


def needs_the_map(case, head_dim):
    """Does the method read or change the map itself, or mask it in training's own way? GTP's sums need a fused kernel
    that returns them, which takes heads of a multiple of 8."""
    method = case.method
    if isinstance(method, GTP):
        return head_dim % 8 != 0 or method.theta < 1 or method.select == "cosine_attention"
    return isinstance(method, MCTF) or (isinstance(method, TriLevel) and method.attn_ratio < 1)


def check(case, plain, most=None, dtype=torch.float16):
    """Assert what every method promises; only ATS reads a number back, which its way of choosing needs."""
    fast = patch(case.original.model, case.method, kernels="torch", quiet=True)  # no Triton, where there is a GPU
    if case.method.name == "ats" and case.method.budget is None:
        with pytest.raises(WaitsError, match="the host would wait"):
            count_launches(fast, dtype=dtype)
        return
    found = count_launches(fast, dtype=dtype)
    assert set(found.problems) <= set(plain.problems if plain else ())  # timm's DINOv3 makes its positions on the CPU
    # Where torch splits the fused attention of the model's own blocks, all layers write maps.
    shows_nothing = case.family in POSITIONS_IN_LOGITS or (plain is not None and plain.maps)
    if not shows_nothing and not needs_the_map(case, tower_of(fast).reduction.vit.head_dim):
        assert found.maps == []
    if most is not None:
        assert found.per_layer - plain.per_layer <= most


@pytest.mark.time_limit(4)
@pytest.mark.parametrize("method", MAIN, ids=str)
def test_nothing_waits_or_is_copied_and_no_map_is_written(method):
    check(cases([method], {"vit": families.factory_of("vit")})[0], None)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.NAMES if name not in NOT_COUNTED])
def test_every_method_keeps_its_budget_on_every_family(family):
    dtype = torch.float32 if family in FLOAT32_ONLY else torch.float16
    plain = count_launches(patch(families.make(family), Identity()), dtype=dtype)
    methods = [*DEFAULTS, *(OPTIONS if family in families.DIVERSE else [])]
    for case in cases(methods, {family: families.factory_of(family)}):
        check(case, plain, STORED["families"].get(str(case.method)), dtype)


def script():
    spec = importlib.util.spec_from_file_location("launches", ROOT / "benchmarks/launches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [name for name, limit in LIMITS.items() if limit > 10])
def test_the_layers_of_deit_small_keep_their_budgets(name):
    """Three layers are enough: the first, the last, and one like all others."""
    method = {"GTP": GTP(propagate=8), "GTP+": GTPPlus(remove=8), "ToMe": ToMe(r=8)}[name]
    found = script().count(method, depth=3)
    assert found["layer"] <= STORED["now"][name]["layer"] <= LIMITS[name]
    assert (found["maps"], found["problems"]) == (0, 0)


@pytest.mark.slow
def test_the_stored_counts_are_those_of_the_code():
    """Torch's versions split operators differently, so another one may count a few more or less."""
    if STORED["torch"] != torch.__version__:
        pytest.skip(f"counted with torch {STORED['torch']}")
    now = script()
    assert STORED["now"] == {name: now.count(method) for name, method in now.settings().items()}


def test_the_stored_counts_fell():
    for name, before in STORED["before"].items():
        now = STORED["now"][name]
        assert now is None or before is None or now["layer"] <= before["layer"], name
        assert now is None or now["problems"] == 0


def wait(x):
    return x + x.sum().item()


def choose(x):
    return x[x[..., 0] > 0]


def from_the_host(x):
    return x + torch.tensor([1.0, 2.0], device=x.device).sum().to(x.dtype)


def on_the_host(x):
    return (x.cpu() + 1).to(x.device)


def a_map(x):
    q = x.unflatten(2, (-1, 8)).transpose(1, 2)
    return x + (q @ q.transpose(-2, -1)).mean().to(x.dtype)


def counted(deed, monkeypatch):
    """What is counted of a model whose blocks do this."""
    from gtp_vit.backbones.timm_vit import TimmViT

    run_block = TimmViT.run_block
    with monkeypatch.context() as changed:
        changed.setattr(TimmViT, "run_block", lambda *arguments: deed(run_block(*arguments)))
        return count_launches(patch(families.make("vit"), Identity()))


@pytest.mark.parametrize("deed", [wait, choose])
def test_the_counter_sees_what_waits(monkeypatch, deed):
    with pytest.raises(WaitsError):
        counted(deed, monkeypatch)


@pytest.mark.parametrize("deed", [from_the_host, on_the_host])
def test_the_counter_sees_copies(monkeypatch, deed):
    assert any("a copy between devices" in each or "on cpu" in each for each in counted(deed, monkeypatch).problems)


def test_the_counter_sees_maps_and_launches(monkeypatch):
    plain = counted(lambda x: x, monkeypatch)
    assert (plain.maps, plain.problems) == ([], [])
    found = counted(a_map, monkeypatch)
    assert [each.split(":")[0] for each in found.maps] == ["layer 0", "layer 1", "layer 2"]
    assert found.per_layer == plain.per_layer + 5  # a copy of the keys, the product, its mean, a sum
    sorts = counted(lambda x: x.sort(dim=-1, stable=True).values, monkeypatch)
    assert sorts.per_layer == plain.per_layer + SEVERAL["sort"]


@pytest.mark.parametrize("method", [GTP(propagate=6), GTPPlus(remove=6), EViT()], ids=str)
def test_other_devices_run_the_reference_operators(method):
    """Torch has fake tensors of other devices only in a build for them, so its device without data stands for these."""
    with torch.no_grad():
        assert kernels.select_ops("auto", torch.empty(1, device="meta")) is kernels.Ops.TORCH
    found = count_launches(patch(families.make("vit"), method), device="meta", dtype=torch.float32)
    assert found.problems == []
    assert len(found.layers) == 4


def test_a_gpu_user_is_not_told_of_missing_native_kernels(monkeypatch):
    monkeypatch.setattr(kernels.native, "LOAD_ERROR", "no compiler")
    model = timm.create_model("test_vit")
    with pytest.warns(UserWarning, match="no compiler"):
        patch(model, GTP())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model.to("meta"), GTP())
