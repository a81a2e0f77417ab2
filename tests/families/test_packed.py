"""Towers that take the patches of all images in one row: each image is reduced by its own share of its tokens."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gtp_vit import (
    GTP,
    GTPError,
    GTPPlus,
    Identity,
    PiToMe,
    ToMe,
    UnsupportedModelError,
    load_pretrained,
    macs,
    patch,
    unpatch,
)
from gtp_vit.backbones.hf_library import HFImageTransform
from gtp_vit.core.loop import run
from gtp_vit.errors import InputError
from gtp_vit.patching import host_of, tower_of

transformers = pytest.importorskip("transformers", minversion="5.23", reason="these towers need transformers 5.23")
from support.vlms import IMAGE, PACKED, packed_tower, packed_vlm  # noqa: E402  needs transformers

# Of 1,024 patches; of 64 they are 16 and 8, of 24 they are 6 and 3.
REDUCING = GTPPlus(remove=(256, 0, 128, 0))
DROPPING = GTP(propagate=(256, 0, 128, 0), graph="none", proportional_attention=False)
GRIDS = torch.tensor([[1, 8, 8], [1, 4, 6], [2, 8, 4], [1, 8, 8], [1, 2, 2]])  # the third one is a video
WIDTH = 3 * 2 * 8 * 8
slow = pytest.mark.slow
KINDS = ["qwen2_vl", "qwen3_vl"]  # without and with learned positions and features of several layers
for kind in KINDS:  # imports what transformers loads late, which would be counted as the first tests' time
    packed_tower(kind)
EVERY = [pytest.param(family, marks=() if family in KINDS else slow) for family in PACKED]


def rows(grids=GRIDS):
    return torch.randn(int(grids.prod(dim=1).sum()), WIDTH, generator=torch.Generator().manual_seed(1))


def close(found, expected, tolerance=1e-6):
    """Of the largest value, as these towers have no last norm."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def tensors(outputs):
    flat = {}
    for name, value in outputs.items():
        several = value if isinstance(value, (tuple, list)) else [value]
        flat.update({f"{name}[{index}]": each for index, each in enumerate(several)})
    return flat


@pytest.mark.parametrize("method", [Identity(), ToMe(r=0)], ids=str)
@pytest.mark.parametrize("family", EVERY)
def test_nothing_removed_equals_the_original_with_images_of_several_sizes_and_a_video(family, method):
    model = packed_tower(family)
    with torch.no_grad():
        plain = model(rows(), grid_thw=GRIDS, output_hidden_states=True)
        same = patch(model, method, restore=True)(rows(), grid_thw=GRIDS, output_hidden_states=True)
        as_tuple = patch(model, method, restore=True)(rows(), grid_thw=GRIDS, return_dict=False)
    assert type(same) is type(plain)
    assert list(same) == list(plain)
    assert len(same.hidden_states) == 5
    assert "deepstack_features" not in plain or len(same.deepstack_features) == 2
    expected, found = tensors(plain), tensors(same)
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(found[name], value)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[1], same.pooler_output)


@pytest.mark.parametrize("method", [REDUCING, ToMe(r=128), PiToMe()], ids=["gtp_plus", "tome", "pitome"])
@pytest.mark.parametrize("family", EVERY)
def test_an_image_alone_equals_the_same_image_packed_with_others(family, method):
    model = packed_tower(family)
    fast, patches = patch(model, method, restore=True), rows()
    with torch.no_grad():
        packed, plain = tensors(fast(patches, grid_thw=GRIDS)), tensors(model(patches, grid_thw=GRIDS))
        counts = GRIDS.prod(dim=1).tolist()
        parts = zip(patches.split(counts), GRIDS, strict=True)
        alone = [tensors(fast(part, grid_thw=grid[None])) for part, grid in parts]
    for name, value in packed.items():
        close(torch.cat([each[name] for each in alone]), value, 2e-6)
    assert packed["pooler_output[0]"].shape == plain["pooler_output[0]"].shape
    assert float((packed["pooler_output[0]"] - plain["pooler_output[0]"]).abs().max()) > 0.01


