"""torchvision's and open_clip's own ViT, whose attention is torch's nn.MultiheadAttention."""

import copy
import dataclasses
import inspect
import pickle
from unittest import mock

import open_clip
import pytest
import torch
from open_clip import transformer as open_clip_transformer
from open_clip.model import CLIP, convert_weights_to_lp
from torch import nn
from torchvision.models import vision_transformer

from gtp_vit import GTP, EvoViT, GTPError, GTPPlus, Identity, ToMe, TrainingConfig, finetune, macs, patch, unpatch
from gtp_vit.backbones import small_models
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.transforms import make_transform, preprocessing_of
from gtp_vit.errors import SettingError, UnsupportedModelError
from gtp_vit.patching import host_of
from gtp_vit.testing import Case, check, families
from gtp_vit.testing.promises import close, it_compiles_as_one_graph, it_exports_with_a_dynamic_batch
from gtp_vit.testing.subject import Subject
from support.precision import half_precision_is_near_full_precision
from support.probe import Probe

MHA = [family for backbone, family in families.ALL if backbone in ("torchvision_vit", "open_clip_vit")]
TWO = ["torchvision", "open_clip"]
SOME_LAYERS = GTP(propagate=(0, 9, 0, 4))  # the others run the model's own block
# torch 2.6's export warns of the Identity that stands for a norm where a model has none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # torch 2.6's export, about constants
    pytest.mark.filterwarnings("ignore:Node .* does not reference an nn.Module"),
    pytest.mark.filterwarnings("ignore:Unable to find the path of the module Identity"),
]


def outputs(model, images):
    with torch.no_grad():
        return model(images)


# --- the fast path ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mha_fast_path")
@pytest.mark.parametrize("method", [Identity(), Probe(statistics=frozenset({"column_sums"}))], ids=["own", "ours"])
@pytest.mark.parametrize("family", MHA)
def test_nothing_removed_equals_the_untouched_model_on_the_fast_path(family, method):
    """Not to 1e-6, to which the two implementations of nn.MultiheadAttention do not agree themselves."""
    model, images = families.make(family), families.images(family)
    with mock.patch.object(
        torch, "_native_multi_head_attention", wraps=torch._native_multi_head_attention
    ) as fast_path:
        expected = outputs(model, images)
    # open_clip's own attention has none.
    assert fast_path.call_count == (0 if family == "open_clip_custom" else 4)
    close(outputs(patch(model, method), images), expected, 5e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("mha_fast_path")
@pytest.mark.parametrize("family", TWO)
def test_the_fast_path_compiles_and_exports(family):
    fast, images = patch(families.make(family), SOME_LAYERS), families.images(family)
    torch.compiler.reset()
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    close(outputs(compiled, images), outputs(fast, images), 5e-6)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(fast, (images,), dynamic_shapes=shapes).module()
    for batch in (1, 5):
        others = families.images(family, batch)
        close(outputs(exported, others), outputs(fast, others), 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strict"),
    [("torchvision", True), ("open_clip_coca", False), ("open_clip_custom", False)],
)
def test_exports_with_a_dynamic_batch(family, strict):
    it_exports_with_a_dynamic_batch(Subject(Case(family, SOME_LAYERS, families.factory_of(family))), strict=strict)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["torchvision", "open_clip_coca", "open_clip_custom"])
def test_compiles_as_one_graph(family):
    check(Case(family, SOME_LAYERS, families.factory_of(family)), [it_compiles_as_one_graph])


