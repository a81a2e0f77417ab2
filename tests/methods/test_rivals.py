"""The rivals' arithmetic on examples small enough to check by hand, and their bad input."""

import math

import pytest
import torch
from safetensors.torch import save_file

from gtp_vit import (
    ATC,
    ATS,
    MCTF,
    PPT,
    DiffRate,
    DynamicViT,
    EViT,
    EvoViT,
    GTPError,
    PiToMe,
    ToFu,
    ToMe,
    TriLevel,
    patch,
    trace,
)
from gtp_vit.core.attention import EPSILON, QKV, Adjustments, attend, masked_softmax
from gtp_vit.core.loop import run
from gtp_vit.core.merging import MergePairs, average, match, max_mergeable
from gtp_vit.core.schedule import removals
from gtp_vit.kernels import Ops
from gtp_vit.kernels.arguments import ClusterInputs
from gtp_vit.methods.atc import LINKAGES, cluster
from gtp_vit.methods.ats import sample
from gtp_vit.methods.mctf import RecordedMap, group_max, match_both_ways, output_from_max_rows, output_from_merged_map
from gtp_vit.methods.pitome import match_by_energy
from gtp_vit.methods.trilevel import strongest_mask
from gtp_vit.testing import families

tensor = torch.tensor


def test_tome_matches_tokens_at_even_and_odd_places():
    # behind a class token the image tokens 1 and 3 look for partners among 0, 2 and 4
    metric = tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0], [-1.0, 0.4]]])
    pairs = match(metric, prefix=1, r=1, keep_order=True)
    assert pairs.drop.tolist() == [[1]]  # most similar to 0
    assert pairs.keep.tolist() == [[3, 0, 2, 4]]
    assert pairs.target.tolist() == [[1]]
    # without it 0, 2 and 4 do
    pairs = match(metric, prefix=0, r=2, keep_order=False)
    assert pairs.drop.tolist() == [[0, 4]]
    assert pairs.keep.tolist() == [[2, 1, 3]]
    assert pairs.target.tolist() == [[1, 2]]


def test_tome_averages_by_size():
    pairs = MergePairs(keep=tensor([[0, 1]]), drop=tensor([[2, 3]]), target=tensor([[1, 1]]))
    weights, retain, size = average(pairs, tensor([[1.0, 2.0, 1.0, 5.0]]))
    assert weights.tolist() == [[[0.0, 0.0], [0.125, 0.625]]]
    assert retain.tolist() == [[1.0, 0.25]]
    assert size.tolist() == [[1.0, 8.0]]


def test_tome_merges_at_most_half_of_the_tokens():
    assert removals(16, 12, 196, max_mergeable)[-2:] == (16, 10)
    assert sum(removals(30, 12, 196, max_mergeable)) == 195  # one is left
    assert removals((30, 20), 4, 196, max_mergeable) == (30, 20, 0, 0)


def test_inflection_and_middle_schedules():
    assert removals("inflection:8:-1", 12, 196) == (16, 14, 13, 11, 10, 8, 7, 5, 4, 2, 1, 0)
    middle = removals("peak:8", 12, 196)
    assert sum(middle) == 96
    assert middle[0] == 0
    assert max(middle) == middle[4]


def test_schedules_of_the_later_rivals():
    assert removals("after:1:16", 4, 196) == (0, 16, 16, 16)
    # 196 * 0.95 = 186.2, so 9 go; 187 * 0.95 = 177.65: 9; 178 * 0.95 = 169.1: 8
    assert removals("ratio:0.95", 3, 196) == (9, 9, 8)
    assert removals("ratio:0.95:1", 3, 196) == (9, 9, 8)
    assert removals("ratio:0.9:1", 2, 19) == (2, 1)  # of 20 and 18; without the class token 1 of 19 and 1 of 18
    assert removals("ratio:0.9", 2, 19) == (1, 1)
    assert removals("geometric:0.7:3:6:9", 12, 196) == (0, 0, 0, 59, 0, 0, 41, 0, 0, 29, 0, 0)
    assert removals("geometric:0.15:0:1:2", 3, 196) == (167, 25, 0)  # nothing of 196 would be left: it stays


