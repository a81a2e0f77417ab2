"""The formulas of the paper on numbers small enough to check by eye."""

import math

import pytest
import torch

from gtp_vit.methods.gtp import graph
from gtp_vit.methods.gtp.graph import Sparsify, keep_largest, summarise
from gtp_vit.methods.gtp.method import normalise_over_receivers
from gtp_vit.methods.gtp.selection import (
    AGGREGATES,
    broadcasting_ability,
    class_attention,
    dissimilarity,
    mixed,
    random_scores,
    regeneration_difficulty,
)
from gtp_vit.tensors import split_by_score
from reproduction import complexity

T = torch.tensor


def test_eq3_regeneration_difficulty_is_the_diagonal_aggregated_over_heads():
    diagonal = T([[[0.1, 0.5, 0.2], [0.4, 0.3, 0.2]]])
    assert torch.equal(regeneration_difficulty(diagonal, AGGREGATES["max"]), T([[0.4, 0.5, 0.2]]))
    torch.testing.assert_close(regeneration_difficulty(diagonal, AGGREGATES["mean"]), T([[0.25, 0.4, 0.2]]))


def test_eq4_broadcasting_ability_and_their_product():
    column_sums = T([[[1.0, 0.5, 2.0], [3.0, 0.25, 1.0]]])
    ability = broadcasting_ability(column_sums, AGGREGATES["max"])
    assert torch.equal(ability, T([[3.0, 0.5, 2.0]]))
    # heads are aggregated before the product, not after it
    assert torch.equal(mixed(T([[0.5, 0.5, 0.25]]), ability), T([[1.5, 0.25, 0.5]]))


def test_class_attention_aggregates_the_class_row():
    assert torch.equal(class_attention(T([[[0.1, 0.9], [0.3, 0.2]]]), AGGREGATES["max"]), T([[0.3, 0.9]]))


def test_dissimilarity_is_minus_the_sum_of_cosines():
    # rows 0 and 1 point the same way, row 2 is at a right angle: sums of cosines are 2, 2 and 1
    rows = T([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]])
    torch.testing.assert_close(dissimilarity(rows), T([[-2.0, -2.0, -1.0]]))


def test_split_keeps_the_largest_and_gives_ascending_indices():
    kept, gone = split_by_score(T([[0.3, 0.9, 0.1, 0.5], [4.0, 3.0, 2.0, 1.0]]), 2)
    assert kept.tolist() == [[1, 3], [0, 1]]
    assert gone.tolist() == [[0, 2], [2, 3]]


