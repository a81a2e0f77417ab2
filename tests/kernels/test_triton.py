"""Triton kernels against the reference operators, in Triton's interpreter; and compiled for GPUs that are not here."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from gtp_vit import GTP, GTPPlus, ToMe, kernels, patch
from gtp_vit.core.merging import MergePairs, average, match
from gtp_vit.errors import InputError, SettingError
from gtp_vit.kernels import Ops, gpu, triton_set
from gtp_vit.kernels.arguments import (
    AttentionInputs,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPReduceInputs,
    NeighboursInputs,
)
from gtp_vit.kernels.gpu import gtp_plus as gtp_plus_kernels
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge, gtp_plus_merge_by_probe
from gtp_vit.tensors import weighted_merge
from gtp_vit.testing import families

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the logarithm of 0
M, C, PREFIX = 40, 40, 2  # two blocks of rows, of columns and of channels


def alike(batch=2, tokens=M + PREFIX, channels=C, dtype=torch.float32):
    """Tokens that look alike in groups, as in images, and an attention branch."""
    kinds = torch.randn(24, channels)[torch.randint(0, 24, (batch, tokens))]
    return (kinds + 0.5 * torch.randn(batch, tokens, channels)).to(dtype), torch.randn_like(kinds).mul(0.2).to(dtype)


def few_kinds(batch=1):
    """Tokens of five kinds whose cosines are exact: 16 ones with signs have length 4. Else rounding would decide."""
    kinds = torch.zeros(5, C)
    for kind in kinds:
        kind[torch.randperm(C)[:16]] = torch.randint(0, 2, (16,)).float() * 2 - 1
    x = kinds[torch.randint(0, 5, (batch, M + PREFIX))]
    return x, torch.zeros_like(x)


def norm(channels=C, dtype=torch.float32):
    return (torch.rand(channels) + 0.5).to(dtype), torch.randn(channels).to(dtype), 1e-6


def merge_inputs(case):
    torch.manual_seed(0)
    ties = case in ("ties", "equal importance", "signed zeros", "zero tokens")
    batch = 2 if case in ("random", "NaN in importance") else 1
    x, branch = few_kinds(batch) if ties else alike(batch)
    importance = torch.rand(batch, M).softmax(1)
    size = torch.randint(1, 5, (batch, M)).float()
    removed, keep_norm, following = 8, True, norm()
    match case:
        case "no sizes":
            size = None
        case "no norms":
            keep_norm, following = False, (None, None, 0.0)
        case "no bias":
            following = (following[0], None, 1e-6)
        case "all but one":
            removed = M - 1
        case "equal importance":
            importance = torch.full((batch, M), 0.25)
        case "signed zeros":
            importance = torch.tensor([0.0, -0.0, 0.5, -0.0]).repeat(batch, M // 4)
        case "zero tokens":
            x[:, 10:20] = 0
        case "NaN in a token":
            x[0, 30] = torch.nan
        case "NaN in importance":
            importance[0, 5], importance[1] = torch.nan, 0
        case "huge":
            x, branch = 1e4 * x, 1e4 * branch
    return GTPPlusMergeInputs(x, branch, importance, size, removed, 0.5, keep_norm, *following)


CASES = ("random", "no sizes", "no norms", "no bias", "all but one", "ties", "equal importance", "signed zeros")
CASES += ("zero tokens", "NaN in a token", "NaN in importance", "huge")


def assert_same(found, wanted, *, rtol=1e-6, atol=1e-6):
    """Integers identical, features within rounding; NaN in the same places."""
    assert type(found) is type(wanted)
    for name in found._fields:
        a, b = getattr(found, name), getattr(wanted, name)
        assert a.dtype == b.dtype, name
        if a.dtype == torch.int64:
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_gtp_plus_merges_the_same_tokens(case):
    inputs = merge_inputs(case)
    assert_same(gtp_plus_merge(Ops.TRITON, inputs), gtp_plus_merge(Ops.TORCH, inputs))


@pytest.fixture
def large_grid(monkeypatch):
    """The kernels of grids above 256 patches, in blocks that are small enough for more than one of each."""
    monkeypatch.setattr(gtp_plus_kernels, "ONE_PROGRAM", 16)
    monkeypatch.setitem(gtp_plus_kernels.RECEIVER, False, {**gtp_plus_kernels.RECEIVER[False], "COLUMNS": 16})


@pytest.mark.parametrize("case", ["random", "all but one", "ties", "equal importance", "NaN in a token"])
def test_gtp_plus_merges_the_same_tokens_of_large_grids(case, large_grid):
    inputs = merge_inputs(case)
    assert_same(gtp_plus_merge(Ops.TRITON, inputs), gtp_plus_merge(Ops.TORCH, inputs))


def probe_inputs(registers, removed=8):
    torch.manual_seed(0)
    x, branch = alike(1)
    protected = torch.zeros(1, M)
    protected[:, [0, 13, 37]] = 1
    size = torch.randint(1, 5, (1, M)).float()
    given = (x, branch, 3 * torch.randn(C), size, protected if registers else None)
    return GTPPlusMergeByProbeInputs(*given, removed, 0.5, True, *norm())


@pytest.mark.parametrize(("registers", "removed"), [(False, 8), (True, 8), (True, M - 4)])
def test_gtp_plus_by_a_probe_merges_the_same_tokens(registers, removed):
    inputs = probe_inputs(registers, removed)
    found = gtp_plus_merge_by_probe(Ops.TRITON, inputs)
    assert_same(found, gtp_plus_merge_by_probe(Ops.TORCH, inputs))
    if registers:
        assert (found.keep.unsqueeze(2) == torch.tensor([0, 13, 37])).any(dim=1).all()


def test_registers_stay_and_receive_nothing_on_large_grids(large_grid):
    inputs = probe_inputs(True)
    assert_same(gtp_plus_merge_by_probe(Ops.TRITON, inputs), gtp_plus_merge_by_probe(Ops.TORCH, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_decides_as_float32_and_rounds_once(dtype):
    """With exact products; those in float16 may take another of tokens that cost nearly the same."""
    torch.manual_seed(0)
    x, branch = alike(1, dtype=dtype)
    importance, size = torch.rand(1, M).softmax(1), torch.randint(1, 5, (1, M)).float()
    following = norm(dtype=dtype)
    found = gpu.merge_by_cost(x, branch, importance, size, None, None, 8, 0.5, True, *following, exact=True)
    inputs = GTPPlusMergeInputs(x, branch, importance, size, 8, 0.5, True, *following)
    wanted = gtp_plus_merge(Ops.TORCH, inputs)
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        step = 2 * torch.finfo(dtype).eps if name in ("x", "normed") else 0
        torch.testing.assert_close(one, other, rtol=step, atol=step, msg=lambda m, n=name: f"{n}: {m}")


def test_products_in_float16_take_nearly_the_same_tokens():
    torch.manual_seed(0)
    x, branch = alike(1, dtype=torch.bfloat16)
    inputs = GTPPlusMergeInputs(x, branch, torch.rand(1, M).softmax(1), None, 8, 0.5, True, None, None, 0.0)
    found, wanted = gtp_plus_merge(Ops.TRITON, inputs), gtp_plus_merge(Ops.TORCH, inputs)
    assert torch.isin(found.keep[0], wanted.keep[0]).float().mean() > 0.9
    assert found.x.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_in_float16_change_hardly_a_token(dtype):
    """gpu.md, section 4: 0.06 to 0.11 % of those removed on real images."""
    torch.manual_seed(0)
    same = total = 0
    for _ in range(3):
        x, branch = alike(2, 197, 96, dtype)
        inputs = GTPPlusMergeInputs(x, branch, torch.rand(2, 196).softmax(1), None, 20, 0.5, True, None, None, 0.0)
        found, wanted = gtp_plus_merge(Ops.TRITON, inputs), gtp_plus_merge(Ops.TORCH, inputs)
        same += sum(int(torch.isin(a, b).sum()) for a, b in zip(found.drop, wanted.drop, strict=True))
        total += wanted.drop.numel()
    assert same / total >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("patches", "channels", "removed"), [(196, 384, 13), (300, 64, 40), (576, 48, 60)])
def test_gtp_plus_at_the_size_of_models(patches, channels, removed):
    torch.manual_seed(0)
    x, branch = alike(1, patches + 1, channels)
    importance, size = torch.rand(1, patches).softmax(1), torch.randint(1, 5, (1, patches)).float()
    inputs = GTPPlusMergeInputs(x, branch, importance, size, removed, 0.5, True, *norm(channels))
    assert_same(gtp_plus_merge(Ops.TRITON, inputs), gtp_plus_merge(Ops.TORCH, inputs), rtol=2e-6, atol=2e-6)


def reduce_inputs(case):
    torch.manual_seed(0)
    batch = 2 if case in ("random", "one graph for all") else 1
    x, branch = torch.randn(2, batch, 36 + PREFIX, C).unbind(0)
    scores = torch.rand(batch, 36)
    size = torch.randint(1, 5, (batch, 36 + PREFIX)).float()
    lists = operators.neighbours(Ops.TORCH, NeighboursInputs(torch.rand(batch, 36, 36), 6, 6, 8, 4))
    cells, removed, with_size, following = torch.arange(36).repeat(batch, 1), 5, True, norm()
    match case:
        case "no sizes":
            size, with_size, following = None, False, (None, None, 0.0)
        case "sizes of one":
            size = None
        case "all but one":
            removed = 35
        case "ties":
            scores = torch.tensor([0.0, -0.0, 0.5, 0.5]).repeat(batch, 9)
        case "NaN":
            scores[0, 3], x[0, 7] = torch.nan, torch.nan
        case "ranks":
            scores = torch.randperm(36).repeat(batch, 1)
        case "one graph for all":
            lists = [each[:1] for each in lists]
        case "second layer":
            cells = torch.stack([torch.randperm(60)[:36].sort().values for _ in range(batch)])
            lists = operators.neighbours(Ops.TORCH, NeighboursInputs(torch.rand(batch, 60, 60), 6, 10, 4, 3))
    return GTPReduceInputs(x, branch, scores, cells, size, *lists, removed, 0.2, with_size, *following)


@pytest.mark.parametrize(
    "case",
    ["random", "no sizes", "sizes of one", "all but one", "ties", "NaN", "ranks", "one graph for all", "second layer"],
)
def test_gtp_keeps_and_propagates_the_same(case):
    inputs = reduce_inputs(case)
    assert_same(operators.gtp_reduce(Ops.TRITON, inputs), operators.gtp_reduce(Ops.TORCH, inputs))


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize(
    "asked", [(True, True, True), (False, False, True), (True, False, False), (False, True, False)]
)
def test_statistics_need_no_map(heads, asked):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 41, 2, 40).transpose(2, 3).unbind(0)
    size = torch.randint(0, 5, (1, 41)).float()
    size[:, 0] = 1  # 0 is padding, and some key has to count
    inputs = AttentionInputs(q, k, v, size if heads else None, 0.3, 0, 41, list(asked), heads, PREFIX)
    found, wanted = kernels.attention(Ops.TRITON, inputs), kernels.attention(Ops.TORCH, inputs)
    torch.testing.assert_close(found.output, wanted.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.statistics, wanted.statistics, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_those_of_float32(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 16).to(dtype).unbind(0)
    inputs = AttentionInputs(q, k, v, None, 0.25, 0, 20, [True, True, True], 1, 0)
    found, wanted = (kernels.attention(ops, inputs).statistics for ops in (Ops.TRITON, Ops.TORCH))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_class_row_of_many_tokens_takes_two_kernels(monkeypatch):
    monkeypatch.setattr("gtp_vit.kernels.gpu.map_statistics.ONE_PROGRAM", 16)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 16).unbind(0)
    for queries in (1, 70):  # a shortened last block has the queries of prefix tokens only
        inputs = AttentionInputs(q[:, :, :queries], k, v, None, 0.25, 0, queries, [False, False, True], 2, 1)
        found, wanted = (kernels.attention(ops, inputs).statistics for ops in (Ops.TRITON, Ops.TORCH))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("keep_order", [True, False])
@pytest.mark.parametrize("case", ["random", "ties", "NaN", "half of them"])
def test_tome_matches_the_same_pairs(prefix, keep_order, case):
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 41, 40)
    if case == "ties":
        keys = few_kinds(2)[0][:, None, :41].expand(-1, 3, -1, -1)
    elif case == "NaN":
        keys[0, 1, 4], keys[1, 2, 7] = torch.nan, torch.nan
    removed = 20 if case == "half of them" else 9
    found = MergePairs(*gpu.match_pairs(keys, prefix, removed, keep_order))
    assert_same(found, match(keys.mean(dim=1), prefix, removed, keep_order))


@pytest.mark.parametrize("with_size", [True, False])
def test_tome_averages_by_size(with_size):
    torch.manual_seed(0)
    x, branch = torch.randn(2, 1, 41, C).unbind(0)
    size = torch.randint(1, 5, (1, 40)).float() if with_size else torch.ones(1, 40)
    pairs = match(torch.randn(1, 40, 16), 1, 15, True)
    weight, bias, epsilon = norm()
    x_out, normed, new_size = gpu.merge_pairs(x, branch, size if with_size else None, *pairs, weight, bias, epsilon)
    weights, retain, wanted_size = average(pairs, size)
    wanted = weighted_merge(x + branch, 1, pairs.keep, pairs.drop, weights, retain)
    torch.testing.assert_close(x_out, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normed, F.layer_norm(wanted, (C,), weight, bias, epsilon), rtol=1e-5, atol=2e-6)
    assert torch.equal(new_size, wanted_size)


def test_tensors_that_are_not_contiguous_give_the_same():
    inputs = merge_inputs("random")
    apart = [
        each.transpose(0, -1).contiguous().transpose(0, -1)
        if isinstance(each, torch.Tensor) and each.dim() > 1
        else each
        for each in inputs
    ]
    assert not apart[0].is_contiguous()
    found = gtp_plus_merge(Ops.TRITON, GTPPlusMergeInputs(*apart))
    assert_same(found, gtp_plus_merge(Ops.TORCH, inputs))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 16, 20).transpose(-1, -2).unbind(0)  # not even the channels of a head
    attention = AttentionInputs(q, k, v, None, 0.25, 0, 20, [True, True, True], 1, 0)
    found, wanted = (kernels.attention(ops, attention).statistics for ops in (Ops.TRITON, Ops.TORCH))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_tensors_on_several_devices_are_refused():
    inputs = merge_inputs("random")
    with pytest.raises(InputError, match=r"all tensors must be on one device.*cpu.*meta"):
        gtp_plus_merge(Ops.TRITON, inputs._replace(importance=inputs.importance.to("meta")))


def test_what_has_no_kernel_runs_on_reference_operators():
    inputs = merge_inputs("random")
    nothing = inputs._replace(removed=0)
    assert_same(gtp_plus_merge(Ops.TRITON, nothing), gtp_plus_merge(Ops.TORCH, nothing), rtol=0, atol=0)
    double = inputs._replace(x=inputs.x.double(), branch=inputs.branch.double(), norm_weight=None, norm_bias=None)
    assert gtp_plus_merge(Ops.TRITON, double).x.dtype == torch.float64
    similar = NeighboursInputs(torch.rand(1, 9, 9), 3, 3, 8, 2)
    for one, other in zip(*(operators.neighbours(ops, similar) for ops in (Ops.TRITON, Ops.TORCH)), strict=True):
        assert torch.equal(one, other)


# Which set runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_of(monkeypatch):
    """gpu_of(capability): torch says that there is a GPU."""

    def pretend(capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)

    return pretend


CUDA = torch.device("cuda", 0)


def test_kernels_run_on_a_gpu_of_capability_8_or_higher(gpu_of):
    assert triton_set.why_not(CUDA, torch.float16) == "torch finds no CUDA GPU"
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        gpu_of(capability)
        assert triton_set.why_not(CUDA, torch.float16, 196, 384) is None
    gpu_of((7, 5))
    assert "capability 7.5; Triton kernels need 8.0" in triton_set.why_not(CUDA, torch.float16)


def test_each_obstacle_is_named(gpu_of, monkeypatch):
    gpu_of()
    assert triton_set.why_not(CUDA, torch.float64) == (
        "torch.float64; Triton kernels are for float32, float16 and bfloat16"
    )
    assert "4097 patches of 384 channels" in triton_set.why_not(CUDA, torch.float32, 4097, 384)
    assert "196 patches of 5120 channels" in triton_set.why_not(CUDA, torch.float32, 196, 5120)
    assert triton_set.why_not(CUDA, torch.float32, 4096, 4096) is None
    assert "on mps" in triton_set.why_not(torch.device("mps"), torch.float32)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in triton_set.why_not(CUDA, torch.float32)


def test_deterministic_mode_and_autocast_use_reference_operators(gpu_of):
    x = torch.zeros(1, 5, 16)
    fast = patch(families.make("vit"), GTP(propagate=7), kernels="triton")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad(), pytest.raises(InputError, match="use_deterministic_algorithms is on"):
            fast(families.images("vit"))
    finally:
        torch.use_deterministic_algorithms(False)
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputError, match="autocast is on"),
    ):
        kernels.select_ops("triton", x)


@pytest.mark.parametrize("version", ["3.1.0", "2.3.1", "4.0.0"])
def test_another_version_of_triton_is_named(version, gpu_of, monkeypatch):
    gpu_of()
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "triton" else real(name))
    assert f"Triton {version} is installed; the kernels are checked with 3.9" in triton_set.why_not(CUDA, torch.float32)
    with pytest.raises(SettingError, match=f"kernels='triton' is not available: Triton {version}"):
        patch(families.make("vit"), GTP(), kernels="triton")


def test_without_triton_the_reason_says_so(gpu_of, monkeypatch):
    gpu_of()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_set.why_not(CUDA, torch.float32).startswith("Triton is not installed")
    with pytest.raises(SettingError, match=r"Triton is not installed.*use kernels='auto'"):
        patch(families.make("vit"), GTP(), kernels="triton")


def test_a_triton_that_breaks_on_import_is_named(gpu_of, monkeypatch):
    gpu_of()

    def broken():
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(triton_set, "_gpu", broken)
    reason = "Triton kernels cannot be imported: RuntimeError: no driver"
    assert triton_set.why_not(CUDA, torch.float32) == reason


def test_gradients_and_exports_use_reference_operators_also_where_triton_is_forced():
    x = torch.zeros(1, 5, 16)
    assert kernels.select_ops("triton", x) is Ops.TORCH  # gradients are on
    with torch.no_grad():
        assert kernels.select_ops("triton", x) is Ops.TRITON  # interpreted
        assert kernels.select_ops("auto", x) is Ops.NATIVE
        with pytest.raises(InputError, match=r"kernels='triton' cannot run: torch\.float64"):
            kernels.select_ops("triton", x.double())
        with pytest.raises(InputError, match="the tokens are on meta"):
            kernels.select_ops("triton", x.to("meta"))
        with pytest.raises(InputError, match="4097 patches"):
            kernels.select_ops("triton", torch.zeros(1, 1, 1).expand(1, 4098, 1), prefix=1)
        assert torch.vmap(lambda each: each + (kernels.why_not_triton("auto", x) is None))(x).sum() == 0


def test_gradients_are_those_of_reference_operators():
    model, images = families.make("vit"), families.images("vit")
    grads = []
    for kind in ("triton", "torch"):
        x = images.clone().requires_grad_()
        patch(model, GTPPlus(remove=7), kernels=kind)(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_model_says_which_kernels_it_uses():
    fast = patch(families.make("vit"), GTP(propagate=7), kernels="triton")
    assert fast.kernels.startswith("torch operators: gradients are on")
    with torch.no_grad():
        assert fast.kernels == "Triton"
        assert "torch.float64" in fast.double().kernels


@pytest.mark.slow
def test_triton_is_imported_by_the_first_pass_that_needs_it():
    code = (
        "import sys, torch, gtp_vit; from gtp_vit.testing import families\n"
        "fast = gtp_vit.patch(families.make('vit'), gtp_vit.GTP(propagate=7))\n"
        "with torch.no_grad(): fast(families.images('vit'))\n"
        "print('gtp_vit.kernels.gpu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False"]


# Whole models, and GPUs that are not here -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "dinov2", "gap"])
@pytest.mark.parametrize(
    "method", [GTPPlus(remove=7), GTP(propagate=7), GTP(propagate=7, theta=0.8), ToMe(r=7)], ids=str
)
def test_a_model_on_triton_kernels_equals_the_same_on_torch(family, method):
    model, images = families.make(family), families.images(family)[:1]
    with torch.no_grad():
        found, wanted = (families.output(patch(model, method, kernels=kind), images) for kind in ("triton", "torch"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles_for_a_gpu_without_spilling_registers(capability):
    program = Path(__file__).parent / "compile_for_gpus.py"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, str(capability)], capture_output=True, text=True, check=False, env=clean
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 28
    assert not {name: used for name, used in found.items() if used["spilled"]}
    assert not {name: used for name, used in found.items() if used["shared"] >= 48 * 1024}
    with_products = ("cost", "select", "receiver", "partner", "logsumexp", "statistics")
    assert all(used["tensor_cores"] for name, used in found.items() if name.split()[1].strip(",") in with_products)
