"""trace: where every patch went."""

import pytest
import torch

from gtp_vit import GTP, METHODS, Identity, patch, trace
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import GTPError
from gtp_vit.kernels import native
from gtp_vit.methods.gtp.graph import adjacency, normalise_matrix
from gtp_vit.testing import families

METHOD = GTP(propagate=7, alpha=0.3)


@pytest.fixture
def traced():
    fast, images = patch(families.make("dinov2_registers"), METHOD), families.images("dinov2_registers")
    return fast, images, trace(fast, images)


def test_kept_and_removed_make_up_what_was_there(traced):
    _, images, found = traced
    before = torch.arange(64).expand(len(images), -1)
    for layer in found.layers:
        together = torch.cat([layer.kept, layer.removed], dim=1).sort(dim=1).values
        assert torch.equal(together, before)
        before = layer.kept


def test_a_removed_patch_belongs_to_its_strongest_neighbour_that_stays(traced):
    fast, images, found = traced
    lists = fast.reducer.start(fast.reduction.backbone.embed(fast, images)).method_state.lists
    graph = normalise_matrix(adjacency(lists.neighbours))
    for layer in found.layers:
        for image in range(len(images)):
            edges = graph[image][layer.kept[image]][:, layer.removed[image]]
            strongest, place = edges.max(dim=0)
            expected = torch.where(strongest > 0, place, -1)
            assert torch.equal(layer.owners[image][layer.removed[image]], expected)


def test_lost_counts_removed_tokens_that_nobody_took(traced):
    _, _, found = traced
    for layer in found.layers:
        expected = (layer.owners.gather(1, layer.removed) < 0).float().mean(dim=1)
        assert torch.equal(layer.lost, expected)
    assert found.lost().tolist() == pytest.approx(torch.stack([layer.lost for layer in found.layers]).mean(0).tolist())


def test_owners_pass_on_what_they_own():
    """Patch 1 goes to 0, then 0 goes to 3; patch 2 is lost, and 4 becomes part of a token in no cell."""
    tokens = Tokens(torch.randn(1, 6, 2), torch.arange(5)[None], 1, (1, 5), owner=torch.arange(5)[None])
    weights = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    tokens = tokens.merge(torch.tensor([[0, 3, 4]]), torch.tensor([[1, 2]]), weights, torch.tensor([[2.0, 1.0, 1.0]]))
    assert tokens.owner.tolist() == [[0, 0, -1, 1, 2]]
    weights = torch.tensor([[[1.0], [0.0]]])
    tokens = tokens.merge(torch.tensor([[1, 2]]), torch.tensor([[0]]), weights, torch.tensor([[3.0, 1.0]]))
    assert tokens.owner.tolist() == [[0, 0, -1, 0, 1]]
    tokens = tokens.fuse(torch.tensor([[0]]), torch.tensor([[1]]), torch.ones(1, 1, 2), 5)
    assert tokens.owner.tolist() == [[0, 0, -1, 0, 1]]
    assert (tokens.cell.tolist(), tokens.token_ids.tolist(), tokens.sizes.tolist()) == ([[3, 5]], [[3, 5]], [[3, 1]])


def test_conserved_sizes_add_up_to_what_was_not_lost():
    fast = patch(families.make("vit"), GTP(propagate=7, conserve_sizes=True))
    found = trace(fast, families.images("vit"))
    assert found.lost().tolist() == [0, 0, 0]  # or the sizes would not add up
    total = found.layers[-1].sizes.sum(dim=1)
    torch.testing.assert_close(total, torch.full_like(total, 64))


def test_pruning_loses_everything():
    found = trace(patch(families.make("vit"), GTP(propagate=7, graph="none")), families.images("vit"))
    assert found.lost().tolist() == [1, 1, 1]


def test_what_is_propagated_with_no_strength_is_lost():
    found = trace(patch(families.make("vit"), GTP(propagate=7, alpha=0)), families.images("vit"))
    assert found.lost().tolist() == [1, 1, 1]


def test_nothing_is_skipped_and_nothing_is_removed_by_identity():
    found = trace(patch(families.make("vit"), Identity()), families.images("vit"))
    assert all(layer.kept.shape[1] == 64 and layer.removed.shape[1] == 0 for layer in found.layers)
    assert found.lost().tolist() == [0, 0, 0]


def test_tracing_does_not_change_what_the_model_computes(traced):
    fast, images, _ = traced
    with torch.no_grad():
        before = fast(images)
        trace(fast, images)
        assert torch.equal(fast(images), before)


def test_a_plain_model_cannot_be_traced():
    with pytest.raises(GTPError, match="patch it first"):
        trace(families.make("vit"), families.images("vit"))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [method() for method in METHODS.values()], ids=str)
@pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
def test_a_traced_pass_is_the_ordinary_one(method, dtype, kernels):
    """Bit by bit: a trace looks on, and takes no way of its own."""
    if kernels == "native" and native.LOAD_ERROR is not None:
        pytest.skip(native.LOAD_ERROR)
    fast = patch(families.make("dinov2_registers").to(dtype), method, kernels=kernels)
    images = families.images("dinov2_registers").to(dtype)
    plain, followed = [], []
    with torch.no_grad():
        run(fast, images, observe=plain.append)
        run(fast, images, observe=followed.append, track_owners=True)
    for one, other in zip(plain, followed, strict=True):
        assert torch.equal(one.cell, other.cell)
        assert torch.equal(one.x, other.x)
        assert (one.size is None and other.size is None) or torch.equal(one.size, other.size)