def test_an_image_is_reduced_by_its_share_of_the_schedule():
    fast = patch(packed_tower("qwen2_vl"), REDUCING, restore=True)
    for grid, removed, left in (((8, 8), (16, 0, 8, 0), 40), ((4, 6), (6, 0, 3, 0), 15), ((2, 2), (1, 0, 0, 0), 3)):
        assert fast.reducer.removals(grid) == removed
        seen = []
        with torch.no_grad():
            run(fast, torch.zeros(1, 3, 8 * grid[0], 8 * grid[1]), observe=seen.append)
        assert [tokens.cell.shape[1] for tokens in seen][-1] == left
        assert fast.reducer.steps(grid)[-1].out == left
    # ToMe merges half of the tokens at most.
    most = patch(packed_tower("qwen2_vl"), ToMe(r=512), restore=True).reducer
    assert most.removals((8, 8)) == (32, 16, 8, 4)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_dropped_equals_masked(family, kernels):
    """Tokens that our loop drops, against the model's own blocks on all patches with those hidden."""

    def hiding(module, query, key, value, attention_mask, visible, scaling, **ignored):
        mask = visible.expand(query.shape[2], -1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("hiding", hiding)
    grid = (4, 6)
    model, images = packed_tower(family), torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    fast, seen = patch(model, DROPPING, restore=True, kernels=kernels, quiet=True), []
    with torch.no_grad():
        run(fast, images, observe=seen.append)
        places = torch.cartesian_prod(*(torch.arange(side) for side in grid))
        positions = model.rotary_pos_emb(seen[0].x, places)
        model.set_attn_implementation("hiding")
        for image in range(3):
            x, visible = seen[0].x[image], torch.ones(24, dtype=torch.bool)
            for layer, block in enumerate(model.blocks):
                lengths = torch.tensor([0, 24], dtype=torch.int32)
                x = block(x, cu_seqlens=lengths, position_embeddings=positions, visible=visible)
                left = seen[layer + 1].cell[image]
                close(seen[layer + 1].x[image], x[left], 1e-5)
                visible = torch.zeros(24, dtype=torch.bool).scatter(0, left, True)
    assert [tokens.cell.shape[1] for tokens in seen] == [24, 18, 18, 15, 15]


@pytest.mark.parametrize("family", EVERY)
def test_features_of_patches_come_back_in_the_order_of_the_row(family):
    """A row's images may come in any order, and patches lie block by block of 2 x 2 in it."""
    fast = patch(packed_tower(family), REDUCING, restore=True)
    patches, order = rows(), [3, 1, 4, 0, 2]
    counts = GRIDS.prod(dim=1).tolist()
    parts = patches.split(counts)
    with torch.no_grad():
        plain = fast(patches, grid_thw=GRIDS).last_hidden_state.split(counts)
        turned = fast(torch.cat([parts[number] for number in order]), grid_thw=GRIDS[order]).last_hidden_state
    close(turned, torch.cat([plain[number] for number in order]), 2e-6)


def test_images_are_embedded_as_the_processor_and_the_model_do():
    model, side = packed_tower("qwen3_vl"), {"shortest_edge": 1, "longest_edge": 10**6}
    processor = transformers.Qwen2VLImageProcessor(
        size=side, patch_size=8, do_resize=False, do_rescale=False, do_normalize=False
    )
    picture = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(3))
    packed = processor(images=[picture], return_tensors="pt")
    assert packed["image_grid_thw"].tolist() == [[1, 4, 6]]
    with torch.no_grad():
        row = model(packed["pixel_values"], grid_thw=packed["image_grid_thw"], output_hidden_states=True)
        tokens = host_of(model).backbone.embed(model, picture[None])
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 18, 19, 14, 15, 20, 21, 16, 17, 22, 23]
    close(tokens.x[0, order], row.hidden_states[0])


def test_commands_do_not_take_its_processor():
    transform = HFImageTransform(transformers.Qwen2VLImageProcessor(patch_size=8))
    with pytest.raises(GTPError, match=r"^Qwen2VLImageProcessor packs the patches of all images into one row; prepare"):
        transform.size()


@pytest.mark.parametrize("family", EVERY)
def test_macs_are_those_that_run(family):
    model, grid = packed_tower(family), torch.tensor([[1, 32, 32]])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(rows(grid), grid_thw=grid)
    assert macs(model).total == counter.get_total_flops() // 2
    fast = patch(model, GTPPlus(remove=(256, 0, 128, 0)), restore=True)
    assert 0.5 * macs(model).total < macs(fast).total < macs(model).total


@slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_the_models_own_and_survive_checkpointing(family):
    def gradients(each):
        each.zero_grad()
        each(rows(), grid_thw=GRIDS).pooler_output.square().sum().backward()
        return {name: weight.grad.clone() for name, weight in each.named_parameters() if weight.grad is not None}

    model = packed_tower(family).train()
    expected, found = gradients(model), gradients(patch(model, Identity(), restore=True).train())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient, 1e-4)
    fast = patch(model, REDUCING, restore=True).train()
    whole = gradients(fast)
    host_of(fast).backbone.set_grad_checkpointing(tower_of(fast), True)
    assert host_of(fast).backbone.uses_grad_checkpointing(fast)
    again = gradients(fast)
    for name, gradient in whole.items():
        close(again[name], gradient, 1e-5)


