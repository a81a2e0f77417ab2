"""Restored features: the full grid from the tokens that are left, for every family and method."""

import json
import warnings

import pytest
import timm
import torch

from gtp_vit import GTP, EViT, GTPPlus, Identity, ToMe, load_pretrained, patch
from gtp_vit.backbones import small_models
from gtp_vit.backbones.lvvit import LVViT
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.core.loop import all_features, run
from gtp_vit.core.reducer import Reducer
from gtp_vit.core.restoring import assign_dropped_patches, begin_restoring, record_losses, restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import UnsupportedModelError
from gtp_vit.patching import tower_of
from gtp_vit.report.patch_features import segments
from gtp_vit.testing import families
from support.engines import needs_onnxruntime

PLUS = GTPPlus(remove=(20, 0, 9, 4))
every_family = pytest.mark.parametrize("family", families.NAMES)


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, -1, 1)


def test_the_formula_by_hand():
    """Layer 1 merges patch 1 (value 4) into patch 0 (2), which becomes 3, and 9 after layer 3.

    Patch 0 had 2 - 3 = -1 of its own and patch 1 had 4 - 3 = 1, of which 2 / 5 is left.
    """
    reducer = Reducer(ViTInfo(4, 1, 1, 1, (1, 3), 0, False, True, False))
    reducer.drops_patches = False
    cell = torch.arange(3)[None]
    before = begin_restoring(Tokens(values(2, 4, 7), cell, 0, (1, 3), owner=cell))
    after = before.replace(x=values(3, 7), cell=torch.tensor([[0, 2]]), owner=torch.tensor([[0, 0, 1]]))
    found = record_losses(reducer, 1, before, after).replace(x=values(9, 8), num_layers_run=4)
    assert torch.equal(restore_patches(found), values(9 - 2 / 5, 9 + 2 / 5, 8))
    # The branch of attention is part of what a patch was before.
    shifted = record_losses(reducer, 1, before.replace(x=values(1, 3, 6)), after, values(1, 1, 1))
    assert torch.equal(shifted.restore_residual, found.restore_residual)


def test_a_dropped_patch_belongs_to_the_nearest_one():
    """In a grid of 2 x 3, patches 1, 2 and 5 are lost; 0, 3 and 4 stay, and a token in no cell."""
    tokens = Tokens(
        torch.zeros(1, 4, 1), torch.tensor([[0, 3, 4, 6]]), 0, (2, 3), owner=torch.tensor([[0, -1, -1, 1, 2, -1]])
    )
    assert assign_dropped_patches(tokens).tolist() == [[0, 0, 2, 1, 2, 2]]
    padded = tokens.replace(size=torch.tensor([[0.0, 1.0, 1.0, 1.0]]))  # the first is padding
    assert assign_dropped_patches(padded).tolist() == [[1, 2, 2, 1, 2, 2]]


def returned_tokens(model, images):
    """What a model returns for every token: a list of tensors."""
    if hasattr(model, "forward_features"):
        found = [model.forward_features(images)]
    elif hasattr(model, "config"):
        output = model(images, output_hidden_states=True)
        found = [*output.hidden_states, *([output.last_hidden_state] if "last_hidden_state" in output else [])]
    else:
        found = []
    if hasattr(model, "forward_intermediates") and not isinstance(model, LVViT):  # whose own class has none
        extra = model.forward_intermediates(images, [0, 2], intermediates_only=True)
        found += extra["image_intermediates"] if isinstance(extra, dict) else extra
    return found


@every_family
def test_nothing_removed_is_the_original_and_all_that_is_removed_comes_back_in_shape(family):
    model, images = families.make(family), families.images(family)
    torch.manual_seed(0)
    wanted = returned_tokens(model, images)
    for method in (Identity(), PLUS):
        torch.manual_seed(0)  # ViTMAE shuffles
        found = returned_tokens(patch(model, method, restore=True), images)
        assert [each.shape for each in found] == [each.shape for each in wanted]
        assert all(bool(each.isfinite().all()) for each in found)
        if method == Identity():
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_tests_above_see_tokens_of_every_library():
    """Of torchvision there are none."""
    for family in ("vit", "dinov3", "lvvit", "hf_vit", "open_clip"):
        if family in families.NAMES:
            assert returned_tokens(families.make(family), families.images(family))