def greedy(distance, removed, linkage):
    """The definition, one pair after the other: the owner of each token."""
    clusters = [[token] for token in range(len(distance))]
    kind = {"average": lambda d: sum(d) / len(d), "complete": max, "single": min}[linkage]
    for _ in range(removed):
        pairs = [(a, b) for a in clusters for b in clusters if a[0] < b[0]]
        one, two = min(pairs, key=lambda pair: kind([distance[i][j] for i in pair[0] for j in pair[1]]))
        clusters.remove(two)
        one += two
    return {token: min(each) for each in clusters for token in each}


@pytest.mark.parametrize("linkage", LINKAGES)
def test_atc_joins_the_two_nearest_clusters_again_and_again(linkage):
    torch.manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(3, 17, 4), dim=-1)
    distance = 1 - features @ features.transpose(1, 2)
    for ops in (Ops.NATIVE, Ops.TORCH):
        for removed in (1, 6, 16):
            kept, gone, target = cluster(ops, ClusterInputs(distance, removed, LINKAGES.index(linkage)))
            for image in range(3):
                owner = greedy(distance[image].double().tolist(), removed, linkage)
                assert kept[image].tolist() == sorted(set(owner.values()))
                assert sorted(gone[image].tolist()) == [token for token in range(17) if owner[token] != token]
                to = kept[image][target[image]].tolist()
                assert [owner[token] for token in gone[image].tolist()] == to


def test_atc_says_why_it_cannot_be_exported():
    with pytest.raises(GTPError, match="a loop that engines do not have"):
        torch.export.export(patch(families.make("vit"), ATC()), (families.images("vit"),), strict=False)


def test_mctf_merges_in_chains():
    """Behind a class token 1, 3, 5 are at even places and 0, 2, 4 at odd ones: 1 goes to 0, and with it to 3."""
    angles = tensor([0.2, 0.0, 2.0, 0.5, 3.2, 4.5])
    image = torch.stack([angles.cos(), angles.sin()], dim=1).unsqueeze(0)
    pairs = match_both_ways(image, torch.ones(1, 6), 1.0, prefix=1, r=2, bidirectional=True)
    assert pairs.drop.tolist() == [[1, 0]]
    assert pairs.keep.tolist() == [[3, 5, 4, 2]]  # from odd places by their attraction: 4 to 5 by 1.3, 2 to 3 by 1.5
    assert pairs.target.tolist() == [[0, 0]]
    one_way = match_both_ways(image, torch.ones(1, 6), 1.0, prefix=1, r=2, bidirectional=False)
    assert one_way.drop.tolist() == [[1, 3]]
    assert one_way.keep.tolist() == [[5, 0, 2, 4]]
    assert one_way.target.tolist() == [[1, 1]]
    # a small factor keeps a token out of it, however similar it is
    factor = tensor([[1.0, 0.1, 1.0, 1.0, 1.0, 1.0]])
    assert 1 not in match_both_ways(image, factor, 1.0, prefix=1, r=2, bidirectional=False).drop.tolist()[0]


def test_mctf_sums_columns_and_averages_rows_of_the_map():
    torch.manual_seed(0)
    probs = torch.rand(1, 2, 5, 5).softmax(dim=-1)
    pairs = MergePairs(keep=tensor([[3, 0]]), drop=tensor([[1, 2]]), target=tensor([[1, 1]]))  # of image tokens 1 .. 4
    weights, retain, _ = average(pairs, tensor([[1.0, 2.0, 5.0, 1.0]]))
    v = torch.randn(1, 2, 3, 4)  # of the class token, image token 3, and the group
    seen = RecordedMap(probs, 1, pairs, weights, retain)
    groups = [[0], [4], [1, 2, 3]]
    columns = torch.stack([probs[..., group].sum(-1) for group in groups], dim=-1)
    share = tensor([1.0, 2.0, 5.0])[:, None] / 8
    rows = [columns[:, :, 0], columns[:, :, 4], (columns[:, :, 1:4] * share).sum(2)]
    largest_rows = [*rows[:2], columns[:, :, 1:4].amax(2)]
    for found, wanted in ((output_from_merged_map, rows), (output_from_max_rows, largest_rows)):
        out = (torch.stack(wanted, dim=2) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found(seen, v, None), out)
        torch.testing.assert_close(found(seen, v, 1), out[:, :1])
    x = torch.randn(1, 5, 3)
    torch.testing.assert_close(group_max(x, 1, pairs)[0, 2], x[0, 1:4].amax(0))


