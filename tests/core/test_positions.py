"""Positions that travel with the tokens: rotary ones of timm's Eva, relative ones of Beit; and the stems of hybrids."""

import copy

import pytest
import timm
import torch
from torch import nn

from gtp_vit import ATS, GTP, EViT, EvoViT, GTPPlus, Identity, ToMe, macs, patch
from gtp_vit.backbones import rotary, small_models
from gtp_vit.backbones.host import find_vit
from gtp_vit.core.attention import PLAIN, QKV, Adjustments, attend, class_row
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.loop import run
from gtp_vit.errors import InputError, UnsupportedModelError
from gtp_vit.methods.gtp.graph import Sparsify
from gtp_vit.patching import host_of
from gtp_vit.testing import Case, check, families
from gtp_vit.testing.promises import it_exports_with_a_dynamic_batch

FUSED = [EViT(keep_rate=0.5, drop_loc=(0, 2)), EvoViT(keep_ratio=0.4, representative_token=True)]
ONE_OF_EACH = ["dinov3", "rope_mixed", "eva02_small", "beit_shared"]


def of_meta(name):
    with torch.device("meta"):
        try:
            return timm.create_model(name, depth=1)
        except AssertionError:  # Sapiens2 has a number for each block
            return timm.create_model(name)


@pytest.mark.slow
def test_every_eva_beit_and_hybrid_of_timm_is_accepted_but_those_with_grouped_queries():
    refused = {}
    for name in timm.list_models(module=["eva", "beit", "vision_transformer_hybrid"]):
        model = of_meta(name)
        try:
            host = find_vit(model)
        except UnsupportedModelError as error:
            refused[name] = str(error)
            continue
        sides = [cells * pixels for cells, pixels in zip(host.vit.grid, host.inputs.patch, strict=True)]
        assert sides == list(model.patch_embed.img_size), name
        assert host.inputs.channels == 3
        assert host.vit.class_token == (model.cls_token is not None)
    # Older versions of timm do not have all of them.
    assert set(refused) <= {f"vit_{size}_patch16_sapiens2" for size in ("large", "huge", "giant", "5b")}
    assert all("heads of keys for" in reason for reason in refused.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.blocks[1].attn, "gate", nn.Linear(24, 24)), r"blocks\[1\]\.attn\.gate scales"),
        (lambda m: setattr(m.blocks[1].attn, "num_kv_heads", 1), r"blocks\[1\]\.attn has 1 heads of keys for 3"),
        (lambda m: setattr(m.blocks[2], "extra", nn.Identity()), r"blocks\[2\]\.extra \(Identity\) is not known"),
        (lambda m: m.blocks[2].attn.register_buffer("extra", torch.ones(1)), r"\.attn\.extra \(a tensor\)"),
        (lambda m: m.register_buffer("extra", torch.ones(1)), "a tensor extra that is not known"),
        (lambda m: setattr(m, "extra", nn.Identity()), "a module extra"),
        (lambda m: setattr(m, "rope", timm.layers.RotaryEmbedding(8)), "rope is RotaryEmbedding; supported"),
        (lambda m: setattr(m, "patch_drop", timm.layers.PatchDropout(0.5)), "removes patches at random"),
        (lambda m: setattr(m.blocks[0].attn, "qkv_bias_separate", True), "qkv_bias_separate is True"),
        (lambda m: setattr(m.blocks[0].attn, "qkv", nn.Conv1d(24, 72, 1)), "supported: torch.nn.Linear"),
        (lambda m: setattr(m.blocks[0], "mlp", nn.Linear(24, 24)), r"blocks\[0\]\.mlp is Linear"),
        (lambda m: m.blocks[3].attn.register_forward_hook(print), "has hooks"),
        (lambda m: setattr(m, "__class__", type("Other", (type(m),), {})), "Other is a subclass of Eva"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, reason):
    model = families.make("dinov3")
    change(model)
    with pytest.raises(UnsupportedModelError, match=reason):
        patch(model, GTP())


def test_a_head_that_reads_the_first_patch_is_refused():
    model = timm.create_model("vit_pe_lang_gigantic_patch14_448", **small_models.SMALL, global_pool="token")
    assert model.num_prefix_tokens == 0
    with pytest.raises(UnsupportedModelError, match="no class or register token"):
        patch(model, GTP())


