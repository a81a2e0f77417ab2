"""GTP+ by hand: what is redundant, who receives, what is conserved."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtp_vit import GTPError, GTPPlus, kernels, patch, trace
from gtp_vit.core.loop import run
from gtp_vit.core.schedule import removals
from gtp_vit.kernels import Ops
from gtp_vit.kernels.arguments import GTPPlusMergeInputs
from gtp_vit.methods.gtp_plus.merge import earlier_similarity, gtp_plus_merge, gtp_plus_merge_by_probe, merge_cost
from gtp_vit.patching import host_of
from gtp_vit.testing import families
from support.merging import check_merged
from support.operands import KINDS, values

tensor = torch.tensor


def test_only_earlier_tokens_are_looked_at():
    unit = tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]])
    found = earlier_similarity(unit)[0]
    assert found[0].tolist() == [-2, -2, -2]
    assert found[1].tolist() == pytest.approx([0.6, -2, -2])
    assert found[2].tolist() == pytest.approx([0.0, 0.8, -2])


def test_damage_by_hand():
    similarity = tensor([[[-2.0, -2, -2], [0.9, -2, -2], [0.5, 0.2, -2]]])
    found = merge_cost(similarity, tensor([[1.5, 1, 0.5]]), tensor([[1.0, 1, 3]]), 0.5)[0]
    assert found[0] == torch.inf  # nobody is more important
    # (2 / 2 + 0.5) * (1 - 0.9) * sqrt(1 * 1 / 2)
    assert found[1] == pytest.approx(1.5 * 0.1 * 0.5**0.5, rel=1e-5)
    # (1 / 2 + 0.5) * min((1 - 0.5) sqrt(3 * 1 / 4), (1 - 0.2) sqrt(3 / 4))
    assert found[2] == pytest.approx(1.0 * 0.5 * 0.75**0.5, rel=1e-5)


def conserve_by_hand(kernel):
    # One prefix token and four image tokens: 0 and 3 nearly alike, 1 and 2 apart; 3 is less important than 0.
    x = tensor([[[7.0, 7, 7], [3, 0, 0], [0, 1, 0], [0, 0, 1], [0.9, 0.1, 0]]])
    importance, size = tensor([[0.4, 0.3, 0.2, 0.1]]), tensor([[1.0, 1, 1, 2]])
    return kernel(GTPPlusMergeInputs(x, torch.zeros_like(x), importance, size, 1, 0.5, True, None, None, 0.0))


@pytest.mark.parametrize("ops", Ops)
def test_one_merge_by_hand(ops):
    if ops is Ops.NATIVE and kernels.native.LOAD_ERROR is not None:
        pytest.skip(kernels.native.LOAD_ERROR)
    x, _, size, kept, gone, target = conserve_by_hand(partial(gtp_plus_merge, ops))
    assert (kept.tolist(), gone.tolist(), target.tolist()) == ([[0, 1, 2]], [[3]], [[0]])
    assert size.tolist() == [[3, 1, 1]]
    assert x[0, 0].tolist() == [7, 7, 7]
    # (1 * (3, 0, 0) + 2 * (0.9, 0.1, 0)) / 3 = (1.6, 0.0667, 0), stretched to the longer one's length, 3
    direction = tensor([1.6, 0.2 / 3, 0])
    assert x[0, 1].tolist() == pytest.approx((3 * direction / direction.norm()).tolist(), rel=1e-5)
    assert x[0, 2:].tolist() == [[0, 1, 0], [0, 0, 1]]


needs_native = pytest.mark.skipif(kernels.native.LOAD_ERROR is not None, reason=str(kernels.native.LOAD_ERROR))


@needs_native
@pytest.mark.parametrize(("tokens", "channels", "batch"), [(5, 3, 1), (33, 40, 2), (197, 192, 3), (64, 17, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_its_reference(tokens, channels, batch, dtype):
    torch.manual_seed(tokens)
    x, branch = torch.randn(2, batch, tokens, channels).to(dtype)
    importance, size = torch.rand(batch, tokens - 1), torch.randint(1, 4, (batch, tokens - 1)).float()
    importance[:, 1] = importance[:, 2]  # a tie
    weight, bias = torch.randn(2, channels).to(dtype)
    arguments = (x, branch, importance, size, tokens // 3, 0.5, True, weight, bias, 1e-6)
    one, other = (
        gtp_plus_merge.reference(GTPPlusMergeInputs(*arguments)),
        kernels.native.gtp_plus_merge(GTPPlusMergeInputs(*arguments)),
    )
    alike = (x, branch, importance, None, *arguments[4:])
    for each in (gtp_plus_merge.reference, kernels.native.gtp_plus_merge):
        ones = GTPPlusMergeInputs(*alike[:3], torch.ones_like(size), *alike[4:])
        for found, wanted in zip(each(GTPPlusMergeInputs(*alike)), each(ones), strict=True):
            assert torch.equal(found, wanted)
    for index in (3, 4, 5):
        assert torch.equal(one[index], other[index])
    assert torch.equal(one[2], other[2])
    # two bfloat16 numbers next to each other, and what LayerNorm makes of that
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 8e-3}
    for index in (0, 1):
        torch.testing.assert_close(one[index], other[index], **close)


@pytest.mark.parametrize(("tokens", "channels", "batch"), [(17, 8, 2), (197, 64, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [True, False])
def test_the_portable_form_decides_as_the_reference(tokens, channels, batch, dtype, sizes):
    torch.manual_seed(tokens)
    x, branch = torch.randn(2, batch, tokens, channels).to(dtype)
    importance, size = torch.rand(batch, tokens - 1), torch.randint(1, 4, (batch, tokens - 1)).float()
    size = size if sizes else None
    arguments = (x, branch, importance, size, tokens // 3, 0.5, True, None, None, 0.0)
    one, other = (
        gtp_plus_merge.reference(GTPPlusMergeInputs(*arguments)),
        gtp_plus_merge.by_set[Ops.PORTABLE](GTPPlusMergeInputs(*arguments)),
    )
    assert one[0].dtype == other[0].dtype == dtype
    for b in range(batch):  # those that leave are in another order
        assert one[3][b].tolist() == other[3][b].tolist()
        goes = [dict(zip(found[4][b].tolist(), found[5][b].tolist(), strict=True)) for found in (one, other)]
        assert goes[0] == goes[1]
    assert torch.equal(one[2], other[2].to(one[2].dtype))
    close = {"rtol": 8e-3, "atol": 8e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(one[0], other[0], **close)


@pytest.mark.time_limit(5)
@needs_native
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    of_importance=st.sampled_from(("normal", "equal", "ties")),
    count=st.one_of(st.integers(2, 40), st.integers(95, 105)),
    prefix=st.integers(0, 5),
    channels=st.sampled_from([1, 3, 8, 15, 16, 33, 48, 192]),
    keep_norm=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_kernel_and_reference_merge_by_the_definition(
    kind, of_importance, count, prefix, channels, keep_norm, seed, data
):
    """Of nearly equal costs or similarities rounding decides, and may decide differently; both must be right then."""
    generator = torch.Generator().manual_seed(seed)
    x, branch = (values(kind, 1, prefix + count, channels, generator=generator) for _ in range(2))
    importance = values(of_importance, 1, count, generator=generator).abs() + 0.01
    size = torch.randint(1, 9, (1, count), generator=generator).float()
    removed, floor = data.draw(st.integers(1, count - 1)), data.draw(st.sampled_from([0.0, 0.5, 20.0]))
    norm = (torch.randn(channels, generator=generator), torch.randn(channels, generator=generator), 1e-6)
    arguments = (x, branch, importance, size, removed, floor, keep_norm)
    for kernel in (kernels.native.gtp_plus_merge, gtp_plus_merge.reference):
        check_merged(arguments, norm, kernel(GTPPlusMergeInputs(*arguments, *norm)))


@needs_native
@pytest.mark.parametrize("operator", [gtp_plus_merge, gtp_plus_merge_by_probe])
def test_kernel_and_reference_break_ties_alike(operator):
    """Of one channel all cosines are 1 or -1, and only how a unit vector is rounded decides who goes to whom."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, branch = torch.randn(2, 3, 20, 1, generator=generator)
        importance, size = torch.rand(2, 3, 19, generator=generator) + 0.5
        by = (importance, size) if operator is gtp_plus_merge else (torch.ones(1), size, None)
        arguments = (x, branch, *by, 12, 0.5, True, None, None, 1e-6)
        inputs = operator.inputs(*arguments)
        found, wanted = operator.by_set[Ops.NATIVE](inputs), operator.reference(inputs)
        for one, other in zip(found[3:], wanted[3:], strict=True):
            assert torch.equal(one, other), seed


