"""Operators for accelerators, run on a CPU: they decide as the reference operators, and what they compute is close."""

import pytest
import torch

from gtp_vit import GTP, EViT, GTPPlus, ToMe, kernels, patch
from gtp_vit import tensors as helpers
from gtp_vit.core import loop
from gtp_vit.kernels import AttentionInputs, Ops, attention, lean, reference
from gtp_vit.kernels.arguments import GTPPlusMergeByProbeInputs, GTPPlusMergeInputs
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge, gtp_plus_merge_by_probe
from gtp_vit.tensors import split_by_score, weighted_merge
from gtp_vit.testing import families


def by_softmax(q, k, v, mask, scale):
    """What the fused kernel of a GPU gives, by its definition."""
    logits = q.float() @ k.float().transpose(-2, -1) * scale + (0 if mask is None else mask.float())
    return lean.WithLogsumexp((logits.softmax(dim=-1) @ v.float()).to(v.dtype), logits.logsumexp(dim=-1))


@pytest.fixture
def fused(monkeypatch):
    """The GPU's fused attention, on a CPU."""
    monkeypatch.setattr(lean, "attention_with_logsumexp", by_softmax)
    monkeypatch.setattr(lean, "_has_logsumexp", lambda q: True)


def attention_inputs(dtype=torch.float32, *, sizes, asked, heads=0, first=2, queries=37):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 37, 16).mul(2).to(dtype)
    size = torch.randint(1, 9, (2, 37)).float() if sizes else None
    return AttentionInputs(q, k, v, size, 0.25, 0, queries, asked, heads, first)


EVERY = [[bool(number & bit) for bit in (1, 2, 4)] for number in range(8)]


@pytest.mark.parametrize("asked", EVERY, ids=str)
@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("sizes", [True, False])
def test_statistics_follow_from_the_logarithm_of_the_sums(fused, asked, heads, sizes):
    inputs = attention_inputs(sizes=sizes, asked=asked, heads=heads)
    for one, other in zip(attention(Ops.LEAN, inputs), attention(Ops.TORCH, inputs), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-4), (torch.bfloat16, 3e-3)])
def test_statistics_keep_their_precision_in_half_precision(fused, dtype, error):
    """A mask alone would lose more: rounding L itself to bfloat16 changes the sums by 1e-2 here."""
    inputs = attention_inputs(dtype, sizes=False, asked=[True, True, True])
    q, k = inputs.q.float(), inputs.k.float()
    wanted = reference.statistics((q @ k.transpose(-2, -1) * 0.25).softmax(dim=-1), [True] * 3, 0, 2)
    found = attention(Ops.LEAN, inputs).statistics
    assert float((found / wanted - 1).abs().max()) < error


def test_prefix_tokens_alone_get_an_output_where_no_others_are_wanted(fused):
    inputs = attention_inputs(sizes=True, asked=[True, True, False], queries=2)
    torch.testing.assert_close(*(attention(ops, inputs).output for ops in (Ops.LEAN, Ops.TORCH)))


def test_masks_are_aligned():
    """The kernel reads several entries at once: strides are multiples of 16 bytes."""
    mask = lean._room_for(torch.ones(2, 3, 1, 37), torch.float16)
    assert mask.shape == (2, 3, 1, 37)
    assert [step % 8 for step in mask.stride()[:-1]] == [0, 0, 0]


