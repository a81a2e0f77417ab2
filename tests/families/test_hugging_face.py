"""Hugging Face models: what users do with them works on the patched ones; what would go wrong is refused."""

import copy
import inspect
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gtp_vit import (
    ATS,
    GTP,
    DynamicViT,
    EViT,
    EvoViT,
    GTPError,
    GTPPlus,
    Identity,
    ToMe,
    adapt_processor,
    is_patched,
    load_pretrained,
    macs,
    patch,
    trace,
    unpatch,
)
from gtp_vit.backbones import small_models
from gtp_vit.backbones.wrappers import REFUSED
from gtp_vit.errors import InputError, SettingError, UnsupportedModelError
from gtp_vit.patching import host_of, tower_of
from gtp_vit.recipes.provenance import Measurements, Provenance
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit
from gtp_vit.testing import families

transformers = pytest.importorskip("transformers", reason="transformers needs Python 3.11")
from support.vlms import gemma3, llava, llava_processor, paligemma, paligemma_processor  # noqa: E402  needs transformers

REDUCING = GTPPlus(remove=(9, 0, 9, 0))
NAMES = list(small_models.hf_vits(4))


def close(one, other, tolerance=1e-6):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def tensors(outputs):
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("family", NAMES)
def test_outputs_are_the_models_own_with_the_tokens_that_remain(family):
    model, images = families.make(family), families.images(family)
    fast, nothing = patch(model, REDUCING), patch(model, Identity())
    with torch.no_grad():
        plain = model(images, output_hidden_states=True)
        same, reduced = (each(images, output_hidden_states=True) for each in (nothing, fast))
        assert type(reduced) is type(plain)
        assert list(reduced) == list(plain)
        for name, value in tensors(plain).items():
            close(same[name], value)
        for one, other in zip(same.hidden_states, plain.hidden_states, strict=True):
            close(one, other)
        whole = plain.hidden_states[0].shape[1]
        lengths = [state.shape[1] for state in reduced.hidden_states]
        assert lengths == [whole, whole - 9, whole - 9, whole - 18, whole - 18]
        if "last_hidden_state" in reduced:
            assert reduced.last_hidden_state.shape[1] == whole - 18
        for one, other in zip(fast(images, return_dict=False), fast(images).to_tuple(), strict=True):
            assert torch.equal(one, other)
        for name, value in tensors(
            fast(images)
        ).items():  # the last block may be shortened only where nobody can see it
            close(reduced[name], value)


@pytest.mark.parametrize("family", NAMES)
def test_eager_attention_agrees_as_well_as_it_does_with_itself(family):
    model, images = families.make(family), families.images(family)
    model.set_attn_implementation("eager")
    for method in (Identity(), GTP(propagate=0), ToMe(r=0)):
        with torch.no_grad():
            found, wanted = patch(model, method)(images), model(images)
        for name, value in tensors(wanted).items():
            close(found[name], value, 5e-6)


def test_hidden_states_by_index():
    model, images = families.make("hf_clip_vision"), families.images("hf_clip_vision")
    fast = patch(model, REDUCING)
    with torch.no_grad():
        every = fast(images, output_hidden_states=True).hidden_states
        for wanted in (-2, [1, -1]):
            found = fast(images, output_hidden_states=wanted).hidden_states
            listed = [wanted] if isinstance(wanted, int) else wanted
            assert len(found) == 5
            assert sum(state is not None for state in found) == len(listed)
            for index in listed:
                assert torch.equal(found[index], every[index])


