"""patch: timm's interface stays, callers of all tokens get all, and what is not understood is refused."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from gtp_vit import GTP, METHODS, GTPError, Identity, UnsupportedModelError, make_method, method_from_dict, patch, trace
from gtp_vit.backbones import small_models
from gtp_vit.core.loop import run
from gtp_vit.errors import InputError, ScheduleError, SettingError, UnknownNameError
from gtp_vit.methods.gtp.graph import degrees
from gtp_vit.testing import families

VIT = "vit"


def fast(family=VIT, **settings):
    return patch(families.make(family), GTP(**{"propagate": 7, **settings}))


# ---------------------------------------------------------------- timm's interface


@pytest.mark.parametrize("family", small_models.timm_vits(4))
@pytest.mark.parametrize(
    "arguments",
    [
        {"norm": True},
        {"indices": [0, 2], "stop_early": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"indices": 2}, marks=pytest.mark.slow),
    ],
)
def test_forward_intermediates_of_an_unreduced_model_is_timms(family, arguments):
    model, images = families.make(family), families.images(family)
    same = patch(model, Identity())
    for fmt in ("NCHW", "NLC"):
        for extra in ({}, {"return_prefix_tokens": True}, {"intermediates_only": True}, {"output_dict": True}):
            if "output_dict" in extra and not _takes(model.forward_intermediates, "output_dict"):
                continue
            with torch.no_grad():
                expected = model.forward_intermediates(images, output_fmt=fmt, **arguments, **extra)
                found = same.forward_intermediates(images, output_fmt=fmt, **arguments, **extra)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        expected = model.get_intermediate_layers(images, 2, norm=True)
        torch.testing.assert_close(same.get_intermediate_layers(images, 2, norm=True), list(expected))


def _takes(function, name):
    return name in function.__code__.co_varnames


def test_forward_intermediates_of_a_reduced_model_gives_all_that_remain():
    model, images = fast(), families.images(VIT)
    with torch.no_grad():
        features, layers = model.forward_intermediates(images, output_fmt="NLC")
        assert torch.equal(features, model.forward_features(images))
    assert [layer.shape[1] for layer in layers] == [57, 50, 43, 36]
    assert features.shape[1] == 37
    with pytest.raises(SettingError, match=r"NCHW.* 57 remain.*NLC"), torch.no_grad():
        model.forward_intermediates(images)
    with pytest.raises(SettingError, match="indices"), torch.no_grad():
        model.forward_intermediates(images, indices=[4], output_fmt="NLC")


def test_the_shortened_last_block_follows_the_head():
    images = families.images(VIT)
    model = fast()
    model.reset_classifier(5, "avg")  # the new head reads image tokens
    with torch.no_grad():
        features = model.forward_features(images)
        expected = model.forward_head(features)
        torch.testing.assert_close(model(images), expected)
    assert families.make(VIT).head.out_features == 10


def test_timm_finds_its_data_config():
    config = timm.data.resolve_data_config({}, model=fast())
    assert config["mean"] == timm.data.resolve_data_config({}, model=families.make(VIT))["mean"]


def test_forward_head_and_pre_logits_still_work():
    model, images = fast(), families.images(VIT)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert features.shape == (3, 24)


def test_hooks_on_blocks_that_are_left_alone_fire():
    model, calls = patch(families.make(VIT), GTP(propagate=(0, 9, 0, 0))), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(families.images(VIT))
    assert calls == [1]  # later blocks see sizes, and the last one is shortened


@pytest.mark.slow
def test_a_model_compiled_in_place_is_reduced_all_the_same():
    model, images = families.make(VIT), families.images(VIT)
    expected = logits_of(fast(), images)
    model.compile(backend="eager")
    reduced = patch(model, GTP(propagate=7))
    assert torch.equal(logits_of(reduced, images), expected)
    reduced.compile(backend="eager")
    torch.testing.assert_close(logits_of(reduced, images), expected)
    assert torch.equal(logits_of(pickle.loads(pickle.dumps(reduced)), images), expected)
    assert torch.equal(logits_of(copy.deepcopy(reduced), images), expected)


def logits_of(model, images):
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("change", ["subclass", "hook", "forward"])
def test_a_query_layer_with_a_life_of_its_own_is_called(change):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, images = families.make(VIT), families.images(VIT)
    qkv = model.blocks[-1].attn.qkv
    if change == "subclass":
        doubled = Doubled(24, 72)
        doubled.load_state_dict(qkv.state_dict())
        model.blocks[-1].attn.qkv = doubled
    elif change == "hook":
        qkv.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        plain = qkv.forward
        qkv.forward = lambda x: 2 * plain(x)
    same = patch(model, Identity())
    torch.testing.assert_close(logits_of(same, images), logits_of(model, images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_autocast_keeps_graph_and_sizes_in_full_precision(dtype, kernels):
    model, images = families.make("dinov2_registers"), families.images("dinov2_registers")
    reduced = patch(model, GTP(propagate=7), kernels=kernels)
    seen = []
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            run(reduced, images, observe=seen.append)
            logits = reduced(images)
        exact = reduced.reducer.start(seen[0])
    assert torch.equal(seen[0].method_state.lists.neighbours, exact.method_state.lists.neighbours)
    assert seen[-1].size.dtype == torch.float32
    assert not torch.equal(seen[-1].size, seen[-1].size.to(dtype).float())
    assert (logits.float() - logits_of(reduced, images)).abs().max() < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_full_precision(dtype):
    model, images = families.make(VIT), families.images(VIT)
    full = logits_of(patch(model, GTP(propagate=7)), images)
    half = logits_of(patch(copy.deepcopy(model).to(dtype), GTP(propagate=7)), images.to(dtype))
    plain = logits_of(copy.deepcopy(model).to(dtype), images.to(dtype)).float() - logits_of(model, images)
    assert (half.float() - full).abs().mean() < 10 * plain.abs().mean() + 0.02


def test_random_selection_is_the_same_in_every_dtype():
    model, images = families.make(VIT), families.images(VIT)
    for seed in range(3):
        method = GTP(propagate=7, select="random", seed=seed)
        full = trace(patch(model, method), images).layers[-1].kept
        half = trace(patch(copy.deepcopy(model), method).bfloat16(), images.bfloat16()).layers[-1].kept
        assert torch.equal(full, half)


def test_a_model_patched_on_the_meta_device_can_be_filled_later():
    model, images = families.make("gap"), families.images("gap")
    expected = logits_of(patch(model, GTP(propagate=7, graph="spatial")), images)
    with torch.device("meta"):
        empty = timm.create_model("vit_medium_patch16_gap_256", **small_models.SMALL).eval()
        reduced = patch(empty, GTP(propagate=7, graph="spatial"))
    reduced.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(logits_of(reduced, images), expected)


def test_training_with_dropout_and_stochastic_depth_gives_gradients():
    model = timm.create_model(
        "vit_tiny_patch16_224", **small_models.SMALL, drop_path_rate=0.2, attn_drop_rate=0.1, proj_drop_rate=0.1
    )
    reduced = patch(copy.deepcopy(model), GTP(propagate=7, theta=0.6)).train()
    reduced(families.images(VIT)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in reduced.parameters())


def test_dynamic_image_sizes_and_non_square_grids():
    model = fast("dynamic")
    for height, width in ((64, 64), (48, 80), (128, 40)):
        images = torch.randn(2, 3, height, width)
        found = trace(model, images)
        assert found.grid == (height // 8, width // 8)
        assert found.layers[-1].kept.shape[1] == height * width // 64 - 28
        with torch.no_grad():
            alone = model(images[:1])
            torch.testing.assert_close(alone, model(images)[:1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ScheduleError, match="only 16 image tokens"):
        model(torch.randn(1, 3, 32, 32))
    with pytest.raises(InputError, match="multiples of the patch size"):
        model(torch.randn(1, 3, 30, 32))
    with pytest.raises(SettingError, match="only 4 patches"):
        fast("dynamic", propagate="keep:0.5:1")(torch.randn(1, 3, 16, 16))


def test_random_selection_is_drawn_from_its_seed():
    def kept(seed):
        return trace(fast(select="random", seed=seed), families.images(VIT)).layers[-1].kept

    assert torch.equal(kept(0), kept(0))
    assert not torch.equal(kept(0), kept(1))
    assert torch.equal(kept(0)[0], kept(0)[1])
    big = torch.randn(1, 3, 8 * 65, 8 * 64)
    with pytest.raises(SettingError, match=r"at most 4096 patches.* 65 x 64"):
        fast("dynamic", select="random")(big)


# ---------------------------------------------------------------- readings of the paper


@pytest.mark.parametrize(
    "settings",
    [
        {"exclude_self": True},
        {"count_class_row": False},
        {"heads": "mean"},
        {"graph": "spatial"},
        {"graph": "semantic"},
        {"graph": "none"},
        {"neighbours": 3},
        {"spatial_neighbours": 4},
        {"alpha": 0.5},
        {"theta": 0.5},
        {"theta": 0.5, "score_from": "dense"},
        {"theta": 0.5, "sparsify_rows": True},
        {"theta": 0.5, "renormalise_rows": True},
        {"edges": "giver"},
        {"edges": "either"},
        {"renormalise_graph": True},
        {"conserve_sizes": True},
        {"proportional_attention": False},
        {"select": "diagonal"},
        {"select": "class"},
    ],
    ids=str,
)
def test_every_option_changes_the_result(settings):
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert not torch.equal(fast(**settings)(images), fast()(images))


def test_official_offbyone_adds_a_neighbour_only_without_class_token():
    def edges(family, **settings):
        model = fast(family, graph="semantic", neighbours=5, **settings)
        tokens = model.reducer.start(model.reduction.backbone.embed(model, families.images(family)))
        return set(degrees(tokens.method_state.lists.neighbours).flatten().tolist())

    assert edges("gap") == edges("vit") == {5}
    assert edges("gap", official_offbyone=True) == {6}
    assert edges("vit", official_offbyone=True) == {5}


def test_a_graph_of_no_semantic_neighbours_is_the_spatial_one():
    images = families.images(VIT)
    with torch.no_grad():
        assert torch.equal(fast(neighbours=0)(images), fast(graph="spatial")(images))


def test_renormalised_graph_counts_present_neighbours_only():
    model = fast(graph="spatial", renormalise_graph=True, propagate=(7, 7, 0, 0))
    seen = []
    with torch.no_grad():
        run(model, families.images(VIT), observe=seen.append)
    tokens, kept, gone = seen[1], torch.arange(7, 57).expand(3, -1), torch.arange(7).expand(3, -1)
    weights = model.reducer._weights(tokens, kept, gone, tokens.cell.gather(1, kept))
    for image in range(3):
        present = tokens.cell[image].tolist()
        for column, giver in enumerate(present[:7]):
            for row, receiver in enumerate(present[7:]):
                expected = _touch(giver, receiver) / (_degree(giver, present) * _degree(receiver, present)) ** 0.5
                assert weights[image, row, column].item() == pytest.approx(expected, abs=1e-6)


def _touch(one, other):
    return one != other and max(abs(one // 8 - other // 8), abs(one % 8 - other % 8)) == 1


def _degree(cell, present):
    return max(sum(_touch(cell, other) for other in present), 1e-9)


# ---------------------------------------------------------------- what is refused


def refuse(model, words):
    with pytest.raises(UnsupportedModelError) as error:
        patch(model, GTP(propagate=1))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_timm_models_are_refused_by_name():
    refuse(nn.Linear(2, 2), "torch.nn.modules.linear.Linear is not a supported ViT")
    refuse(timm.create_model("test_resnet"), "ResNet is not a supported ViT")
    refuse(timm.create_model("cait_xxs24_224", depth=1), "Cait is not a supported ViT")


def test_other_blocks_are_refused_by_name():
    small = {**small_models.SMALL, "depth": 2}
    refuse(timm.create_model("vit_base_patch16_18x2_224", **small), "blocks[0] is ParallelThingsBlock")
    refuse(timm.create_model("vit_base_patch16_xp_224", **small), "blocks[0] is ParallelScalingBlock")
    refuse(timm.create_model("vit_tiny_patch16_224", **small, patch_drop_rate=0.5), "patch_drop_rate=0")


def test_other_modules_are_refused_wherever_they_are():
    class Talking(nn.Module):
        pass

    model = families.make(VIT)
    model.blocks[2].attn.talk = nn.Linear(3, 3)
    refuse(model, "blocks[2].attn.talk (Linear) is not known")
    model = families.make(VIT)
    model.blocks[1].attn = Talking()
    refuse(model, "blocks[1].attn is Talking")
    model = families.make(VIT)
    model.blocks[3].mlp = Talking()
    refuse(model, "blocks[3].mlp is Talking")
    model = families.make(VIT)
    model.blocks[0].adapter = nn.Linear(3, 3)
    refuse(model, "blocks[0].adapter (Linear) is not known")
    model = families.make(VIT)
    model.rope = nn.Linear(3, 3)
    refuse(model, "module rope (Linear)")
    model = families.make(VIT)
    model.patch_embed = Talking()
    refuse(model, "patch_embed is Talking")


def test_parameters_hooks_and_replaced_forwards_are_refused():
    model = families.make(VIT)
    model.blocks[1].attn.sink = nn.Parameter(torch.zeros(3))
    refuse(model, "blocks[1].attn.sink (a tensor) is not known")
    model = families.make(VIT)
    model.blocks[1].register_forward_hook(lambda *_: None)
    refuse(model, "blocks[1] has hooks")
    model = families.make(VIT)
    model.blocks[2].attn.forward = model.blocks[2].attn.forward
    refuse(model, "blocks[2].attn has hooks or a forward of its own")
    model = families.make(VIT)
    model.forward = model.forward
    refuse(model, "forward was replaced on the instance")
    model = families.make(VIT)
    model.blocks[0].attn.proj = nn.Identity()
    refuse(model, "blocks[0].attn.proj is torch.nn.modules.linear.Identity")


def test_a_class_that_only_has_the_name_of_timms_is_refused():
    model = families.make(VIT)
    model.blocks[0].mlp = type("Mlp", (nn.Identity,), {})()
    refuse(model, "blocks[0].mlp is Mlp")


def test_subclasses_are_refused():
    class Mine(timm.models.VisionTransformer):
        pass

    refuse(Mine(**small_models.SMALL), "Mine is a subclass")


def test_gated_attention_is_refused():
    model = families.make(VIT)
    if not hasattr(model.blocks[0].attn, "gate"):
        pytest.skip("this timm has no gated attention")
    model.blocks[0].attn.gate = nn.Linear(24, 24)
    refuse(model, "blocks[0].attn.gate (Linear) is not known")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"select": "mixd"}, UnknownNameError, "did you mean 'mixed'"),
        ({"graph": "spacial"}, UnknownNameError, "did you mean 'spatial'"),
        ({"heads": "maxx"}, UnknownNameError, "did you mean 'max'"),
        ({"edges": "taker"}, UnknownNameError, "unknown edges 'taker'"),
        ({"score_from": "sparse"}, UnknownNameError, "unknown score_from"),
        ({"propagate": "linaer:1:2"}, UnknownNameError, "did you mean 'linear'"),
        ({"propagate": 16}, ScheduleError, "largest constant number for this model is 15"),
        ({"propagate": (1, 1)}, ScheduleError, "2 entries, but the model has 4 layers"),
        ({"neighbours": 64}, SettingError, "neighbours is 64; it must be an integer in [0, 63]"),
        ({"neighbours": 0, "graph": "semantic"}, SettingError, "[1, 63]"),
        ({"neighbours": 2.5}, SettingError, "an integer"),
        ({"spatial_neighbours": 6}, SettingError, "4 or 8"),
        ({"theta": 0.0}, SettingError, "(0, 1]"),
        ({"theta": 1.1}, SettingError, "(0, 1]"),
        ({"theta": float("nan")}, SettingError, "theta is nan"),
        ({"theta": "0.5"}, SettingError, "theta is '0.5'"),
        ({"alpha": -0.1}, SettingError, "alpha is -0.1"),
        ({"alpha": float("inf")}, SettingError, "alpha is inf"),
        ({"seed": -1}, SettingError, "seed is -1"),
        ({"proportional_attention": "no"}, SettingError, "proportional_attention is 'no'; it must be True or False"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_done(settings, error, words):
    model = families.make(VIT)
    with pytest.raises(error) as caught:
        patch(model, GTP(**settings))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(model) is timm.models.VisionTransformer


def test_class_attention_needs_a_class_token():
    for settings in ({"select": "class"}, {"count_class_row": False}):
        with pytest.raises(SettingError, match="this model has none"):
            fast("gap_registers", **settings)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(3, 64, 64), "x[None]"),
        (torch.zeros(1, 1, 64, 64), "1 channels, but the model takes 3"),
        (torch.zeros(1, 3, 32, 64), "32 x 64, but the model takes 64 x 64"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "torch.uint8"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.float64), "torch.float64, but the model is torch.float32"),
        (torch.zeros(1, 3, 64, 64, device="meta"), "on meta, but the model is on cpu"),
        (torch.zeros(1, 3, 0, 64), "no pixels"),
        ("cat.png", "a str"),
    ],
    ids=["rank", "channels", "size", "integers", "dtype", "device", "empty", "type"],
)
def test_wrong_images_are_refused(images, words):
    with pytest.raises(InputError) as caught:
        fast()(images)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_arguments_of_patch_are_refused():
    for model, method in ((families.make(VIT), 8), (families.make(VIT), GTP), ("deit", GTP())):
        with pytest.raises(SettingError):
            patch(model, method)


def test_masks_and_set_input_size_are_refused():
    model, images = fast(), families.images(VIT)
    with pytest.raises(InputError, match="masks"):
        model(images, attn_mask=torch.zeros(65, 65))
    with pytest.raises(GTPError, match="call it on the original"):
        model.set_input_size((32, 32))
    with pytest.raises(GTPError, match="call it on the original"):
        model.prune_intermediate_layers(1)
    original = families.make(VIT)
    model = patch(original, GTP(propagate=1))
    original.set_input_size((32, 32))
    with pytest.raises(InputError, match="patch it again"):
        model(torch.zeros(1, 3, 32, 32))


def test_an_empty_batch_gives_an_empty_result():
    model = fast()
    assert logits_of(model, torch.zeros(0, 3, 64, 64)).shape == (0, 10)
    assert trace(model, torch.zeros(0, 3, 64, 64)).layers[-1].kept.shape == (0, 36)


def test_methods_by_name_and_from_stored_settings():
    for name in METHODS:
        method = make_method(name)
        assert method_from_dict(method.to_dict()) == method
    listed = GTP(propagate=(1, 2, 3, 4), alpha=0.7)
    assert method_from_dict({**listed.to_dict(), "propagate": [1, 2, 3, 4]}) == listed
    assert GTP(propagate=[1, 2, 3, 4], alpha=0.7) == listed
    assert hash(listed) == hash(GTP(propagate=[1, 2, 3, 4], alpha=0.7))
    assert GTP(select="IMGAttn") == GTP(select="BroadAttn") == GTP(select="broad")
    assert repr(listed) == "GTP(propagate=(1, 2, 3, 4), alpha=0.7)"
    with pytest.raises(UnknownNameError, match="did you mean 'ppt' or 'gtp'"):
        make_method("gpt")
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        make_method("gtp", alfa=1)