def test_half_precision_is_the_models_own_and_kernels_agree():
    model = packed_tower("qwen3_vl")
    with torch.no_grad():
        auto, plain = (patch(model, REDUCING, restore=True, kernels=each) for each in ("auto", "torch"))
        close(auto(rows(), GRIDS).pooler_output, plain(rows(), GRIDS).pooler_output, 1e-5)
        model.bfloat16()
        found = patch(model, REDUCING, restore=True)(rows().bfloat16(), GRIDS).pooler_output
        assert found.dtype == torch.bfloat16
        assert bool(found.isfinite().all())
        same = patch(model, Identity(), restore=True)(rows().bfloat16(), GRIDS).pooler_output
        close(same.float(), model(rows().bfloat16(), GRIDS).pooler_output.float(), 2e-2)


def prompt():
    """Two images of different sizes in one prompt, as many placeholders as the merger returns."""
    ids = torch.tensor([[1, 6, *[IMAGE] * 16, 7, 10, 6, *[IMAGE] * 6, 7, 11, 12]])
    grids = GRIDS[:2]
    return {
        "input_ids": ids,
        "pixel_values": rows(grids),
        "image_grid_thw": grids,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


@pytest.mark.parametrize("family", [pytest.param(family, marks=slow) for family in PACKED])
def test_a_model_of_images_and_language_generates_and_is_saved(family, tmp_path):
    model = packed_vlm(family)
    same, fast = patch(model, Identity(), restore=True), patch(model, REDUCING, restore=True)
    with torch.no_grad():
        logits = model(**prompt()).logits
        close(same(**prompt()).logits, logits, 2e-6)
        reduced = fast(**prompt()).logits
        assert reduced.shape == logits.shape
        assert float((reduced - logits).abs().max()) > 0.01
        texts = [each.generate(**prompt(), max_new_tokens=4, min_new_tokens=4) for each in (model, same, fast)]
        assert torch.equal(texts[0], texts[1])
        assert texts[2].shape == texts[0].shape
        fast.save_pretrained(tmp_path)
        again = load_pretrained(tmp_path)
        assert again.reduction.method == REDUCING
        close(again(**prompt()).logits, reduced, 2e-6)
        assert torch.equal(unpatch(fast)(**prompt()).logits, logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid_thw": torch.tensor([[1, 8, 7]])}, r"image 0 has a grid of 1 x 8 x 7 patches; .* multiples of 2"),
        (
            {"grid_thw": torch.tensor([[1, 8, 8], [0, 2, 2]])},
            r"image 1 has a grid of 0 x 2 x 2 patches; .* none may be 0",
        ),
        ({"grid_thw": torch.tensor([[1, 1, 1]])}, r"image 0 has a grid of 1 x 1 x 1 patches"),
        (
            {"grid_thw": torch.tensor([[1, 4, 4]])},
            r"hidden_states are \(64, 384\), but grid_thw says 16 patches of 384",
        ),
        ({"hidden_states": torch.zeros(64, 12)}, r"hidden_states are \(64, 12\), but grid_thw says 64 patches of 384"),
        ({"grid_thw": torch.zeros(0, 3).long()}, r"grid_thw is \(0, 3\); give frames, rows and columns of each image"),
        ({"grid_thw": None}, r"grid_thw is NoneType; give"),
        ({"cu_seqlens": torch.tensor([0, 64])}, r"cu_seqlens cannot be combined with token reduction; remove it"),
        ({"output_attentions": True}, r"output_attentions=True needs the original"),
    ],
)
def test_inputs_that_contradict_each_other_are_refused(arguments, message):
    fast = patch(packed_tower("qwen2_vl"), REDUCING, restore=True)
    with pytest.raises(InputError, match=message) as refused:
        fast(**{"hidden_states": torch.zeros(64, WIDTH), "grid_thw": torch.tensor([[1, 8, 8]]), **arguments})
    assert "\n" not in str(refused.value)


def hooked(model):
    model.blocks[3].attn.register_forward_hook(lambda module, inputs, output: None)


def extended(model):
    model.blocks[0].extra = nn.Linear(3, 3)


def adapted(model):
    class Linear(nn.Linear):
        """As an adapter's."""

    model.blocks[1].attn.qkv = Linear(24, 72)


def merged_otherwise(model):
    model.merger = nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hooked, r"blocks\[3\]\.attn has hooks"),
        (extended, r"blocks\[0\]\.extra \(Linear\) is not known"),
        (adapted, r"blocks\[1\]\.attn\.qkv is .*Linear; .*merge_and_unload"),
        (merged_otherwise, r"a merger is Identity; supported: PatchMerger"),
    ],
)
def test_towers_that_are_not_plain_are_refused(change, message):
    model = packed_tower("qwen2_vl")
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model, REDUCING, restore=True)


def test_the_merger_needs_all_patches():
    with pytest.raises(UnsupportedModelError, match=r"joins the channels of neighbouring patches, .*restore=True"):
        patch(packed_tower("qwen2_vl"), REDUCING)


def test_older_versions_are_refused(monkeypatch):
    model = packed_tower("qwen2_vl")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.2")
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.22\.2 .* 5\.23 or newer"):
        patch(model, REDUCING, restore=True)