def test_what_the_configuration_asks_for_is_done():
    fast, images = patch(families.make("hf_vit"), REDUCING), families.images("hf_vit")
    fast.config.output_hidden_states = True
    with torch.no_grad():
        assert len(fast(images).hidden_states) == 5
    fast.set_attn_implementation("eager")
    fast.config.output_attentions = True
    with pytest.raises(InputError, match="output_attentions=True needs the original"):
        fast(images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True needs the original"),
        ({"attention_mask": torch.ones(3, 65)}, "attention_mask cannot be combined with token reduction"),
        ({"bool_masked_pos": torch.zeros(3, 64).bool()}, "bool_masked_pos cannot be combined with token reduction"),
        ({"pixel_values": None}, "there are no pixel_values"),
        ({"pixel_values": torch.zeros(3, 3, 72, 64)}, "images are 72 x 64, but the model takes 64 x 64"),
        ({"pixel_values": torch.zeros(3, 1, 64, 64)}, "images have 1 channels, but the model takes 3"),
    ],
)
def test_what_cannot_be_reduced_is_refused(arguments, message):
    fast = patch(families.make("hf_vit_base"), REDUCING)
    with pytest.raises(InputError, match=message) as refused:
        fast(**{"pixel_values": families.images("hf_vit_base"), **arguments})
    assert "\n" not in str(refused.value)


def test_other_sizes_of_images_where_the_model_takes_them():
    images = torch.randn(2, 3, 48, 96)
    for family, options in (("hf_vit", {"interpolate_pos_encoding": True}), ("hf_dinov2", {}), ("hf_dinov3", {})):
        model = families.make(family)
        with torch.no_grad():
            for name, value in tensors(model(images, **options)).items():
                close(patch(model, Identity())(images, **options)[name], value)
                assert not torch.equal(patch(model, GTP(propagate=9))(images, **options)[name], value)


def lora(model):
    """As PEFT does it: a layer around the original one."""

    class Linear(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x)

    block = model.vit.layers[1].attention
    block.q_proj = Linear(block.q_proj)


def quantised(model):
    model.vit.layers[2].mlp.fc1.weight = nn.Parameter(OneByte(model.vit.layers[2].mlp.fc1.weight.data))


class OneByte(torch.Tensor):
    """Stands for the tensors of a quantising library."""


def hooked(model):
    model.vit.layers[3].attention.register_forward_hook(lambda module, inputs, output: None)


def dispatched(model):
    model.vit.hf_device_map = {"embeddings": 0, "layers": 1}


def wrapped(model):
    model.vit.forward = model.vit.forward


def extended(model):
    model.vit.layers[0].extra = nn.Linear(3, 3)


def replaced(model):
    model.vit.layers[0].mlp = nn.Linear(24, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lora, r"vit: layers\[1\]\.attention\.q_proj is .*Linear; .*merge_and_unload"),
        (
            quantised,
            r"vit: layers\[2\]\.mlp\.fc1 is .*a Linear with a .*; .*shard, or quantise otherwise, after patching",
        ),
        (hooked, r"vit: layers\[3\]\.attention has hooks"),
        (dispatched, r"vit: the model is spread over 0, 1; load it without device_map"),
        (wrapped, r"vit: the model's forward was replaced"),
        (extended, r"vit: layers\[0\]\.extra \(Linear\) is not known"),
        (replaced, r"vit: layers\[0\]\.mlp is Linear; supported: ViTMLP"),
    ],
)
def test_models_that_are_not_plain_are_refused(change, message):
    model = families.make("hf_vit")
    change(model)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        patch(model, REDUCING)
    assert "\n" not in str(refused.value)


def test_old_versions_are_refused(monkeypatch):
    model = families.make("hf_vit")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.17\.0 names .* 5\.18 or newer"):
        patch(model, REDUCING)


@pytest.mark.parametrize("family", ["internvl", "mistral3", "qwen2_5_vl", "lfm2_vl", "granite4_vision"])
def test_vlms_whose_vit_cannot_be_reduced_are_refused_with_the_reason(family):
    class Vlm(nn.Module):
        __module__ = f"transformers.models.{family}.modeling_{family}"

        def __init__(self):
            super().__init__()
            self.vision_tower = families.make("hf_clip_vision")

    with pytest.raises(UnsupportedModelError, match=rf"^Vlm {REFUSED[family]}; reduce the language model's tokens"):
        patch(Vlm(), REDUCING, restore=True)