# --- precision, training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", [*TWO, "open_clip_custom"])
def test_half_precision_is_near_full_precision(family, dtype):
    half_precision_is_near_full_precision(family, GTPPlus(), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_open_clips_mixed_precision_has_costs_and_a_default(dtype):
    """Its embeddings and norms stay in float32, so its parameters do not have one dtype."""
    model = families.make("open_clip_all_tokens")
    model.pool_type = "tok"
    images, exact = families.images("open_clip"), outputs(patch(model), families.images("open_clip"))
    cost = macs(model)
    convert_weights_to_lp(model, dtype)
    assert next(model.parameters()).dtype == torch.float32
    assert macs(model) == cost
    found = outputs(patch(model), images.to(dtype))
    assert found.dtype == dtype
    assert (found.float() - exact).abs().mean() < 0.12 * exact.std()


@pytest.mark.parametrize("family", ["torchvision", "open_clip", "open_clip_custom"])
@pytest.mark.parametrize("method", [GTPPlus(), SOME_LAYERS], ids=str)
def test_checkpointed_gradients_are_equal(family, method):
    images = families.images(family)

    def gradients(checkpointing):
        fast = patch(families.make(family), method)
        fast.reduction.backbone.set_grad_checkpointing(fast, checkpointing)
        assert fast.reduction.backbone.uses_grad_checkpointing(fast) == checkpointing
        with mock.patch("gtp_vit.core.loop.checkpoint", wraps=torch.utils.checkpoint.checkpoint) as checkpoint:
            fast(images).square().sum().backward()
        assert checkpoint.call_count == (8 if checkpointing else 0)
        return [p.grad for p in fast.parameters() if p.grad is not None]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == len(checkpointed) > 10
    for one, other in zip(plain, checkpointed, strict=True):
        assert one.isfinite().all()
        close(other, one, 1e-6)


def test_attention_drops_in_training_only():
    model = families.make("torchvision")
    custom = families.make("open_clip_custom")
    for block in model.encoder.layers:
        block.self_attention.dropout = 0.3
    custom.transformer.resblocks[0].attn.attn_drop.p = 0.2
    for each, rate in ((model, 0.3), (custom, 0.2)):
        host = host_of(each)
        block, tokens = host.backbone.blocks(each)[0], host.backbone.embed(each, families.images("torchvision"))
        assert host.backbone.project(block, 0, tokens, None).dropout == 0
        each.train()
        assert host.backbone.project(block, 0, tokens, None).dropout == rate


@pytest.mark.slow
def test_torchvision_can_be_finetuned(tmp_path):
    data = InMemoryDataset(families.images("torchvision", 16), torch.arange(16) % 10)
    settings = TrainingConfig(epochs=1, batch_size=8, micro_batch=8, repeats=1, drop_path=0, grad_checkpointing=True)
    for method in (GTPPlus(), EvoViT()):  # which has a second norm and classifier
        found = finetune(families.make("torchvision"), method, data, settings, output=tmp_path / method.name, workers=0)
        assert outputs(found.model, families.images("torchvision")).shape == (3, 10)
    rate = dataclasses.replace(settings, drop_path=0.1)
    with pytest.raises(SettingError, match="no stochastic depth"):
        finetune(families.make("torchvision"), GTPPlus(), data, rate, output=tmp_path / "rate", workers=0)


# --- entry points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["torchvision", "open_clip"])
def test_entry_points_have_the_librarys_signatures(family):
    model = families.make(family)
    mixin = host_of(model).backbone.forwards
    for name in ("forward", "forward_intermediates"):
        if hasattr(model, name):
            own, theirs = (inspect.signature(getattr(owner, name)).parameters for owner in (mixin, type(model)))
            assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("family", [name for name in MHA if name.startswith("open_clip")])
@pytest.mark.parametrize("fmt", ["NCHW", "NLC"])
@pytest.mark.parametrize("indices", [None, 2, [0, -2]], ids=str)
def test_open_clips_intermediates_are_its_own_if_nothing_is_removed(family, fmt, indices):
    model, images = families.make(family), families.images(family)
    fast = patch(model, Identity())
    for options in (
        {"output_extra_tokens": True, "normalize_intermediates": model.attn_pool is None},
        {"stop_early": True, "output_extra_tokens": True},
        {"intermediates_only": True},
    ):
        with torch.no_grad():
            one, other = (
                each.forward_intermediates(images, indices, output_fmt=fmt, **options) for each in (fast, model)
            )
        assert list(one) == list(other)
        close(one, other, 1e-6)


def test_open_clips_intermediates_are_of_the_tokens_that_remain():
    model, images = families.make("open_clip"), families.images("open_clip")
    fast = patch(model, GTP(propagate=(20, 0, 9, 0)))
    with torch.no_grad():
        found = fast.forward_intermediates(images, output_fmt="NLC", output_extra_tokens=True)
        close(found["image_features"], fast(images), 1e-6)
    assert [each.shape[1] for each in found["image_intermediates"]] == [44, 44, 35, 35]
    assert [each.shape[1] for each in found["image_intermediates_prefix"]] == [1, 1, 1, 1]
    with pytest.raises(SettingError, match="needs all 64 image tokens, but 44 remain"):
        fast.forward_intermediates(images)
    with pytest.raises(SettingError, match="blocks 0 to 3"):
        fast.forward_intermediates(images, [4], output_fmt="NLC")
    with pytest.raises(SettingError, match="must be 'NCHW' or 'NLC'"):
        fast.forward_intermediates(images, output_fmt="NHWC")
    with pytest.raises(GTPError, match="does not fit the schedule"):
        fast.prune_intermediate_layers(1)
    assert len(model.transformer.resblocks) == 4


@pytest.mark.parametrize("family", ["open_clip", "open_clip_avg", "open_clip_coca", "open_clip_parallel"])
def test_open_clips_tokens_come_with_the_embedding(family):
    """And are those that remain, unless a pooler makes them: then as many as it has queries."""
    model, images = families.make(family), families.images(family)
    fast, nothing = patch(model, GTP(propagate=5)), patch(model, Identity())
    alone = outputs(fast, images)
    for each in (model, fast, nothing):
        each.output_tokens = True
    close(outputs(nothing, images), outputs(model, images), 1e-6)
    pooled, tokens = outputs(fast, images)
    close(pooled, alone, 1e-6)
    assert tokens.shape[1] == {"open_clip_coca": 5, "open_clip_parallel": 6}.get(family, 64 - 4 * 5)
    again = outputs(pickle.loads(pickle.dumps(copy.deepcopy(fast))), images)
    assert torch.equal(again[0], pooled)
    assert torch.equal(again[1], tokens)


def test_a_mean_of_merged_tokens_can_be_weighted():
    for family in ("open_clip_avg", "open_clip_avg_of_normed"):
        model, images = families.make(family), families.images(family)
        plain, weighted = (patch(model, ToMe(r=8, weighted_pool=on)) for on in (False, True))
        assert not torch.allclose(outputs(plain, images), outputs(weighted, images))
    for family in ("open_clip", "open_clip_coca"):
        with pytest.raises(SettingError):
            patch(families.make(family), ToMe(r=8, weighted_pool=True))


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_the_tower_of_a_clip_can_be_exchanged(quick_gelu):
    vision = {"image_size": 64, "patch_size": 8, "width": 24, "layers": 4, "head_width": 6}
    text = {"context_length": 8, "vocab_size": 50, "width": 24, "heads": 4, "layers": 1}
    clip, images = CLIP(16, vision, text, quick_gelu=quick_gelu).eval(), families.images("open_clip")
    with torch.no_grad():
        before = clip.encode_image(images)
        clip.visual = patch(clip.visual, Identity())
        close(clip.encode_image(images), before, 1e-6)
        clip.visual = patch(clip.visual, GTP(propagate=8))
        assert not torch.allclose(clip.encode_image(images, normalize=True), before, atol=1e-3)
        clip.visual = unpatch(clip.visual)
        assert torch.equal(clip.encode_image(images), before)


# --- what is known of a model ----------------------------------------------------------------------------------------


def test_outputs():
    kinds = {family: tuple(host_of(families.make(family)).output) for family in MHA}
    assert kinds == {
        "torchvision": ("classes", 10),
        "torchvision_stem": ("classes", 10),
        "open_clip": ("embedding", 16),
        "open_clip_quickgelu": ("embedding", 16),
        "open_clip_avg": ("embedding", 16),
        "open_clip_avg_of_normed": ("features", 24),
        "open_clip_all_tokens": ("tokens", 16),
        "open_clip_coca": ("embedding", 16),
        "open_clip_parallel": ("tokens", 24),
        "open_clip_cascade": ("tokens", 24),
        "open_clip_custom": ("embedding", 16),
    }
    for family, (kind, width) in kinds.items():
        found = outputs(families.make(family), families.images(family))
        assert (found.ndim, found.shape[-1]) == (3 if kind == "tokens" else 2, width)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (nn.Identity(), ("features", 24)),
        (nn.Sequential(), ("features", 24)),
        (nn.Sequential(nn.Linear(24, 12), nn.Identity()), ("features", 12)),
        (nn.Linear(24, 7), ("classes", 7)),
        (nn.Sequential(nn.Dropout(), nn.Linear(24, 7), nn.Softmax(-1)), ("classes", 7)),
    ],
    ids=str,
)
def test_heads_that_were_exchanged(heads, expected):
    model = families.make("torchvision")
    model.heads = heads.eval()
    host = host_of(model)
    assert tuple(host.output) == expected
    assert host.inputs.classes == (7 if expected[0] == "classes" else 0)
    images = families.images("torchvision")
    close(outputs(patch(model, Identity()), images), outputs(model, images), 1e-6)