@pytest.mark.parametrize("tokens", [4, 17, 196, 1024])
def test_of_equal_scores_the_earlier_token_stays(tokens):
    for scores in (torch.zeros(3, tokens), torch.full((3, tokens), -0.0), torch.full((3, tokens), torch.nan)):
        kept, gone = split_by_score(scores, tokens // 2)
        assert kept[0].tolist() == list(range(tokens - tokens // 2))
        assert gone[2].tolist() == list(range(tokens - tokens // 2, tokens))


def test_random_scores_come_from_the_generator():
    def draw(seed):
        return random_scores(2, 5, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def lists(graph_lists, nobody):
    """Lists of neighbours without the entries that stand for nobody."""
    return [[entry for entry in row if entry != nobody] for row in graph_lists.tolist()]


def test_eq5_spatial_graph_of_three_by_three():
    # 0 1 2
    # 3 4 5
    # 6 7 8
    eight = lists(graph.spatial((3, 3)), nobody=9)
    assert [len(row) for row in eight] == [3, 5, 3, 5, 8, 5, 3, 5, 3]
    assert eight[0] == [1, 3, 4]
    assert eight[5] == [1, 2, 4, 7, 8]
    four = lists(graph.spatial((3, 3), 4), nobody=9)
    assert [len(row) for row in four] == [2, 3, 2, 3, 4, 3, 2, 3, 2]
    assert four[5] == [2, 4, 8]


def test_eq5_spatial_graph_of_a_non_square_grid():
    # 0 1 2
    # 3 4 5
    assert lists(graph.spatial((2, 3)), nobody=6)[2] == [1, 4, 5]
    assert lists(graph.spatial((2, 3), 4), nobody=6)[2] == [1, 5]
    assert lists(graph.spatial((1, 1)), nobody=1) == [[]]


def test_eq6_cosine_similarity():
    similarity = graph.cosine_similarity(T([[[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]]]))
    half = math.sqrt(0.5)
    torch.testing.assert_close(similarity, T([[[1.0, 0.0, half], [0.0, 1.0, half], [half, half, 1.0]]]))


def test_eq7_semantic_graph_has_exactly_m_neighbours_a_token_and_no_self_loop():
    similarity = T([[[1.0, 0.9, 0.2, 0.4], [0.9, 1.0, 0.3, 0.1], [0.2, 0.3, 1.0, 0.8], [0.4, 0.1, 0.8, 1.0]]])
    assert graph.semantic(similarity, 1).tolist() == [[[1], [0], [3], [2]]]
    assert graph.semantic(similarity, 2).tolist() == [[[1, 3], [0, 2], [3, 1], [2, 0]]]


def test_eq7_equal_similarities_are_taken_in_raster_order():
    same = torch.ones(2, 5, 5)
    assert graph.semantic(same, 2)[1].tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_topk_by_position_orders_negative_values_and_both_zeros():
    values = T([[-2.0, -1.0, 0.0, -0.0, 3.0, -torch.inf, 3.0]])
    assert graph.topk_by_position(values, 6).tolist() == [[4, 6, 2, 3, 1, 0]]


def test_eq8_mixed_graph_is_the_union():
    near, similar = T([[1, 2], [0, 3], [0, 3], [1, 2]]), T([[[1, 3], [2, 0], [3, 0], [0, 2]]])
    union = graph.mixed(near, similar)
    assert lists(union[0], nobody=4) == [[1, 2, 3], [0, 3, 2], [0, 3], [1, 2, 0]]
    assert graph.degrees(union).tolist() == [[3, 3, 2, 3]]


def test_eq9_normalisation_and_a_token_without_edges():
    neighbours = T([[[1, 2], [0, 4], [1, 4], [4, 4]]])  # 4 is nobody
    edges = T([[[0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]]).bool()
    assert torch.equal(graph.adjacency(neighbours), edges)
    half = 1 / math.sqrt(2)  # row degrees are 2, 1, 1, 0
    root = graph.normalise(graph.degrees(neighbours))
    torch.testing.assert_close(root, T([[half, 1.0, 1.0, 0.0]]))
    expected = T([[[0, half, half, 0], [half, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]])
    torch.testing.assert_close(graph.normalise_matrix(edges), expected)
    # what tokens 3 and 0 receive from tokens 1 and 2
    torch.testing.assert_close(
        graph.receive(neighbours, root, T([[3, 0]]), T([[1, 2]])), T([[[0.0, 0.0], [half, half]]])
    )


def test_eq10_and_eq12_propagation():
    features, sizes = T([[[1.0, 2.0], [10.0, 20.0], [3.0, 4.0]]]), T([[[1.0], [2.0], [1.0]]])
    kept, gone, weights = T([[0, 2]]), T([[1]]), T([[[0.5], [0.0]]])
    assert torch.equal(summarise(features, 0, kept, gone, weights, 0.2), T([[[2.0, 4.0], [3.0, 4.0]]]))
    assert torch.equal(summarise(sizes, 0, kept, gone, weights, 0.5), T([[[1.5], [1.0]]]))


def test_summarise_leaves_the_prefix_alone():
    values = T([[[9.0], [1.0], [2.0], [3.0]]])  # one prefix token, three image tokens
    found = summarise(values, 1, T([[0, 2]]), T([[1]]), T([[[1.0], [0.5]]]), 0.5)
    assert torch.equal(found, T([[[9.0], [2.0], [3.5]]]))


def test_share_out_conserves_what_is_received():
    shares = normalise_over_receivers(T([[[0.25, 0.0], [0.75, 0.0], [1.0, 0.0]]]))
    torch.testing.assert_close(shares, T([[[0.125, 0.0], [0.375, 0.0], [0.5, 0.0]]]))


MAP = T([[[[0.4, 0.1, 0.5], [0.2, 0.7, 0.1], [0.3, 0.05, 0.65]]]])


def test_sparsification_keeps_the_largest_of_the_whole_map():
    # 9 entries, theta 0.5: k = int(4.5) = 4, the 4th smallest is 0.2, entries below it go, 9 - 4 + 1 = 6 stay
    expected = T([[[[0.4, 0.0, 0.5], [0.2, 0.7, 0.0], [0.3, 0.0, 0.65]]]])
    assert torch.equal(keep_largest(MAP, 0.5), expected)
    assert torch.equal(Sparsify(0.5)(MAP), expected)


def test_sparsification_by_row_and_renormalised():
    # each row by itself: k = int(1.5) = 1, nothing lies below the smallest entry
    assert torch.equal(keep_largest(MAP, 0.5, per_row=True), MAP)
    # theta 0.3: k = int(2.1) = 2, the smallest entry of each row goes
    expected = T([[[[0.4, 0.0, 0.5], [0.2, 0.7, 0.0], [0.3, 0.0, 0.65]]]])
    assert torch.equal(keep_largest(MAP, 0.3, per_row=True), expected)
    scaled = keep_largest(MAP, 0.3, per_row=True, renormalise=True)
    torch.testing.assert_close(scaled, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("theta", [1 - 1e-9, 0.95, 1.0])
def test_sparsification_with_theta_near_one_removes_nothing(theta):
    assert torch.equal(keep_largest(MAP, theta), MAP)


def test_sparsification_keeps_nan_and_all_of_equal_entries():
    assert keep_largest(torch.full((1, 1, 3, 3), torch.nan), 0.5).isnan().all()
    assert torch.equal(keep_largest(torch.full((1, 1, 3, 3), 1 / 3), 0.5), torch.full((1, 1, 3, 3), 1 / 3))


def test_eq13_to_eq15_complexity_and_where_the_paper_errs():
    deit_s, deit_b = {"M": 8, "C": 384, "L": 12}, {"N": 197, "M": 8, "C": 768, "L": 12}
    assert complexity.tokens_in_layer(1, 197, 8) == 197
    assert complexity.tokens_in_layer(12, 197, 8) == 109
    # printed: 40.5 and 57.3 for DeiT-B; the second is the wrong closed form of a sum that is 55.8
    assert round(complexity.gtp(**deit_b, H=12) / 1e6, 1) == 40.5
    assert round(complexity.tome_as_printed(**deit_b) / 1e6, 1) == 57.3
    assert round(complexity.tome(**deit_b) / 1e6, 1) == 55.8
    # printed: 20.1 and 28.3 for DeiT-S "at N=197"; they come out with N=196 only
    assert round(complexity.gtp(N=196, **deit_s, H=6) / 1e6, 1) == 20.1
    assert round(complexity.gtp(N=197, **deit_s, H=6) / 1e6, 1) == 20.3
    assert round(complexity.tome_as_printed(N=196, **deit_s) / 1e6, 1) == 28.3