def test_a_model_that_has_shown_its_hidden_states_is_not_refused():
    """transformers leaves hooks on every layer then."""
    model, images = families.make("hf_vit"), families.images("hf_vit")
    with torch.no_grad():
        model(images, output_hidden_states=True)
        assert model.vit.layers[0]._forward_hooks
        expected = patch(families.make("hf_vit"), REDUCING)(images, output_hidden_states=True)
        found = patch(model, REDUCING)(images, output_hidden_states=True)
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == 5


@pytest.mark.parametrize("family", ["hf_vit", "hf_clip_vision", "hf_dinov3"])
def test_classes_keep_their_names(family):
    model = families.make(family)
    fast = patch(model, REDUCING)
    for one, other in ((fast, model), (tower_of(fast), host_of(model).tower)):
        assert str(type(one)) == str(type(other))
        assert isinstance(one, type(other))
        assert is_patched(one)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert str(type(again)) == str(type(model))
        assert is_patched(again)
    assert inspect.signature(type(model).forward).parameters["pixel_values"]
    assert inspect.signature(fast.forward).parameters["pixel_values"]  # Trainer chooses columns by these names


def test_a_pipeline_runs_on_it():
    model = families.make("hf_vit")
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 70, 3), dtype=np.uint8))
    results = []
    for each in (model, patch(model, Identity()), patch(model, REDUCING)):
        results.append(transformers.pipeline("image-classification", model=each, image_processor=processor)(picture))
    assert [row["label"] for row in results[0]] == [row["label"] for row in results[1]]
    assert results[0][0]["score"] == pytest.approx(results[1][0]["score"], abs=1e-6)
    assert results[0][0]["score"] != pytest.approx(results[2][0]["score"], abs=1e-6)


def test_labels_give_a_loss_and_gradients_are_the_same_with_checkpointing():
    images, labels = families.images("hf_vit"), torch.tensor([1, 2, 3])

    def gradients(checkpointing):
        fast = patch(families.make("hf_vit"), REDUCING).train()
        if checkpointing:
            host_of(fast).backbone.set_grad_checkpointing(fast, True)
        loss = fast(images, labels=labels).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in fast.parameters() if p.grad is not None)]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == len(checkpointed) > 40
    for one, other in zip(plain, checkpointed, strict=True):
        close(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unable to find the path of the module:UserWarning")  # of torch 2.6
@pytest.mark.parametrize("family", ["hf_vit", "hf_clip_vision", "hf_dinov3"])
def test_compile_as_one_graph_and_export(family):
    fast, images = patch(families.make(family), REDUCING), families.images(family)
    torch.compiler.reset()
    with torch.no_grad():
        expected = families.output(fast, images)
        if not torch.__version__.startswith("2.6."):  # which compiles no model of transformers, patched or not
            compiled = torch.compile(fast, fullgraph=True, backend="eager")
            close(families.output(compiled, images), expected)
        shapes = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
        program = torch.export.export(fast, (), {"pixel_values": images}, dynamic_shapes=shapes, strict=False)
        for batch in (1, 3):
            found = program.module()(pixel_values=images[:batch])
            close(next(iter(tensors(found).values())), next(iter(tensors(fast(images[:batch])).values())), 1e-5)


@pytest.mark.parametrize("method", [REDUCING, EViT(keep_rate=0.6)], ids=str)
@pytest.mark.parametrize("family", ["hf_vit", "hf_clip_projection", "hf_dinov3"])
def test_saved_and_loaded_it_is_reduced_again(tmp_path, family, method):
    model, images = families.make(family), families.images(family)
    fast = patch(model, method)
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    again, plain = load_pretrained(tmp_path), type(model).from_pretrained(tmp_path).eval()
    assert again.reduction.method == method
    assert not is_patched(plain)
    with torch.no_grad():
        close(families.output(again, images), families.output(fast, images))
        close(families.output(plain, images), families.output(model, images))
        close(families.output(unpatch(again), images), families.output(model, images))


def recipe_of(model, method):
    provenance, measured = Provenance(by="gtp-vit tune"), Measurements(measure="classes", figures={"kl": 0.25})
    return Recipe(host_of(model).inputs.name, sizes_of_vit(host_of(model).vit), method, provenance, measured)


def test_where_a_recipe_is_from_and_its_measure_are_saved_too(tmp_path):
    model = families.make("hf_vit")
    method = GTPPlus(remove=5)
    recipe = recipe_of(model, method)
    history = {key: recipe.to_dict()[key] for key in ("provenance", "measured")}
    patch(model, recipe).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "gtp_vit.json").read_text())
    assert {key: stored[key] for key in history} == history
    load_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again/gtp_vit.json").read_text())
    assert {key: again[key] for key in history} == history