@every_family
def test_patches_that_were_never_merged_keep_their_own_token(family):
    fast, images = patch(families.make(family), PLUS, restore=True), families.images(family)
    tower = tower_of(fast)
    with torch.no_grad():
        tokens = run(tower, images, restore=True)
    whole = restore_patches(tokens)[:, tokens.prefix :]
    alone = tokens.size == 1
    rows, places = alone.nonzero(as_tuple=True)
    torch.testing.assert_close(whole[rows, tokens.cell[alone]], tokens.image[rows, places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [ToMe(r=9), GTP(propagate=9), EViT(keep_rate=0.6, drop_loc=(1, 2)), PLUS])
def test_outputs_that_are_pooled_are_those_without_restore(method):
    for family in ("vit", "avg_with_class_token", "hf_dinov2_base", "open_clip"):
        if family in families.NAMES:
            model, images = families.make(family), families.images(family)
            one, other = (patch(model, method, restore=restore, quiet=True)(images) for restore in (False, True))
            if hasattr(one, "pooler_output"):
                one, other = one.pooler_output, other.pooler_output
            torch.testing.assert_close(one, other)


def test_models_that_pool_nothing_return_the_grid():
    model, images = families.make("all_tokens"), families.images("all_tokens")
    assert patch(model, PLUS, restore=True)(images).shape == model(images).shape


def test_native_and_torch_restore_alike():
    model, images = families.make("vit"), families.images("vit")
    with torch.no_grad():
        native, reference = (
            patch(model, PLUS, restore=True, kernels=k).forward_features(images) for k in ("auto", "torch")
        )
    torch.testing.assert_close(native, reference, rtol=1e-4, atol=1e-4)


def test_gradients_reach_patches_that_were_merged():
    images = families.images("vit").clone().requires_grad_()
    fast = patch(families.make("vit"), PLUS, restore=True)
    fast.forward_features(images)[:, 1:].square().mean(dim=2).sum().backward()
    patches = images.grad.abs().unfold(2, 8, 8).unfold(3, 8, 8).amax(dim=(1, 4, 5))
    assert bool((patches > 0).all())


def test_a_method_that_drops_patches_says_what_stands_in_for_them():
    model = families.make("vit")
    with pytest.warns(UserWarning, match="GTP drops patches.*nearest"):
        patch(model, GTP(propagate=8, graph="none"), restore=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model, EViT(keep_rate=0.6, drop_loc=(1, 2)), restore=True)  # fuses them


def test_feature_maps_of_timm():
    """features_only cuts off what is behind the last map."""
    model = timm.create_model(
        "vit_tiny_patch16_224", features_only=True, out_indices=(1, 2), **small_models.SMALL | {"num_classes": 0}
    ).eval()
    images = families.images("vit")
    with pytest.raises(UnsupportedModelError, match="restore=True"):
        patch(model)
    maps = model(images)
    for method in (Identity(), GTPPlus(remove=(20, 0, 9))):
        found = patch(model, method, restore=True)(images)
        assert [each.shape for each in found] == [each.shape for each in maps]
        if method == Identity():
            assert all(torch.equal(one, other) for one, other in zip(found, maps, strict=True))


@pytest.mark.skipif(not small_models.HAS_TRANSFORMERS, reason="transformers is not installed")
def test_restore_is_saved_with_the_model(tmp_path):
    model, images = families.make("hf_dinov2_base"), families.images("hf_dinov2_base")
    fast = patch(model, PLUS, restore=True)
    fast.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert again(images).last_hidden_state.shape == model(images).last_hidden_state.shape
    torch.testing.assert_close(again(images).last_hidden_state, fast(images).last_hidden_state)
    assert load_pretrained(tmp_path, restore=False)(images).last_hidden_state.shape[1] < again(images)[0].shape[1]


@pytest.mark.parametrize("family", ["vit", "torchvision", "hf_clip_vision", "open_clip_coca"])
def test_features_can_be_read_where_the_model_itself_returns_none(family):
    if family not in families.NAMES:
        pytest.skip("transformers is not installed")
    tower = tower_of(patch(families.make(family), PLUS, restore=True))
    vit = tower.reduction.vit
    assert all_features(tower, families.images(family)).shape == (3, vit.prefix + vit.image_tokens, vit.dim)


@pytest.mark.slow
def test_pictures_of_features(tmp_path, capsys):
    """The embedded model's own images, with nothing removed and with much."""
    found = {}
    for name, words in (("all", ["--method", "identity"]), ("few", ["--method", "tome", "--r", "7"])):
        words = ["visualise", *words, "--features", "--json", "--output", str(tmp_path / name)]
        assert main(words) == ExitCode.OK
        found[name] = list(json.loads(capsys.readouterr().out)["pictures"].values())
        assert len(list((tmp_path / name).glob("*-features.png"))) == 3
    assert all(each == {"patch_error": 0.0, "same_segment_percent": 100.0} for each in found["all"])
    assert all(each["patch_error"] > 0 for each in found["few"])


def test_segments_by_hand():
    """Two groups of directions; one restored feature has gone over to the other group."""
    east, north = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    base = torch.cat([east, 2 * east, north, 3 * north])
    assert len(set(segments(base, base, count=2).tolist())) == 2
    moved = torch.cat([east, north, north, north])
    assert (segments(base, base, count=2) == segments(base, moved, count=2)).tolist() == [True, False, True, True]


class WithDecoder(torch.nn.Module):
    """A map of features and a head that reads it, as in segmentation, depth or saliency."""

    def __init__(self, vit):
        super().__init__()
        self.vit = vit
        self.decoder = torch.nn.ConvTranspose2d(24, 1, 4, 2, 1)

    def forward(self, images):
        (features,) = self.vit.forward_intermediates(images, [3], norm=True, intermediates_only=True)
        return self.decoder(features).sigmoid()


@pytest.mark.slow
@needs_onnxruntime
def test_a_restored_model_with_its_decoder_runs_in_an_engine(tmp_path):
    import onnxruntime

    torch.manual_seed(0)
    fast = WithDecoder(patch(families.make("vit"), PLUS, restore=True)).eval()
    images = families.images("vit")
    with torch.no_grad():
        wanted = fast(images)
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.onnx.export(
            fast, (images[:2],), dynamo=True, dynamic_shapes={"images": {0: batch}}, verbose=False
        )
    program.save(tmp_path / "dense.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "dense.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-4)
