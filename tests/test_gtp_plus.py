"""GTP+ by hand: what is redundant, who receives, what is conserved."""

import pytest
import torch

import families
from gtp_vit import GTPError, GTPPlus, kernels, patch, trace
from gtp_vit.core.loop import run
from gtp_vit.kernels import conserving
from gtp_vit.kernels.conserving import damage, earlier_similarity

tensor = torch.tensor


def test_only_earlier_tokens_are_looked_at():
    unit = tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]])
    found = earlier_similarity(unit)[0]
    assert found[0].tolist() == [-2, -2, -2]
    assert found[1].tolist() == pytest.approx([0.6, -2, -2])
    assert found[2].tolist() == pytest.approx([0.0, 0.8, -2])


def test_damage_by_hand():
    similarity = tensor([[[-2.0, -2, -2], [0.9, -2, -2], [0.5, 0.2, -2]]])
    found = damage(similarity, tensor([[3.0, 2, 1]]), tensor([[1.0, 1, 3]]), 0.5)[0]
    assert found[0] == torch.inf  # nobody is more important
    # (2 / 2 + 0.5) * (1 - 0.9) * sqrt(1 * 1 / 2)
    assert found[1] == pytest.approx(1.5 * 0.1 * 0.5**0.5, rel=1e-5)
    # (1 / 2 + 0.5) * min((1 - 0.5) sqrt(3 * 1 / 4), (1 - 0.2) sqrt(3 / 4))
    assert found[2] == pytest.approx(1.0 * 0.5 * 0.75**0.5, rel=1e-5)


def conserve_by_hand(kernel):
    # One prefix token and four image tokens: 0 and 3 nearly alike, 1 and 2 apart; 3 is less important than 0.
    x = tensor([[[7.0, 7, 7], [3, 0, 0], [0, 1, 0], [0, 0, 1], [0.9, 0.1, 0]]])
    importance, size = tensor([[0.4, 0.3, 0.2, 0.1]]), tensor([[1.0, 1, 1, 2]])
    return kernel(x, torch.zeros_like(x), importance, size, 1, 0.5, True, None, None, 0.0)


@pytest.mark.parametrize("native", [False, True])
def test_one_merge_by_hand(native):
    if native and kernels.native.PROBLEM is not None:
        pytest.skip(kernels.native.PROBLEM)
    x, _, size, kept, gone, target = conserve_by_hand(lambda *a: kernels.conserve(native, *a))
    assert (kept.tolist(), gone.tolist(), target.tolist()) == ([[0, 1, 2]], [[3]], [[0]])
    assert size.tolist() == [[3, 1, 1]]
    assert x[0, 0].tolist() == [7, 7, 7]
    # (1 * (3, 0, 0) + 2 * (0.9, 0.1, 0)) / 3 = (1.6, 0.0667, 0), stretched to the longer one's length, 3
    direction = tensor([1.6, 0.2 / 3, 0])
    assert x[0, 1].tolist() == pytest.approx((3 * direction / direction.norm()).tolist(), rel=1e-5)
    assert x[0, 2:].tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(("tokens", "channels", "batch"), [(5, 3, 1), (33, 40, 2), (197, 192, 3), (64, 17, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_its_twin(tokens, channels, batch, dtype):
    if kernels.native.PROBLEM is not None:
        pytest.skip(kernels.native.PROBLEM)
    torch.manual_seed(tokens)
    x, branch = torch.randn(2, batch, tokens, channels).to(dtype)
    importance, size = torch.rand(batch, tokens - 1), torch.randint(1, 4, (batch, tokens - 1)).float()
    importance[:, 1] = importance[:, 2]  # a tie
    weight, bias = torch.randn(2, channels).to(dtype)
    arguments = (x, branch, importance, size, tokens // 3, 0.5, True, weight, bias, 1e-6)
    one, other = conserving.conserve(*arguments), kernels.native.conserve(*arguments)
    for index in (3, 4, 5):
        assert torch.equal(one[index], other[index])
    assert torch.equal(one[2], other[2])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for index in (0, 1):
        torch.testing.assert_close(one[index].float(), other[index].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["vit", "gap", "dinov2_registers"])
def test_sizes_add_up_and_nothing_is_lost(family):
    fast, images = patch(families.make(family), GTPPlus(propagate=9)), families.images(family)
    found = trace(fast, images)
    assert found.lost().tolist() == [0, 0, 0]
    for number, layer in enumerate(found.layers):
        assert layer.size.sum(dim=1).tolist() == pytest.approx([64, 64, 64])
        assert layer.kept.shape[1] == 64 - 9 * (number + 1)


def test_averaged_tokens_get_the_larger_norm():
    model, images = families.make("vit"), families.images("vit", 1)
    steps = []
    fast = patch(model, GTPPlus(propagate=(0, 20, 0, 0)))
    reduce = fast.reducer.reduce

    def spy(layer, tokens, branch, stats, norm):
        after, normed = reduce(layer, tokens, branch, stats, norm)
        steps.append((tokens.add(branch), after))
        return after, normed

    fast.reducer.reduce = spy
    with torch.no_grad():
        run(fast, images, follow=True)
    before, after = next(pair for pair in steps if pair[1].position.shape[1] == 44)
    lengths = before.image[0].norm(dim=1)
    for row, share in enumerate(after.source[0]):
        expected = lengths[share > 0].max()
        assert after.image[0, row].norm() == pytest.approx(float(expected), rel=1e-5)


def test_without_its_parts_it_still_runs():
    model, images = families.make("vit"), families.images("vit")
    with torch.no_grad():
        one = patch(model, GTPPlus())(images)
        for method in (GTPPlus(keep_norm=False), GTPPlus(proportional_attention=0), GTPPlus(floor=0)):
            other = patch(model, method)(images)
            assert other.isfinite().all()
            assert not torch.equal(one, other)


def test_bad_settings():
    for method in (
        GTPPlus(floor=-1),
        GTPPlus(proportional_attention=3),
        GTPPlus(propagate=16),
        GTPPlus(propagate="often"),
    ):
        with pytest.raises(GTPError):
            patch(families.make("vit"), method)