def test_a_threshold_and_devices_without_the_kernel_take_the_map():
    statistics = attention_inputs(sizes=True, asked=[True, True, False])
    assert not lean.supports_lean(statistics)  # a CPU
    assert lean.supports_lean(statistics._replace(statistic_mask=[False, False, True]))
    assert not lean.supports_lean(statistics._replace(statistic_mask=[False] * 3, removed=5))
    wanted, found = (attention(ops, statistics) for ops in (Ops.TORCH, Ops.LEAN))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def merge_inputs(operator, dtype, tokens, sizes, protected=False):
    torch.manual_seed(tokens)
    x, branch = torch.randn(2, 3, tokens, 48).to(dtype)
    importance, size = torch.rand(3, tokens - 1), torch.randint(1, 4, (3, tokens - 1)).float()
    importance[:, 1] = importance[:, 2]  # a tie
    settings = (tokens // 3, 0.5, True, torch.rand(48).to(dtype), torch.rand(48).to(dtype), 1e-6)
    if operator is gtp_plus_merge:
        return GTPPlusMergeInputs(x, branch, importance, size if sizes else None, *settings)
    stays = (torch.arange(tokens - 1) % 7 == 0).float().expand(3, -1) if protected else None
    return GTPPlusMergeByProbeInputs(x, branch, torch.randn(48), size, stays, *settings)


CASES = [
    *((gtp_plus_merge, sizes, False) for sizes in (True, False)),
    *((gtp_plus_merge_by_probe, True, protected) for protected in (True, False)),
]


@pytest.mark.parametrize(("operator", "sizes", "protected"), CASES)
@pytest.mark.parametrize("tokens", [17, 197])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keep_norm", [True, False])
def test_merging_decides_as_the_reference(operator, sizes, protected, tokens, dtype, keep_norm):
    inputs = merge_inputs(operator, dtype, tokens, sizes, protected)._replace(preserve_norm=keep_norm)
    one, other = operator.by_set[Ops.LEAN](inputs), operator.reference(inputs)
    for image in range(3):
        assert one.keep[image].tolist() == other.keep[image].tolist()
        goes = [dict(zip(each.drop[image].tolist(), each.target[image].tolist(), strict=True)) for each in (one, other)]
        assert goes[0] == goes[1]
    assert torch.equal(one.size, other.size)
    for name in ("x", "normed"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["features", "all features", "importance", "all importance"])
def test_merging_takes_nan_and_keeps_it_to_its_image(where):
    inputs = merge_inputs(gtp_plus_merge, torch.float32, 21, True)
    name = "x" if "features" in where else "importance"
    spoilt = getattr(inputs, name).clone()
    spoilt[0 if "all" in where else (0, 5)] = torch.nan
    found = gtp_plus_merge.by_set[Ops.LEAN](inputs._replace(**{name: spoilt}))
    clean = gtp_plus_merge.by_set[Ops.LEAN](inputs)
    assert sorted(found.keep[0].tolist() + found.drop[0].tolist()) == list(range(20))
    assert int(found.target.max()) < found.keep.shape[1]
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[1:], other[1:])


def test_nan_features_are_similar_to_nobody():
    inputs = merge_inputs(gtp_plus_merge, torch.float32, 21, True)
    inputs.x[0, 6] = torch.nan  # image token 5, by far the most important
    inputs.importance[0, 5] = 9.0
    found = gtp_plus_merge.by_set[Ops.LEAN](inputs)
    assert 5 in found.keep[0].tolist()
    assert found.keep[0].tolist().index(5) not in found.target[0].tolist()


def test_zero_tokens_merge():
    inputs = merge_inputs(gtp_plus_merge, torch.float32, 17, True)
    inputs.x[0], inputs.branch[0] = 0, 0
    found, wanted = gtp_plus_merge.by_set[Ops.LEAN](inputs), gtp_plus_merge.reference(inputs)
    assert torch.equal(found.x[0], wanted.x[0])
    assert torch.equal(found.keep[0], wanted.keep[0])


@pytest.mark.parametrize("retained", [True, False])
def test_rows_are_merged_alike(monkeypatch, retained):
    torch.manual_seed(0)
    values, scores = torch.randn(2, 12, 5), torch.rand(2, 10)
    kept, gone = split_by_score(scores, 4)
    weights, retain = torch.rand(2, 6, 4), torch.rand(2, 6) if retained else None
    wanted = weighted_merge(values, 2, kept, gone, weights, retain, alpha=0.3)
    monkeypatch.setattr(helpers, "counts_launches", lambda tensor: True)
    torch.testing.assert_close(weighted_merge(values, 2, kept, gone, weights, retain, alpha=0.3), wanted)
    assert all(map(torch.equal, split_by_score(scores, 4), (kept, gone)))


METHODS = [
    *(GTP(propagate=6), GTP(propagate=6, select="class", heads="mean"), GTP(propagate=6, select="sum", graph="none")),
    *(GTP(propagate=6, exclude_self=True, count_class_row=False), GTP(propagate=6, theta=0.6)),
    *(GTPPlus(remove=6), GTPPlus(remove=6, calibration=families.calibration())),
    *(ToMe(r=6), EViT()),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("family", ["vit", "dinov2_registers"])
def test_whole_models_compute_what_they_did(monkeypatch, fused, method, family):
    model, images = families.make(family), families.images(family)
    fast = patch(model, method, kernels="torch")
    with torch.no_grad():
        wanted = families.output(fast, images)
        monkeypatch.setattr(helpers, "counts_launches", lambda tensor: True)
        monkeypatch.setattr(kernels, "counts_launches", lambda tensor: True)
        seen = []
        found = families.output(fast, images)
        loop.run(fast, images, observe=seen.append)
    assert seen[0].ops is Ops.LEAN
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


def test_gradients_are_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(kernels, "counts_launches", lambda tensor: True)
    assert kernels.select_ops("torch", torch.ones(1)) is Ops.TORCH
    with torch.no_grad():
        assert kernels.select_ops("torch", torch.ones(1)) is Ops.LEAN