@pytest.mark.parametrize(
    ("size", "crop", "interpolation"), [(224, 0.875, "bilinear"), (384, 1.0, "bicubic"), (32, 0.875, "bilinear")]
)
def test_images_as_torchvisions_weights_want_them(size, crop, interpolation):
    model = small_models.torchvision_vit(image_size=size)
    prepared = preprocessing_of(model)
    assert (prepared["input_size"], prepared["crop_pct"]) == ((3, size, size), crop)
    assert (prepared["interpolation"], prepared["mean"]) == (interpolation, (0.485, 0.456, 0.406))
    make_transform(prepared)


def test_images_as_open_clips_weights_want_them():
    model = small_models.open_clip_vit(image_size=(48, 96))
    prepared = preprocessing_of(model)
    assert (prepared["input_size"], prepared["crop_pct"], prepared["crop_mode"]) == ((3, 48, 96), 1.0, "center")
    assert (prepared["interpolation"], prepared["mean"]) == ("bicubic", open_clip.OPENAI_DATASET_MEAN)
    open_clip.set_model_preprocess_cfg(
        model, {"mean": (0.5,) * 3, "std": (0.4,) * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    )
    prepared = preprocessing_of(model)
    assert (prepared["mean"], prepared["std"]) == ((0.5,) * 3, (0.4,) * 3)
    assert (prepared["interpolation"], prepared["crop_mode"]) == ("bilinear", "squash")
    make_transform(prepared)


def test_real_sizes():
    with torch.device("meta"):
        base = vision_transformer.vit_b_16()
        tower = open_clip_transformer.VisionTransformer(224, 32, 768, 12, 12, 4.0)
    assert round(macs(base).total / 1e9, 1) == 17.6
    assert round(macs(tower).total / 1e9, 1) == 4.4
    assert macs(patch(base)).total <= 0.65 * macs(base).total


# --- refusals --------------------------------------------------------------------------------------------------------


def attention(**settings):
    return nn.MultiheadAttention(24, 4, **{"batch_first": True, **settings})


class Other(nn.MultiheadAttention):
    """Some subclass."""


OF_ATTENTION = {
    "subclass": (Other(24, 4, batch_first=True), r" is .*Other; supported: torch.nn.MultiheadAttention"),
    "sizes": (attention(kdim=12), r" has separate weights for queries, keys and values"),
    "bias": (attention(add_bias_kv=True), r" adds keys of its own"),
    "zeros": (attention(add_zero_attn=True), r" adds keys of its own"),
    "order": (attention(batch_first=False), r" expects tokens before the batch"),
}


def put(path, value):
    """A change of a model: a module, tensor or attribute at a path."""

    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


def hook(path):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None)