def test_beits_that_are_not_understood_are_refused():
    model = families.make("beit")
    model.global_pool = "max"  # which Beit reads as "token"
    with pytest.raises(UnsupportedModelError, match="global_pool is 'max'"):
        patch(model, GTP())
    model = families.make("beit")
    model.blocks[0].attn.extra = nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"blocks\[0\]\.attn\.extra"):
        patch(model, GTP())


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.parametrize("method", [GTPPlus(), *FUSED, ToMe(), ATS(budget="keep:0.6:1:2")], ids=str)
def test_own_block_and_our_arithmetic_are_the_same_with_the_tokens_of_every_layer(family, method):
    """Also with tokens that are in no cell, such as EViT's fused one, and in another order, such as ToMe's."""
    if family == "eva02_small" and isinstance(method, ATS):
        return  # the head reads image tokens, and the number of ATS's is each image's own
    model, images = families.make(family), families.images(family)
    fast = patch(model, method)
    host, seen = fast.reduction.backbone, []
    with torch.no_grad():
        run(fast, images, observe=seen.append)
        for layer, tokens in enumerate(seen[:-1]):
            block = fast.blocks[layer]
            out, _ = attend(host.project(block, layer, tokens, None))
            x = tokens.x + host.attention_branch(block, out)
            x = x + host.mlp_branch(block, x, None)
            torch.testing.assert_close(host.run_block(block, layer, tokens), x, rtol=1e-5, atol=1e-5)
            some = host.project(block, layer, tokens, 3)
            everything = host.project(block, layer, tokens, None)
            torch.testing.assert_close(some.q, everything.q[:, :, :3])
            if some.bias is not None:
                torch.testing.assert_close(some.bias, everything.bias[:, :, :3])


@pytest.mark.parametrize(("family", "at_origin"), [("dinov3", -1), ("rope_mixed", 0)])
def test_a_token_in_no_cell_is_not_rotated(family, at_origin, monkeypatch):
    monkeypatch.setattr(rotary, "METHODS_READ_ROTATED_KEYS", False)  # so that `method_keys` has the keys as they were
    fast = patch(families.make(family), EViT(keep_rate=0.5, drop_loc=(0,)))
    host, seen = fast.reduction.backbone, []
    with torch.no_grad():
        run(fast, families.images(family), observe=seen.append)
        tokens = seen[1]
        assert int(tokens.cell[0, -1]) == 64
        found = host.project(fast.blocks[1], 1, tokens, None)
    prefix = tokens.prefix
    assert torch.equal(found.k[:, :, -1], found.method_keys[:, :, -1])
    assert torch.equal(found.k[:, :, :prefix], found.method_keys[:, :, :prefix])
    turned = (found.k != found.method_keys).any(dim=3).any(dim=1)[:, prefix:-1]
    assert torch.equal(turned, tokens.cell[:, :-1] != at_origin)


def test_a_token_in_no_cell_has_no_bias():
    fast = patch(families.make("beit"), EViT(keep_rate=0.5, drop_loc=(0,)))
    seen = []
    with torch.no_grad():
        run(fast, families.images("beit"), observe=seen.append)
        bias = fast.reduction.backbone.project(fast.blocks[1], 1, seen[1], None).bias
    assert not bias[:, :, -1].any()
    assert not bias[..., -1].any()
    assert bias[:, :, :-1, :-1].ne(0).all()


@pytest.mark.parametrize("family", ["dinov3", "hf_dinov3"] if small_models.HAS_TRANSFORMERS else ["dinov3"])
def test_methods_can_read_keys_before_or_after_they_are_rotated(family, monkeypatch):
    """Before, two patches that look alike have the same keys, wherever they are."""
    model = families.make(family)
    fast = patch(model, Identity())
    backbone = fast.reduction.backbone
    for is_rotated in (True, False):
        monkeypatch.setattr(rotary, "METHODS_READ_ROTATED_KEYS", is_rotated)
        with torch.no_grad():
            tokens = backbone.embed(fast, torch.zeros(1, 3, 64, 64))
            block = backbone.blocks(fast)[0]
            found = backbone.project(block, 0, tokens, None)
            keys = LayerAttention(backbone, block, 0, tokens, PLAIN, prefix_only=False, drops_patches=False).keys
        if is_rotated:
            assert torch.equal(keys, found.k[:, :, tokens.prefix :])
            assert (keys[:, :, 1:] - keys[:, :, :-1]).abs().max() > 0.01
        else:
            torch.testing.assert_close(keys, keys[:, :, :1].expand_as(keys))