def test_the_definition_finds_a_wrong_decision():
    """`check_merged` judges where rounding decides, so it must see what is wrong: who goes, to whom, what is made."""
    x = torch.randn(1, 9, 1, generator=torch.Generator().manual_seed(5))  # one channel: all cosines are 1 or -1
    arguments = (x, torch.zeros_like(x), torch.linspace(2, 1, 9)[None], None, 3, 0.5, False)
    norm = (None, None, 1e-6)
    right = gtp_plus_merge.reference(GTPPlusMergeInputs(*arguments, *norm))
    check_merged(arguments, norm, right)
    kept, gone, target = right[3:]
    sign = x[0, :, 0].sign()
    other = next(i for i, token in enumerate(kept[0].tolist()) if sign[token] != sign[gone[0, 0]])
    elsewhere = target.clone()
    elsewhere[0, 0] = other
    dear = kept.clone(), gone.clone()  # the most important token goes, and one of those that cost nothing stays
    dear[0][0, 0], dear[1][0, 0] = gone[0, 0], kept[0, 0]
    for wrong in (
        (right[0] + 0.01, *right[1:]),
        (*right[:2], right[2] + 1, *right[3:]),
        (*right[:5], elsewhere),
        (*right[:3], dear[0].sort(dim=1).values, dear[1].sort(dim=1).values, target),
    ):
        with pytest.raises(AssertionError):
            check_merged(arguments, norm, wrong)


