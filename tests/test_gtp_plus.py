"""GTP+ by hand: what is redundant, who receives, what is conserved."""

import pytest
import torch

import families
from gtp_vit import GTPError, GTPPlus, patch, trace
from gtp_vit.core.loop import run
from gtp_vit.methods.gtp_plus import redundancy

tensor = torch.tensor


def test_redundancy_looks_at_more_important_tokens_only():
    similarity = tensor([[[1.0, 0.9, 0.2], [0.9, 1.0, 0.4], [0.2, 0.4, 1.0]]])
    # by importance: token 2, then 0, then 1
    assert redundancy(similarity, tensor([[0.3, 0.1, 0.6]]))[0].tolist() == pytest.approx([0.2, 0.9, -1.0])
    # of equally important ones the earlier counts as the more important
    assert redundancy(similarity, tensor([[0.5, 0.5, 0.5]]))[0].tolist() == pytest.approx([-1.0, 0.9, 0.4])


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
        for method in (GTPPlus(keep_norm=False), GTPPlus(proportional_attention=False), GTPPlus(importance=0)):
            other = patch(model, method)(images)
            assert other.isfinite().all()
            assert not torch.equal(one, other)


def test_bad_settings():
    for method in (GTPPlus(importance=-1), GTPPlus(propagate=16), GTPPlus(propagate="often")):
        with pytest.raises(GTPError):
            patch(families.make("vit"), method)