def test_figures_of_other_weights_and_a_grid_that_is_not_restored_are_not_saved(tmp_path):
    model = families.make("hf_vit")
    recipe = recipe_of(model, GTPPlus(remove=5))
    history = {key: recipe.to_dict()[key] for key in ("provenance", "measured")}
    patch(model, recipe, restore=True).save_pretrained(tmp_path / "restored")
    stored = json.loads((tmp_path / "restored/gtp_vit.json").read_text())
    assert stored["provenance"] == {"by": "gtp-vit tune", "restore": True}
    plain = load_pretrained(tmp_path / "restored", restore=False)
    plain.save_pretrained(tmp_path / "plain")
    stored = json.loads((tmp_path / "plain/gtp_vit.json").read_text())
    assert {key: stored[key] for key in history} == history
    with torch.no_grad():
        plain.classifier.weight += 0.01  # the head alone
    plain.save_pretrained(tmp_path / "finetuned")
    stored = json.loads((tmp_path / "finetuned/gtp_vit.json").read_text())
    assert stored["provenance"] == history["provenance"]
    assert stored["measured"] == {}


@pytest.mark.parametrize("family", ["hf_dinov2", "hf_dinov3"])
def test_an_argument_that_the_original_ignores_is_ignored(family):
    model, images = families.make(family), families.images(family)
    with torch.no_grad():
        found = patch(model, Identity())(images, interpolate_pos_encoding=True)
        close(found[0], model(images, interpolate_pos_encoding=True)[0])


def test_learned_parts_are_saved_too(tmp_path):
    fast = patch(families.make("hf_vit"), DynamicViT(seed=3), quiet=True)
    fast.save_pretrained(tmp_path)
    again, images = load_pretrained(tmp_path), families.images("hf_vit")
    with torch.no_grad():
        close(again(images).logits, fast(images).logits)
    assert (tmp_path / "gtp_vit-predictors.safetensors").exists()


def test_folders_without_a_recipe_or_with_a_wrong_one_are_refused(tmp_path):
    families.make("hf_vit").save_pretrained(tmp_path / "plain")
    with pytest.raises(GTPError, match=r"has no gtp_vit\.json: it is not reduced"):
        load_pretrained(tmp_path / "plain")
    patch(families.make("hf_dinov3_gated"), REDUCING).save_pretrained(tmp_path / "other")
    (tmp_path / "plain" / "gtp_vit.json").write_bytes((tmp_path / "other" / "gtp_vit.json").read_bytes())
    with pytest.raises(SettingError, match="the recipe is for"):
        load_pretrained(tmp_path / "plain")
    with pytest.raises(SettingError, match="push_to_hub would leave out the recipe"):
        patch(families.make("hf_vit"), REDUCING).save_pretrained(tmp_path / "x", push_to_hub=True)


def test_models_of_images_and_texts():
    for name, config in (("CLIPModel", "CLIPVisionConfig"), ("SiglipModel", "SiglipVisionConfig")):
        torch.manual_seed(0)
        model = small_models.hugging_face(name, config).eval()
        images, words = torch.randn(2, 3, 64, 64), torch.tensor([[3, 4, 1], [5, 6, 1]])
        fast, nothing = patch(model, REDUCING), patch(model, GTP(propagate=0))
        with torch.no_grad():
            plain, same = (each(input_ids=words, pixel_values=images) for each in (model, nothing))
            close(same.logits_per_image, plain.logits_per_image)
            reduced = fast.get_image_features(images)
            assert reduced.pooler_output.shape == plain.image_embeds.shape
            assert reduced.last_hidden_state.shape[1] == plain.vision_model_output.last_hidden_state.shape[1] - 18
            assert torch.equal(
                fast.get_text_features(words).pooler_output, model.get_text_features(words).pooler_output
            )
        assert fast.text_model is model.text_model
        assert len(trace(fast, images).layers) == 4