@pytest.mark.parametrize("asked", [(), ("class_row",), ("diagonal", "column_sums"), ("map",)])
@pytest.mark.parametrize("edit", [None, Sparsify(0.5)])
@pytest.mark.parametrize("with_sizes", [False, True])
def test_a_bias_is_added_to_the_logits(asked, edit, with_sizes):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=generator) for _ in range(3))
    bias = torch.randn(2, 3, 7, 7, generator=generator)
    size = torch.rand(2, 7, generator=generator) if with_sizes else None
    logits = 0.3 * q @ k.transpose(2, 3) + bias + (0 if size is None else size.log()[:, None, None])
    probs = logits.softmax(dim=-1)
    probs = probs if edit is None else edit(probs)
    projections = QKV(q, k, v, 0.3, bias=bias)
    out, stats = attend(projections, Adjustments(size, edit), asked)
    torch.testing.assert_close(out, (probs @ v).transpose(1, 2).flatten(2))
    expected = {
        "class_row": probs[:, :, 0],
        "diagonal": probs.diagonal(dim1=2, dim2=3),
        "column_sums": probs.sum(2),
        "map": probs,
    }
    for name in asked:
        torch.testing.assert_close(getattr(stats, name), expected[name])
    alone = class_row(projections, size, heads="each", first=1)
    torch.testing.assert_close(alone, logits.softmax(dim=-1)[:, :, 0, 1:])


@pytest.mark.parametrize("family", ["dinov3", "dinov3_padded"])
def test_images_of_other_sizes(family):
    model, images = families.make(family), torch.randn(2, 3, 40, 80)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(patch(model, Identity())(images), expected, rtol=1e-6, atol=1e-6)
        fast = patch(model, GTP(propagate=(10, 0, 5, 0), graph="none"))
        assert run(fast, images).grid == (5, 10)
        reduced = fast(images)
        assert reduced.shape == expected.shape
        assert macs(fast, grid=(5, 10)).total < macs(model, grid=(5, 10)).total


def test_images_of_any_size_are_padded_if_the_model_does_so():
    model, images = families.make("dinov3_padded"), torch.randn(2, 3, 61, 83)
    with torch.no_grad():
        torch.testing.assert_close(patch(model, Identity())(images), model(images), rtol=1e-6, atol=1e-6)
        assert run(patch(model, GTP(propagate=5)), images).grid == (8, 11)
    with pytest.raises(InputError, match="multiples of the patch size"):
        patch(families.make("dinov3"), GTP())(images)


# Some seconds each. Rotary positions and a table of biases; the others differ in numbers, not in operators.
SLOW = [("dinov3", FUSED[0]), ("rope_mixed", GTPPlus()), ("beit_shared", GTPPlus())]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), SLOW, ids=str)
def test_exports_with_a_dynamic_batch(family, method):
    check(Case(family, method, families.factory_of(family)), [it_exports_with_a_dynamic_batch])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), SLOW, ids=str)
def test_compiles_as_one_graph(family, method):
    fast, images = patch(families.make(family), method), families.images(family)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(fast, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), fast(images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_checkpointed_gradients_are_equal_and_reach_every_parameter(family):
    images, found = families.images(family), []
    for checkpointing in (False, True):
        fast = patch(families.make(family), GTPPlus())
        fast.set_grad_checkpointing(checkpointing)
        fast(images).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in fast.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient is not None, name  # among them the frequencies of rope_mixed, and Beit's tables
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_half_precision_and_autocast_are_near(family):
    model, images = families.make(family), families.images(family)
    with torch.no_grad():
        exact = patch(model, GTPPlus())(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = patch(model, GTPPlus())(images)
        others = [cast]
        if family != "rope_mixed":  # timm's own does not run in half precision: its frequencies stay in float32
            others.append(patch(copy.deepcopy(model).bfloat16(), GTPPlus())(images.bfloat16()))
    for other in others:
        assert (other.float() - exact).abs().mean() < 0.15 * exact.std()


@pytest.mark.parametrize("family", ["hybrid", "hybrid_batch_norm"])
def test_counting_and_describing_leaves_a_stem_as_it_was(family):
    model = families.make(family).train()
    before = {name: each.clone() for name, each in model.named_buffers()}
    host = host_of(model)
    assert host.inputs.patch == (8, 8)
    assert macs(patch(model, GTP())).total < macs(model).total
    assert model.patch_embed.training
    assert bool(before) == (family == "hybrid_batch_norm")
    for name, each in model.named_buffers():
        assert torch.equal(each, before[name]), name


def test_the_stem_of_a_hybrid_is_counted():
    model = timm.create_model("vit_tiny_r_s16_p8_224")
    assert macs(model).embed > 150e6
