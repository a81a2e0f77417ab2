"""Models of images and language that put the patches of their ViT back on a grid: reduced inside it with restore."""

import pytest
import timm
import torch

from gtp_vit import GTPPlus, Identity, macs, patch, trace
from gtp_vit.backbones import small_models
from gtp_vit.errors import InputError, UnsupportedModelError
from gtp_vit.patching import host_of
from gtp_vit.testing import families

transformers = pytest.importorskip("transformers", reason="transformers needs Python 3.11")
from support.vlms import IMAGE, VISION, gemma3, siglip, small  # noqa: E402  needs transformers

PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
PINPOINTS = [[64, 128], [128, 64]]


def clip():
    return transformers.CLIPVisionConfig(**VISION)


def llava(layers=(-2, -4, 1)):
    return small("Llava", clip(), image_token_index=IMAGE, vision_feature_layer=list(layers))


def vipllava():
    return small("VipLlava", clip(), image_token_index=IMAGE, vision_feature_layers=[-2, 1])


def of_pinpoints(name, vision, **more):
    return small(name, vision, image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS, **more)


def idefics(name):
    vision = getattr(transformers, f"{name}VisionConfig")(**VISION)
    more = {
        "perceiver_config": {
            "hidden_size": 16,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        }
    }
    return small(name, vision, image_token_id=IMAGE, **(more if name == "Idefics2" else {"scale_factor": 2}))


def perception():
    arguments = {"embed_dim": 24, "depth": 4, "num_heads": 2, "img_size": (64, 64), "patch_size": 8, "global_pool": ""}
    vision = transformers.TimmWrapperConfig(architecture="vit_pe_lang_large_patch14_448", model_args=arguments)
    vision.update({"num_classes": 0})
    vision.hidden_size = 24
    return small("PerceptionLM", vision, image_token_id=IMAGE, projector_pooling_ratio=2)  # skips the class token