def test_timm_models_in_transformers():
    torch.manual_seed(0)
    options = {"img_size": 64, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=10, model_args=options)
    images = torch.randn(2, 3, 64, 64)
    for kind in (transformers.TimmWrapperForImageClassification, transformers.TimmWrapperModel):
        model = kind(config).eval()
        fast = patch(model, REDUCING)
        assert type(fast).__name__ == kind.__name__
        with torch.no_grad():
            for name, value in tensors(model(images)).items():
                close(patch(model, Identity())(images)[name], value)
            if kind is transformers.TimmWrapperModel:
                assert fast(images).last_hidden_state.shape[1] == 65 - 18
                assert fast(images).pooler_output.shape == model(images).pooler_output.shape
            else:
                assert fast(images).logits.shape == (2, 10)
                assert host_of(model).inputs.classes == 10


def mae(ratio=0.0):
    torch.manual_seed(0)
    sizes = {"image_size": 64, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3}
    config = transformers.ViTMAEConfig(**sizes, intermediate_size=48, mask_ratio=ratio)
    return transformers.ViTMAEModel(config).eval()


def test_vitmae_without_a_mask():
    """It shuffles the patches; each is followed to its own cell."""
    model, images = mae(), torch.randn(2, 3, 64, 64)
    noise = torch.rand(2, 64)
    fast = patch(model, REDUCING)
    with torch.no_grad():
        plain, same = model(images, noise=noise), patch(model, GTP(propagate=0))(images, noise=noise)
        for name, value in tensors(plain).items():
            close(same[name], value)
        assert fast(images, noise=noise).last_hidden_state.shape[1] == 65 - 18
        embedded = fast.reduction.backbone.embed_with(fast, images, {"noise": noise})
        in_order = model.embeddings.patch_embeddings(images) + model.embeddings.position_embeddings[:, 1:]
        close(embedded.image, in_order.gather(1, embedded.cell.unsqueeze(2).expand(-1, -1, 24)))
    with pytest.raises(UnsupportedModelError, match=r"ViTMAE hides 75% of the patches .*mask_ratio = 0"):
        patch(mae(0.75), REDUCING)
    fast.config.mask_ratio = 0.75
    with pytest.raises(InputError, match=r"ViTMAE hides 75% of the patches"):
        fast(images)


# Models of images and language


PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("make", "processor", "layers"), [(llava, llava_processor, 3), (paligemma, paligemma_processor, 4)]
)
@pytest.mark.parametrize("method", [GTPPlus(remove=5), EViT(keep_rate=0.7, drop_loc=(1,)), ToMe(r=6)], ids=str)
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # transformers' processor, of NumPy 2
def test_vlms_see_as_many_features_as_placeholders(make, processor, layers, method):
    model = make()
    if make is paligemma and method.needs_class_token:
        pytest.skip("SigLIP has no class token")
    method = method if layers == 4 or not isinstance(method, GTPPlus) else GTPPlus(remove=(5, 5, 5))
    fast, own = patch(model, method), processor()
    fitted = adapt_processor(own, fast)
    left = tower_of(fast).reducer.steps((8, 8))[-1].out
    assert left < 64
    for each, wanted in ((own, 64), (fitted, left)):
        inputs = each(images=PICTURE, text="<image> what is this", return_tensors="pt")
        assert int((inputs["input_ids"] == 4).sum()) == wanted
    with torch.no_grad():
        words = fast.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert words.shape[1] == inputs["input_ids"].shape[1] + 3
        asked = own(images=PICTURE, text="<image> what is this", return_tensors="pt")
        with pytest.raises(ValueError, match="do not match"):
            fast(**asked)
        close(patch(model, Identity())(**asked).logits, model(**asked).logits)
    assert len(trace(fast, inputs["pixel_values"]).layers) == layers  # work behind the layer that is read is not done
    assert len(macs(fast).layers) == layers