def attach(path, child):
    return lambda model: model.get_submodule(path).add_module("adapter", child)


TORCHVISION = "encoder.layers.encoder_layer_2"
OPEN_CLIP = "transformer.resblocks.1"
REFUSED = [
    *(
        (family, put(f"{block}.{name}", module), rf"\[{index}\]\.{name}{message}")
        for family, block, name, index in (
            ("torchvision", TORCHVISION, "self_attention", 2),
            ("open_clip", OPEN_CLIP, "attn", 1),
        )
        for module, message in OF_ATTENTION.values()
    ),
    ("torchvision", put(f"{TORCHVISION}.self_attention.out_proj", nn.Identity()), r"out_proj is Identity"),
    ("torchvision", attach(f"{TORCHVISION}.self_attention", nn.Linear(2, 2)), r"self_attention\.adapter \(Linear\)"),
    ("torchvision", put(f"{TORCHVISION}.self_attention.gate", nn.Parameter(torch.ones(1))), r"gate \(a tensor\)"),
    ("torchvision", hook(f"{TORCHVISION}.self_attention"), r"self_attention has hooks"),
    ("torchvision", hook(TORCHVISION), r"layers\[2\] has hooks"),
    ("torchvision", hook("encoder"), r"^encoder has hooks"),
    ("torchvision", hook("encoder.layers"), r"^encoder\.layers has hooks"),
    ("torchvision", attach(TORCHVISION, nn.Linear(2, 2)), r"layers\[2\]\.adapter \(Linear\) is not known"),
    ("torchvision", attach(f"{TORCHVISION}.mlp", nn.Linear(2, 2)), r"mlp\.adapter \(Linear\) is not known"),
    ("torchvision", put(f"{TORCHVISION}.mlp", nn.Sequential()), r"mlp is Sequential; supported: MLPBlock"),
    ("torchvision", put(TORCHVISION, nn.Identity()), r"layers\[2\] is Identity; supported: EncoderBlock"),
    ("torchvision", put("encoder", nn.Identity()), r"encoder is Identity; supported: Encoder"),
    ("torchvision", attach("encoder", nn.Linear(2, 2)), r"encoder\.adapter \(Linear\) is not known"),
    ("torchvision", attach("", nn.Linear(2, 2)), r"the model's adapter \(Linear\) is not known"),
    ("torchvision", put("registers", nn.Parameter(torch.ones(1))), r"the model's registers \(a tensor\) is not known"),
    ("torchvision", put("conv_proj", nn.Identity()), r"conv_proj is Identity"),
    ("torchvision", put("forward", lambda x: x), r"forward was replaced"),
    ("open_clip", put(f"{OPEN_CLIP}.attn.out_proj", nn.Identity()), r"out_proj is Identity"),
    ("open_clip", attach(OPEN_CLIP, nn.Linear(2, 2)), r"resblocks\[1\]\.adapter \(Linear\) is not known"),
    ("open_clip", put(f"{OPEN_CLIP}.ln_1_kv", nn.LayerNorm(24)), r"ln_1_kv \(LayerNorm\) is not known"),
    ("open_clip", attach(f"{OPEN_CLIP}.mlp", nn.Linear(2, 2)), r"mlp\.adapter \(Linear\) is not known"),
    ("open_clip", put(f"{OPEN_CLIP}.mlp", nn.Identity()), r"mlp is Identity; supported: Sequential"),
    ("open_clip", hook(f"{OPEN_CLIP}.attn"), r"resblocks\[1\]\.attn has hooks"),
    ("open_clip", hook(OPEN_CLIP), r"resblocks\[1\] has hooks"),
    ("open_clip", hook("transformer"), r"^transformer has hooks"),
    ("open_clip", attach("transformer", nn.Linear(2, 2)), r"transformer\.adapter \(Linear\) is not known"),
    ("open_clip", put("transformer.batch_first", False), r"^transformer expects tokens before the batch"),
    ("open_clip", put("transformer", nn.Identity()), r"transformer is Identity; supported: Transformer"),
    ("open_clip", put(OPEN_CLIP, nn.Identity()), r"resblocks\[1\] is Identity; supported: ResidualAttentionBlock, Cu"),
    ("open_clip", attach("", nn.Linear(2, 2)), r"the model's adapter \(Linear\) is not known"),
    ("open_clip", put("registers", nn.Parameter(torch.ones(1))), r"the model's registers \(a tensor\) is not known"),
    ("open_clip", put("conv1", nn.Identity()), r"conv1 is Identity; supported: Conv2d"),
    (
        "open_clip",
        put("patch_dropout", open_clip_transformer.PatchDropout(0.5)),
        r"create the model with patch_dropout",
    ),
    ("open_clip", put("pool_type", "max"), r"pool_type is 'max'; supported: tok, avg, none"),
    ("open_clip_coca", put("attn_pool", nn.Identity()), r"attn_pool is Identity; supported: AttentionalPooler"),
    ("open_clip_cascade", put("attn_pool_contrastive", nn.Identity()), r"attn_pool_contrastive is Identity"),
    ("open_clip_custom", put(f"{OPEN_CLIP}.attn", attention()), r"attn is MultiheadAttention; supported: Attention"),
    ("open_clip_custom", attach(f"{OPEN_CLIP}.attn", nn.Linear(2, 2)), r"attn\.adapter \(Linear\) is not known"),
    ("open_clip_custom", hook(f"{OPEN_CLIP}.attn"), r"resblocks\[1\]\.attn has hooks"),
    ("open_clip", put("forward_intermediates", lambda x: x), r"forward was replaced"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=lambda each: "" if callable(each) else each)
def test_what_is_not_known_is_refused_by_name(family, change, message):
    model = families.make(family)
    change(model)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        patch(model, GTP())
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("The model was not changed")


def test_scaled_cosine_attention_is_refused():
    model = small_models.open_clip_vit(scaled_cosine_attn=True)
    with pytest.raises(UnsupportedModelError, match=r"resblocks\[0\]\.attn is scaled cosine attention"):
        patch(model, GTP())


@pytest.mark.parametrize("library", [vision_transformer, open_clip_transformer], ids=lambda module: module.__name__)
def test_subclasses_are_refused(library):
    own = type("Own", (library.VisionTransformer,), {})
    model = families.make("torchvision" if library is vision_transformer else "open_clip")
    model.__class__ = own
    with pytest.raises(
        UnsupportedModelError, match="Own is a subclass of VisionTransformer whose forward may be its own"
    ):
        patch(model, GTP())


def test_patch_dropout_that_drops_nothing_is_taken():
    model, images = families.make("open_clip"), families.images("open_clip")
    expected = outputs(patch(model, GTP(propagate=3)), images)
    model.patch_dropout = open_clip_transformer.PatchDropout(0.0)
    assert torch.equal(outputs(patch(model, GTP(propagate=3)), images), expected)


@pytest.mark.parametrize("family", TWO)
def test_images_of_another_size_are_refused(family):
    fast = patch(families.make(family), GTP(propagate=3))
    with pytest.raises(GTPError, match=r"images are 72 x 64, but the model takes 64 x 64"):
        fast(torch.zeros(1, 3, 72, 64))


def test_norms_that_a_kernel_may_compute():
    def norm(family):
        model = families.make(family)
        return host_of(model).backbone.mlp_norm(host_of(model).backbone.blocks(model)[0])

    assert type(norm("torchvision")) is nn.LayerNorm
    assert type(norm("open_clip")) is open_clip_transformer.LayerNorm
    assert norm("open_clip_all_tokens") is None  # LayerNormFp32


def test_the_buffers_of_a_stem_are_not_changed_by_counting():
    model = families.make("torchvision_stem").train()
    before = copy.deepcopy(dict(model.named_buffers()))
    assert before
    macs(model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