TILES = {"pixel_values": PIXELS[None].repeat(1, 2, 1, 1, 1)[:, :3], "image_sizes": torch.tensor([[64, 128]])}
ONE, NESTED = {"pixel_values": PIXELS[:1]}, {"pixel_values": PIXELS[None]}
# name -> (model, what it reads of an image, layers of the ViT that are run)
MODELS = {
    "llava": (llava, ONE, 3),
    "vipllava": (vipllava, ONE, 3),
    "llava_next": (lambda: of_pinpoints("LlavaNext", clip()), TILES, 3),
    "llava_next_video": (lambda: of_pinpoints("LlavaNextVideo", clip(), video_token_index=5), TILES, 3),
    "llava_onevision": (
        lambda: of_pinpoints("LlavaOnevision", siglip(), vision_feature_layer=-1, video_token_index=5),
        TILES,
        4,
    ),
    "gemma3": (gemma3, ONE, 4),
    "aya_vision": (
        lambda: small(
            "AyaVision",
            siglip(),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        ONE,
        4,
    ),
    "cohere2_vision": (lambda: small("Cohere2Vision", siglip(), image_token_id=IMAGE), ONE, 4),
    "idefics2": (lambda: idefics("Idefics2"), NESTED, 4),
    "idefics3": (lambda: idefics("Idefics3"), NESTED, 4),
    "smolvlm": (lambda: idefics("SmolVLM"), NESTED, 4),
    "perception_lm": (perception, NESTED, 4),
}


def features(model, images):
    inner = model if hasattr(model, "get_image_features") else model.model
    found = inner.get_image_features(**images).pooler_output
    return torch.cat([each.flatten(0, -2) for each in ([found] if isinstance(found, torch.Tensor) else found)])


@pytest.mark.parametrize("name", MODELS)
def test_reduced_inside_and_whole_outside(name):
    make, images, layers = MODELS[name]
    model = make()
    reducing = GTPPlus(remove=(20, 0, 9, 4)[:layers])
    with pytest.raises(UnsupportedModelError, match=r"so no patch may be missing; patch it with restore=True"):
        patch(model, reducing)
    same, fast = (patch(model, method, restore=True) for method in (Identity(), reducing))
    with torch.no_grad():
        wanted, found = features(model, images), features(fast, images)
        assert found.shape == wanted.shape
        assert bool(found.isfinite().all())
        assert not torch.allclose(found, wanted, atol=1e-4)  # tokens were removed on the way
        asked = {"input_ids": torch.tensor([[1, *[IMAGE] * len(wanted), 6, 7]]), **images}
        torch.testing.assert_close(same(**asked).logits, model(**asked).logits, rtol=1e-5, atol=1e-5)
        words = fast.generate(**asked, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert words.shape[1] == asked["input_ids"].shape[1] + 2
    assert len(macs(fast).layers) == layers  # work behind the last layer that is read is not done
    assert [layer.kept.shape[1] for layer in trace(fast, PIXELS).layers] == [44, 44, 35, 31][:layers]


@pytest.mark.parametrize("name", ["llava_next_video", "llava_onevision"])
def test_frames_of_videos_have_all_their_features(name):
    make, _, layers = MODELS[name]
    model = make()
    fast = patch(model, GTPPlus(remove=(20, 0, 9, 4)[:layers]), restore=True)
    with torch.no_grad():
        one, other = (each.get_video_features(PIXELS[None]).pooler_output for each in (fast, model))
    assert [each.shape for each in one] == [each.shape for each in other]


def test_padding_among_the_patches_is_refused():
    model = idefics("SmolVLM")
    fast, mask = patch(model, Identity(), restore=True), torch.ones(1, 2, 64, 64, dtype=torch.bool)
    with torch.no_grad():
        found, wanted = (each.get_image_features(PIXELS[None], mask).pooler_output for each in (fast, model))
        torch.testing.assert_close(torch.cat(tuple(found)), torch.cat(tuple(wanted)), rtol=1e-5, atol=1e-5)
        mask[0, 1, 40:] = False
        with pytest.raises(InputError, match=r"hides padding, .*; give images of one size"):
            fast.get_image_features(PIXELS[None], mask)


def test_layers_that_the_vit_does_not_have_are_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"is \[-2, -6\], and the ViT has 4 layers; give each from -4 to -1"
    ):
        patch(llava([-2, -6]), Identity(), restore=True)


def test_a_list_of_one_layer_needs_no_restore():
    fast = patch(llava([-2]), GTPPlus(remove=(5, 5, 5)))
    with torch.no_grad():
        assert features(fast, ONE).shape[0] == 64 - 15


QWEN = {**small_models.SMALL, **small_models.QWEN}
needs_qwen = pytest.mark.skipif("qwen" not in families.NAMES, reason="this timm has no Qwen3VitEncoder")


@needs_qwen
@pytest.mark.parametrize("pool", ["merge", "avg", ""])
def test_qwens_encoder_in_timm(pool):
    sizes = {name: value for name, value in QWEN.items() if name != "num_classes"}
    model = timm.create_model("qwen3_vit_88m_enc", **sizes, global_pool=pool, out_features=12).eval()
    reducing = GTPPlus(remove=(20, 0, 9, 4))
    if pool != "avg":
        with pytest.raises(UnsupportedModelError, match=r"^Qwen3VitEncoder .*patch it with restore=True"):
            patch(model, reducing)
    same, fast = (patch(model, method, restore=True) for method in (Identity(), reducing))
    with torch.no_grad():
        for name in ("forward", "forward_features"):
            wanted = getattr(model, name)(PIXELS)
            torch.testing.assert_close(getattr(same, name)(PIXELS), wanted, rtol=1e-5, atol=1e-5)
            assert getattr(fast, name)(PIXELS).shape == wanted.shape
        maps, wanted = (each.forward_intermediates(PIXELS, [1, 2]) for each in (same, model))
        torch.testing.assert_close(maps, wanted, rtol=1e-5, atol=1e-5)
    projector = 16 * (96 * 96 + 96 * 12) if pool == "merge" else 0  # of all patches, four in one
    assert macs(fast).head == macs(model).head == projector


@needs_qwen
def test_qwens_classifier_in_timm_needs_the_grid_for_its_projector_only():
    model = timm.create_model("qwen3_vit_88m", **QWEN).eval()
    inputs = host_of(model).inputs
    assert (inputs.name, inputs.classes) == ("qwen3_vit_88m", 10)
    assert inputs.preprocessing["mean"] == model.pretrained_cfg["mean"]
    with torch.no_grad():
        assert patch(model, GTPPlus(remove=9))(PIXELS).shape == (2, 10)
    joined = timm.create_model("qwen3_vit_88m", **QWEN, encoder_pool="merge", out_features=12).eval()
    with pytest.raises(UnsupportedModelError, match="neighbouring patches, so no patch may be missing"):
        patch(joined, Identity())
    with torch.no_grad():
        torch.testing.assert_close(
            patch(joined, Identity(), restore=True)(PIXELS), joined(PIXELS), rtol=1e-5, atol=1e-5
        )