@pytest.mark.parametrize(("make", "own"), [(gemma3, "Gemma3Processor"), (llava, "LlavaProcessor")])
def test_with_restore_a_processor_of_another_model_is_refused(make, own):
    model = make()
    layers = 4 if make is gemma3 else 3
    fast = patch(model, GTPPlus(remove=(5,) * layers), restore=True)
    other = llava_processor() if make is gemma3 else paligemma_processor()
    with pytest.raises(SettingError, match=f"does not belong to .*; give the processor of this model, {own}"):
        adapt_processor(other, fast)


def test_with_restore_a_processor_writes_all_placeholders_again():
    own, method = llava_processor(), GTPPlus(remove=(5, 5, 5))
    fitted = adapt_processor(own, patch(llava(), method))
    again = adapt_processor(fitted, patch(llava(), method, restore=True))
    added = [each.num_additional_image_tokens for each in (own, fitted, again)]
    assert added == [1, 1 - 15, 1]


def test_hidden_states_of_the_language_model_are_its_own():
    fast = patch(llava(), GTPPlus(remove=(5, 5, 5)))
    inputs = adapt_processor(llava_processor(), fast)(images=PICTURE, text="<image> what is this", return_tensors="pt")
    with torch.no_grad():
        found = fast(**inputs, output_hidden_states=True)
    assert [state.shape[2] for state in found.hidden_states] == [16, 16, 16]


def test_a_layer_that_is_not_run_is_not_given():
    fast = patch(llava(), GTPPlus(remove=(5, 5, 5)))
    with pytest.raises(InputError, match=r"only 3 layers are run, .* patch again"):
        tower_of(fast)(torch.zeros(1, 3, 64, 64), output_hidden_states=-1)
    with pytest.raises((InputError, TypeError)):  # transformers before 5.23 asks for all layers, and finds none there
        fast.get_image_features(torch.zeros(1, 3, 64, 64), vision_feature_layer=-1)
    with pytest.raises(UnsupportedModelError, match=r"joins the channels of layers \[-2, -3\] .* restore=True"):
        patch(llava([-2, -3]), GTPPlus(remove=5))


def test_processors_of_other_models_are_refused():
    fast = patch(llava(), GTPPlus(remove=(5, 5, 5)))
    for processor, message in (
        (llava_processor(72), r"the processor makes images of \(72, 72\)"),
        (llava_processor(64, 16), r"in patches of 16"),
        (paligemma_processor(), "PaliGemmaProcessor does not belong to LlavaForConditionalGeneration"),
        ("nonsense", "str does not belong to LlavaForConditionalGeneration"),
    ):
        with pytest.raises(SettingError, match=message):
            adapt_processor(processor, fast)
    with pytest.raises(SettingError, match="str does not belong"):
        adapt_processor("nonsense", patch(llava(), GTPPlus(remove=(5, 5, 5)), restore=True))
    other = llava_processor()
    other.vision_feature_select_strategy = "full"
    with pytest.raises(SettingError, match="vision_feature_select_strategy is 'full', the model's 'default'"):
        adapt_processor(other, fast)
    with pytest.raises(SettingError, match="is not patched"):
        adapt_processor(llava_processor(), llava())


@pytest.mark.parametrize("family", ["hf_dinov3", "hf_vit"])
@pytest.mark.parametrize(
    "method", [EViT(keep_rate=0.5), EvoViT(representative_token=True), ATS(budget="keep:0.6:1:2")], ids=str
)
def test_tokens_in_no_cell_and_fixed_budgets(family, method):
    fast, images = patch(families.make(family), method), families.images(family)
    with torch.no_grad():
        assert families.output(fast, images).isfinite().all()