def awkward(where: str, value: float):
    torch.manual_seed(3)
    x, branch = torch.randn(2, 2, 21, 16)
    importance, size = torch.rand(2, 20), torch.randint(1, 4, (2, 20)).float()
    if where == "features":
        x[0, 5, 3] = x[0, 9, 0] = value
    elif where == "all features":
        x[0] = value
    elif where == "importance":
        importance[0, 2] = importance[0, 7] = value
    else:
        importance[0] = value
    return x, branch, importance, size, 6, 0.5, True, torch.randn(16), torch.randn(16), 1e-6


@needs_native
@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("features", value) for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1e15, 1e-30)),
        *(("all features", value) for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1e-30)),
        *(("importance", value) for value in (torch.nan, torch.inf, 0.0, 1e30, 1e-30)),
        *(("all importance", value) for value in (torch.nan, torch.inf, 0.0, 1e30, 1e-30)),
    ],
)
def test_nan_inf_and_extremes_are_treated_alike_by_kernel_and_reference(where, value):
    arguments = awkward(where, value)
    found, wanted = (
        kernels.native.gtp_plus_merge(GTPPlusMergeInputs(*arguments)),
        gtp_plus_merge.reference(GTPPlusMergeInputs(*arguments)),
    )
    for one, other in zip(found[2:], wanted[2:], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    clean = kernels.native.gtp_plus_merge(GTPPlusMergeInputs(*(t[1:] if i < 4 else t for i, t in enumerate(arguments))))
    for one, other in zip(found, clean, strict=True):  # the image beside it sees nothing of it
        assert torch.equal(one[1:], other)


@pytest.mark.parametrize("ops", [Ops.TORCH, Ops.NATIVE])
def test_nan_is_similar_to_nobody(ops):
    """Token 2 is NaN: it neither leaves nor receives, though it is the most important one."""
    if ops is Ops.NATIVE and kernels.native.LOAD_ERROR is not None:
        pytest.skip(kernels.native.LOAD_ERROR)
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    x[0, 2] = torch.nan
    importance, size = tensor([[0.2, 0.3, 0.9, 0.1, 0.4, 0.5]]), torch.ones(1, 6)
    found, _, _, kept, _, target = gtp_plus_merge(
        ops, GTPPlusMergeInputs(x, torch.zeros_like(x), importance, size, 3, 0.5, True, None, None, 0.0)
    )
    assert 2 in kept[0].tolist()
    assert kept[0].tolist().index(2) not in target[0].tolist()
    assert found.isnan().any(dim=2).sum() == 1


def test_the_portable_form_does_not_hide_nan():
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    x[0, 2] = torch.nan
    arguments = (torch.zeros_like(x), torch.rand(2, 6), torch.ones(2, 6), 3, 0.5, True, None, None, 0.0)
    found = gtp_plus_merge(Ops.PORTABLE, GTPPlusMergeInputs(x, *arguments))[0]
    assert found[0].isnan().any()
    assert found[1].isfinite().all()


@needs_native
def test_the_operator_passes_torchs_own_check():
    torch.library.opcheck(
        torch.ops.gtp_vit.gtp_plus_merge.default,
        awkward("features", 1.0),
        test_utils=("test_schema", "test_faketensor"),
    )


@needs_native
def test_the_operator_takes_strided_tensors():
    x, branch = torch.randn(16, 10, 2).permute(2, 1, 0), torch.randn(2, 16, 10).transpose(1, 2)
    importance, size = torch.rand(9, 2).T, torch.rand(1, 9).expand(2, -1) + 0.5
    arguments = (x, branch, importance, size, 3, 0.5, True, torch.rand(32)[::2], torch.rand(32)[::2], 1e-6)
    for found, wanted in zip(
        kernels.native.gtp_plus_merge(GTPPlusMergeInputs(*arguments)),
        gtp_plus_merge.reference(GTPPlusMergeInputs(*arguments)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_through_the_operator_are_the_references():
    x, *rest = awkward("features", 1.0)
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(
        sum(t.square().sum() for t in gtp_plus_merge.reference(GTPPlusMergeInputs(x, *rest))[:2]), x
    )
    (found,) = torch.autograd.grad(sum(t.square().sum() for t in torch.ops.gtp_vit.gtp_plus_merge(x, *rest)[:2]), x)
    assert torch.equal(found, wanted)


@needs_native
def test_threads_share_the_kernel_and_their_number_changes_nothing():
    inputs = [(*torch.randn(2, 3, 30 + n, 33), torch.rand(3, 29 + n), torch.ones(3, 29 + n)) for n in range(12)]

    def run_one(item):
        return kernels.native.gtp_plus_merge(GTPPlusMergeInputs(*item, 9, 0.5, True, None, None, 0.0))

    before = torch.get_num_threads()
    expected = [run_one(item) for item in inputs]
    for threads in (1, 2, 7):  # an image a thread, or all threads for one image
        torch.set_num_threads(threads)
        try:
            alone = [run_one(item) for item in inputs]
            with ThreadPoolExecutor(4) as pool:
                together = list(pool.map(run_one, inputs))
        finally:
            torch.set_num_threads(before)
        for found in (*zip(alone, expected, strict=True), *zip(together, expected, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("family", ["vit", "gap", "dinov2_registers"])
def test_sizes_add_up_and_nothing_is_lost(family):
    fast, images = patch(families.make(family), GTPPlus(remove=9)), families.images(family)
    found = trace(fast, images)
    assert found.lost().tolist() == [0, 0, 0]
    for number, layer in enumerate(found.layers):
        assert layer.sizes.sum(dim=1).tolist() == pytest.approx([64, 64, 64])
        assert layer.kept.shape[1] == 64 - 9 * (number + 1)


def test_averaged_tokens_get_the_larger_norm():
    model, images = families.make("vit"), families.images("vit", 1)
    steps = []
    fast = patch(model, GTPPlus(remove=(0, 20, 0, 0)))
    reduce = fast.reducer.reduce

    def spy(attention):
        after = reduce(attention)
        steps.append((attention.add(), after))
        return after

    fast.reducer.reduce = spy
    with torch.no_grad():
        run(fast, images, track_owners=True)
    before, after = next(pair for pair in steps if pair[1].cell.shape[1] == 44)
    lengths = before.image[0].norm(dim=1)
    for row in range(44):
        expected = lengths[after.owner[0] == row].max()
        assert after.image[0, row].norm() == pytest.approx(float(expected), rel=1e-5)


def test_without_its_parts_it_still_runs():
    model, images = families.make("vit"), families.images("vit")
    with torch.no_grad():
        one = patch(model, GTPPlus())(images)
        for method in (GTPPlus(preserve_norm=False), GTPPlus(size_bias=0), GTPPlus(importance_floor=0)):
            other = patch(model, method)(images)
            assert other.isfinite().all()
            assert not torch.equal(one, other)


def test_bad_settings():
    for method in (
        GTPPlus(importance_floor=-1),
        GTPPlus(size_bias=3),
        GTPPlus(remove=16),
        GTPPlus(remove="often"),
    ):
        with pytest.raises(GTPError):
            patch(families.make("vit"), method)


@pytest.mark.parametrize("family", ["vit", "gap"])
def test_half_of_the_strength_removes_half_of_the_tokens_in_the_default_shape(family):
    vit = host_of(families.make(family)).vit  # 4 layers, 64 tokens
    assert GTPPlus.at_strength(vit, 0.5).remove == removals("default:8", 4, 64)
    assert GTPPlus.at_strength(vit, 0).remove == (0, 0, 0, 0)
    assert GTPPlus.at_strength(vit, 1).remove == (0, 63, 0, 0)