def test_pitome_protects_isolated_tokens():
    """Three tokens in one direction, and two alone: only the former merge in energy mode."""
    metric = tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.02], [-1.0, -1.0], [1.0, -0.05]]])
    pairs = match_by_energy(metric, 1, 0.75, bsm=False)
    assert {*pairs.drop[0].tolist(), int(pairs.keep[0][pairs.target[0]])} == {1, 2}
    assert sorted(pairs.keep[0].tolist() + pairs.drop[0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("variant", "first"), [("paper", 2), ("pitome", 3)])
def test_tofu_drops_early_and_keeps_the_norm_late(variant, first):
    fast, images = patch(families.make("vit"), ToFu(r=5, variant=variant)), families.images("vit", 1)
    steps, reduce = [], fast.reducer.reduce

    def spy(attention):
        after = reduce(attention)
        steps.append((attention.add(), after))
        return after

    fast.reducer.reduce = spy
    with torch.no_grad():
        run(fast, images, track_owners=True)
    for layer, (before, after) in enumerate(steps):
        where = {int(cell): place for place, cell in enumerate(before.cell[0])}
        for place, cell in enumerate(after.cell[0].tolist()):
            members = [int(m) for m in (after.owner[0] == place).nonzero().flatten() if int(m) in where]
            own, group = before.image[0][where[cell]], before.image[0][[where[m] for m in members]]
            if layer < first or len(members) == 1:
                assert torch.equal(after.image[0][place], own)
            else:
                below = group.mean(dim=0) if variant == "paper" else own
                wanted = group.mean(dim=0) / below.norm() * group.norm(dim=1).max()
                torch.testing.assert_close(after.image[0][place], wanted)


def test_masked_softmax_by_hand():
    logits, mask = tensor([[0.0, math.log(3.0), 0.0]]), tensor([[1.0, 0.0, 1.0]])
    allowed, epsilon = 1 / 3, 1e-6
    expected = [(allowed + epsilon / 3) / (2 * allowed + epsilon), (epsilon / 3) / (2 * allowed + epsilon)]
    found = masked_softmax(logits, mask)[0].tolist()
    assert found == pytest.approx([expected[0], expected[1], expected[0]], rel=1e-5)
    assert masked_softmax(logits, torch.zeros(1, 3))[0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("maximum_is_masked", [False, True])
def test_the_gradient_of_masked_softmax_is_that_of_its_formula_but_for_epsilon(maximum_is_masked):
    """The formula's own row maximum moves with the logits; ours is a constant. Only epsilon makes a difference."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, 5, requires_grad=True)
    mask = torch.rand(2, 1, 5, 5).round()
    if maximum_is_masked:
        mask = (mask * (logits < logits.amax(dim=-1, keepdim=True)).all(dim=1, keepdim=True)).detach()
    mask.requires_grad_()
    towards = torch.randn(2, 3, 5, 5)
    found = torch.autograd.grad((masked_softmax(logits, mask) * towards).sum(), (logits, mask))
    exact = logits.double()
    allowed = (exact - exact.amax(dim=-1, keepdim=True)).exp() * mask
    formula = (allowed + EPSILON / 5) / (allowed.sum(dim=-1, keepdim=True) + EPSILON)
    expected = torch.autograd.grad((formula * towards).sum(), (logits, mask))
    # A row in which nothing is allowed has no other term than epsilon: its gradient is not compared.
    rows = mask.sum(dim=-1, keepdim=True) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one * rows, other * rows, rtol=1e-5, atol=20 * EPSILON)


def test_a_mask_of_ones_is_plain_attention():
    q, k, v = torch.randn(3, 2, 3, 7, 4).unbind(0)
    plain, _ = attend(QKV(q, k, v, 0.5))
    masked, _ = attend(QKV(q, k, v, 0.5), Adjustments(mask=torch.ones(2, 1, 7)))
    torch.testing.assert_close(masked, plain, rtol=0, atol=1e-5)


def test_ats_samples_the_cumulative_distribution():
    # ascending .1 .2 .3 .4, summed .1 .3 .6 1, from the lowest on 0 .222 .556 1; four steps from .222 to 1
    scores, valid = tensor([[0.4, 0.1, 0.3, 0.2]]), torch.ones(1, 4, dtype=torch.bool)
    assert sample(scores, valid, 4, from_zero=False).tolist() == [[True, False, True, True]]
    assert sample(scores, valid, 4, from_zero=True).tolist() == [[True, True, True, True]]
    assert sample(scores, valid, 2, from_zero=False).tolist() == [[True, False, False, True]]  # both ends


def test_ats_does_not_see_what_only_fills_up():
    scores = tensor([[0.4, 0.1, 0.3, 0.2]])
    padded = torch.cat([scores, torch.zeros(1, 3)], dim=1)
    valid = tensor([[True] * 4 + [False] * 3])
    for from_zero in (True, False):
        alone = sample(scores, valid[:, :4], 4, from_zero)
        assert sample(padded, valid, 4, from_zero).tolist() == [alone[0].tolist() + [False] * 3]


def test_ats_never_loses_the_last_token():
    for from_zero in (True, False):
        assert sample(tensor([[1.0]]), tensor([[True]]), 9, from_zero).tolist() == [[True]]
        padded = sample(tensor([[0.0, 1.0, 0.0]]), tensor([[False, True, False]]), 9, from_zero)
        assert padded.tolist() == [[False, True, False]]
        two = sample(tensor([[0.0, 0.7, 0.3]]), tensor([[False, True, True]]), 9, from_zero)
        assert two.tolist() == [[False, True, from_zero]]


def test_an_empty_batch_of_an_adaptive_method():
    fast = patch(families.make("vit"), ATS())
    with torch.no_grad():
        assert fast(families.images("vit")[:0]).shape == (0, 10)


def test_exact_ats_says_why_it_cannot_be_exported():
    with pytest.raises(GTPError, match="cannot be exported"):
        torch.export.export(patch(families.make("vit"), ATS()), (families.images("vit"),), strict=False)


def test_budgets_of_ats_follow_the_image_size():
    fast = patch(families.make("dynamic"), ATS(budget="keep:0.5:1:2", cdf_min="zero"))
    with torch.no_grad():
        assert fast.forward_features(torch.randn(1, 3, 40, 80)).shape[1] == 1 + 13


def test_diffrate_from_the_originals_lists():
    assert DiffRate.from_kept_counts([190, 150], [180, 140]) == DiffRate(prune=(7, 30), merge=(10, 10))
    for lists in (([], []), ([190], [180, 170]), ([198], [180]), ([190], [191])):
        with pytest.raises(GTPError, match=r"one per layer|can only fall"):
            DiffRate.from_kept_counts(*lists)


def test_opposite_tokens_leave_sizes_positive():
    model = families.make("vit")
    images = torch.cat([torch.full((1, 3, 64, 32), 2.0), torch.full((1, 3, 64, 32), -2.0)], dim=3)
    fast = patch(model, DiffRate(prune=0, merge=(0, 32, 16, 0)))
    with torch.no_grad():
        assert fast(images).isfinite().all()


def test_settings_read_from_json_are_hashable():
    assert hash(EViT(drop_loc=[1, 2])) == hash(EViT(drop_loc=(1, 2)))
    assert PPT(pp_loc_list=[1, 2]) == PPT(pp_loc_list=(1, 2))


def test_uniform_scores_keep_all_but_the_lowest():
    scores = torch.full((1, 196), 1 / 196)
    assert int(sample(scores, torch.ones(1, 196, dtype=torch.bool), 196, from_zero=False).sum()) == 195


def test_trilevel_keeps_the_strongest_of_each_row():
    attention = tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.5, 0.3]]])
    assert strongest_mask(attention, 0.5).tolist() == [
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    ]  # 2 of 3, and what equals the second


def test_trilevel_without_attention_level_is_evit_without_fusion():
    model, images = families.make("vit"), families.images("vit")
    with torch.no_grad():
        one = patch(model, TriLevel(keep_ratio=0.6))(images)
        other = patch(model, EViT(keep_rate=0.6, fuse_token=False))(images)
    torch.testing.assert_close(one, other)


def test_diffrate_merges_by_plain_mean():
    fast, images = (
        patch(families.make("vit"), DiffRate(prune=(2, 0, 0, 0), merge=(3, 0, 0, 0))),
        families.images("vit", 1),
    )
    layer = trace(fast, images).layers[0]
    assert layer.kept.shape == (1, 59)
    assert layer.lost.item() == pytest.approx(2 / 5)  # of the five that went, two were dropped
    steps, reduce = [], fast.reducer.reduce

    def spy(attention):
        after = reduce(attention)
        steps.append((attention.add(), after))
        return after

    fast.reducer.reduce = spy
    with torch.no_grad():
        run(fast, images)
    before, after = steps[0]
    for token in range(59):
        torch.testing.assert_close(after.image[0, token], before.image[0][layer.owners[0] == token].mean(dim=0))


def test_ppt_merges_or_drops_by_the_variance():
    model, images = families.make("vit"), families.images("vit")
    merging = trace(patch(model, PPT(r=9, threshold=1.0)), images)
    dropping = trace(patch(model, PPT(r=9, threshold=0.0)), images)
    assert merging.lost().tolist() == [0, 0, 0]
    assert dropping.lost().tolist() == [1, 1, 1]
    assert merging.layers[-1].sizes.sum(dim=1).tolist() == pytest.approx([64, 64, 64])
    assert dropping.layers[-1].sizes.sum(dim=1).tolist() == [37, 37, 37]


def test_evits_fused_token_stands_for_all_that_were_dropped():
    fast, images = patch(families.make("vit"), EViT(keep_rate=0.5, drop_loc=(1,))), families.images("vit", 1)
    layer = trace(fast, images).layers[1]
    assert layer.kept[0, -1] == 64  # behind the last of 64 cells
    assert (layer.owners[0] == 32).sum() == 32
    assert layer.sizes[0].tolist() == [1] * 32 + [32]
    assert layer.lost.item() == 0


def test_evovit_lets_waiting_tokens_come_back():
    fast, images = patch(families.make("vit"), EvoViT(keep_ratio=0.5, stages=(1, 3))), families.images("vit", 1)
    found = trace(fast, images)
    assert [layer.kept.shape[1] for layer in found.layers] == [64, 32, 64, 64]
    for layer in (2, 3):
        assert found.layers[layer].owners[0].tolist() == list(range(64))


def test_what_the_representative_token_gains_is_added_to_those_that_wait():
    model, images = families.make("vit"), families.images("vit", 1)
    plain, with_token = (
        patch(model, EvoViT(keep_ratio=0.5, stages=(1,), representative_token=token)) for token in (False, True)
    )
    with torch.no_grad():
        one, other = plain.forward_features(images), with_token.forward_features(images)
    assert one.shape == other.shape == (1, 65, 24)
    assert not torch.equal(one, other)


def test_weighted_pooling_weighs_tokens_by_size():
    model, images = families.make("gap"), families.images("gap")
    fast = patch(model, ToMe(r=8, weighted_pool=True))
    seen = []
    with torch.no_grad():
        tokens = run(fast, images, observe=seen.append)
        normed = fast.norm(tokens.x)
        pooled = (normed * tokens.size.unsqueeze(-1)).sum(dim=1) / tokens.size.sum(dim=1, keepdim=True)
        torch.testing.assert_close(fast(images), fast.head(fast.fc_norm(pooled)))
    with pytest.raises(GTPError, match="averages the image tokens"):
        patch(families.make("vit"), ToMe(weighted_pool=True))


def test_untrained_predictors_are_announced(tmp_path):
    model = families.make("vit")
    with pytest.warns(UserWarning, match="untrained"):
        fast = patch(model, DynamicViT())
    path = tmp_path / "predictors.safetensors"
    save_file(fast.reducer.predictors.state_dict(), path)
    again = patch(model, DynamicViT(predictors=str(path)))  # no warning, else the test fails
    images = families.images("vit")
    with torch.no_grad():
        assert torch.equal(again(images), fast(images))


def test_predictors_that_do_not_fit_are_refused(tmp_path):
    model, path = families.make("vit"), tmp_path / "predictors.pth"
    with pytest.warns(UserWarning, match="untrained"):
        weights = patch(model, DynamicViT()).reducer.predictors.state_dict()

    def refused(stored, match):
        torch.save(stored, path)
        with pytest.raises(GTPError, match=match):
            patch(model, DynamicViT(predictors=str(path)))

    wide = {key: torch.zeros([2 * length for length in value.shape]) for key, value in weights.items()}
    refused(wide, "a different width: .* trained on a model with 24 channels")
    codes = {key: value.to(torch.int8) for key, value in weights.items()}
    refused(codes, "is torch.int8, and the model has torch.float32")
    two = {key: value for key, value in weights.items() if not key.startswith("2.")}
    refused(two, "has predictors of 2 stages, and 3 are needed")
    with pytest.raises(GTPError, match="there is no file"):
        patch(model, DynamicViT(predictors=str(tmp_path / "nothing.pth")))


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (EViT(keep_rate=0.0), "keep_rate is 0.0; it must be a number in"),
        (EViT(keep_rate=1.2), "keep_rate is 1.2"),
        (EViT(drop_loc=(1, 4)), r"drop_loc is \(1, 4\); give different layers from 0 to 3"),
        (EViT(drop_loc=(2, 1)), "ascending order"),
        (EViT(drop_loc=9), r"drop_loc is \(9,\); give different layers"),
        (TriLevel(keep_ratio=0), "keep_ratio is 0"),
        (TriLevel(attn_ratio=2.0), "attn_ratio is 2.0"),
        (DynamicViT(keep_ratio=-0.1), "keep_ratio is -0.1"),
        (EvoViT(keep_ratio=0), "keep_ratio is 0"),
        (EvoViT(stages=(0, 2)), "layers from 1 to 3"),
        (EvoViT(head="pool"), "did you mean 'pooled'"),
        (ATS(cdf_min="low"), "did you mean 'lowest'"),
        (ATS(layers=(1,), budget=3), "give one of them"),
        (ATS(layers=(9,)), "layers from 0 to 3"),
        (PPT(r=-1), "r is -1"),
        (PPT(threshold=-1.0), "threshold is -1.0"),
        (DiffRate(prune=8, merge=8), r"remove 32 \+ 32 tokens"),
        (ToMe(r=(8, 8, 8, 8, 8)), "5 entries"),
        (ToMe(r=-1), "removes -1 tokens"),
        (ToMe(r="inflection:8"), "write it like 'inflection:8:-1'"),
        (MCTF(one_step_ahead=3), "one_step_ahead is 3"),
        (MCTF(tau_info=-1.0), "tau_info is -1.0"),
        (MCTF(pooling="maximum"), "did you mean 'max'"),
        (MCTF(r="after:1"), "write it like 'after:1:16'"),
        (MCTF(r="after:4:1"), "names layer 4; this model has layers 0 to 3"),
        (PiToMe(mode_order="deit"), "Allowed: bsm_first, energy_first, bsm, energy"),
        (PiToMe(margin=1.5), "margin is 1.5"),
        (PiToMe(margin_decay=-0.1), "margin_decay is -0.1"),
        (PiToMe(r="ratio:1.2"), "schedule 'ratio' has rate 1.2"),
        (PiToMe(weighted_pool=True), "averages the image tokens"),
        (ToFu(variant="q"), "Allowed: paper, pitome"),
        (ToFu(norm="mlrp"), "did you mean 'mlerp'"),
        (ToFu(first_merging_layer=5), "first_merging_layer is 5"),
        (ToFu(variant="pitome", track_sizes=True), "remove track_sizes"),
        (ATC(linkage="ward"), "Allowed: average, complete, single"),
        (ATC(variant="originl"), "did you mean 'original'"),
        (ATC(track_sizes=False), "track_sizes=False keeps no sizes"),
        (ATC(r=16), "removes 64 tokens"),
        (ATC(r="geometric:0.7"), "names no layer"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
def test_bad_settings_are_refused(method, match):
    with pytest.raises(GTPError, match=match):
        patch(families.make("vit"), method)


def test_gtp_and_tome_keep_layerscale_qk_norm_and_registers():
    """With almost nothing removed, almost nothing changes; an omitted module would change a lot."""
    from gtp_vit import GTP

    for family in ("qk_norm", "dinov2_registers", "deit3"):
        model, images = families.make(family), families.images(family)
        with torch.no_grad():
            plain = model(images)
            for method in (GTP(propagate=(0, 0, 0, 1)), ToMe(r=(0, 0, 0, 1))):
                for lossless in (True, False):
                    fast = patch(model, method, shorten_last_block=lossless)(images)
                    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
