"""Attention: the statistics are those of the map, and our copy of timm's arithmetic is timm's."""

import pytest
import torch

from gtp_vit import patch
from gtp_vit.core.attention import QKV, Adjustments, AttentionStats, attend
from gtp_vit.methods.gtp.graph import Sparsify
from gtp_vit.testing import families
from support.probe import Probe


def tensors(tokens=7, heads=2, width=5, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, tokens, width, generator=generator) for _ in range(3)]


def by_hand(q, k, v, scale, size=None):
    logits = scale * torch.einsum("bhqd,bhkd->bhqk", q, k)
    if size is not None:
        logits = logits + size.log()[:, None, None, :]
    probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return probs, torch.einsum("bhqk,bhkd->bhqd", probs, v)


@pytest.mark.parametrize("with_sizes", [False, True])
@pytest.mark.parametrize("asked", [(), ("class_row",), ("diagonal", "map"), AttentionStats._fields])
def test_output_and_statistics_are_those_of_the_map(asked, with_sizes):
    q, k, v = tensors()
    size = torch.rand(2, 7) if with_sizes else None
    probs, out = by_hand(q, k, v, 0.3, size)
    found, stats = attend(QKV(q, k, v, 0.3), Adjustments(size), asked)
    expected = {
        "diagonal": torch.stack([probs[..., i, i] for i in range(7)], -1),
        "column_sums": probs.sum(2),
        "class_row": probs[:, :, 0],
        "map": probs,
    }
    torch.testing.assert_close(found, out.transpose(1, 2).flatten(2))
    for name in AttentionStats._fields:
        value = getattr(stats, name)
        if name in asked:
            torch.testing.assert_close(value, expected[name])
        else:
            assert value is None


@pytest.mark.parametrize("edit", [None, Sparsify(0.5)])
def test_first_queries_only(edit):
    q, k, v = tensors()
    whole, _ = attend(QKV(q, k, v, 0.3), Adjustments(edit=edit))
    first, _ = attend(QKV(q, k, v, 0.3), Adjustments(edit=edit), queries=2)
    torch.testing.assert_close(first, whole[:, :2])


def test_statistics_before_or_after_the_edit():
    q, k, v = tensors()
    probs, _ = by_hand(q, k, v, 0.3)
    edit = Adjustments(edit=Sparsify(0.3))
    _, edited = attend(QKV(q, k, v, 0.3), edit, ["column_sums"])
    _, dense = attend(QKV(q, k, v, 0.3), edit, ["column_sums"], before_edit=True)
    torch.testing.assert_close(dense.column_sums, probs.sum(2))
    torch.testing.assert_close(edited.column_sums, Sparsify(0.3)(probs).sum(2))


@pytest.mark.parametrize("family", families.NAMES)
def test_our_copy_of_the_block_is_the_models_own(family):
    """In parts, too: with values computed apart from queries and keys."""
    model, images = families.make(family), families.images(family)
    with torch.no_grad():
        wanted = families.output(model, images)
    asked = ((), ("diagonal", "column_sums"), ("class_row",))
    for method in (*(Probe(statistics=frozenset(each)) for each in asked), Probe(in_parts=True)):
        probe = patch(model, method)
        # Processors round differently: 3e-6 was seen of eva02, whose features have values of 10.
        close = {"rtol": 1e-5, "atol": 4e-6}
        with torch.no_grad():
            torch.testing.assert_close(families.output(probe, images), wanted, **close)
        if hasattr(model, "forward_features"):  # timm's; other families have entry points of their own
            one, other = probe.forward_features(images), model.forward_features(images)
            torch.testing.assert_close(one, other, **close)
