"""LV-ViT: the official names and shapes, files in every container, and what is refused."""

import json
from argparse import Namespace

import pytest
import timm
import torch
from safetensors.torch import save_file

from gtp_vit import GTP, GTPError, UnsupportedModelError, create_model, patch
from gtp_vit.backbones import small_models
from gtp_vit.backbones.lvvit import SIZES, LVViT
from gtp_vit.testing import families


@pytest.mark.parametrize("name", ["lvvit_s", "lvvit_m"])
def test_names_and_shapes_of_the_official_models(data, name):
    stored = json.loads((data / "golden" / "lvvit_keys.json").read_text())["models"][name]
    model = create_model(name, meta=True)
    found = {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in model.state_dict().items()}
    assert found == stored["state_dict"]
    assert sum(p.numel() for p in model.parameters()) == stored["parameters"]


@pytest.mark.parametrize(
    ("name", "millions"), [("lvvit_t", 8.5), ("lvvit_s", 26.15), ("lvvit_m", 55.83), ("lvvit_l", 150)]
)
def test_published_parameter_counts(name, millions):
    count = sum(p.numel() for p in create_model(name, meta=True).parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.02 if name in ("lvvit_t", "lvvit_l") else 3e-4)


def test_preprocessing_is_the_published_one():
    for name, crop in (("lvvit_s", 0.9), ("lvvit_m", 1.0)):
        config = timm.data.resolve_model_data_config(create_model(name, meta=True))
        assert config["crop_pct"] == crop
        assert config["input_size"] == (3, 224, 224)
        assert config["mean"] == (0.485, 0.456, 0.406)
        assert config["std"] == (0.229, 0.224, 0.225)
        assert config["interpolation"] == "bicubic"


def small() -> LVViT:
    return families.make("lvvit")


CONTAINERS = {
    "flat.pth": lambda weights: weights,
    "state_dict.pth.tar": lambda weights: {"state_dict": weights, "epoch": 3},
    "ema.pth": lambda weights: {"state_dict": {}, "state_dict_ema": weights},
    "model.pth": lambda weights: {"model": weights},
    "empty_ema.pth": lambda weights: {"state_dict": weights, "state_dict_ema": {}},
    "module.pth": lambda weights: {"state_dict": {f"module.{key}": value for key, value in weights.items()}},
}


@pytest.fixture
def tiny_lvvit(monkeypatch):
    """A small LV-ViT under a name of its own."""
    monkeypatch.setitem(SIZES, "lvvit_tiny", {**small_models.SMALL, "stem_width": 8})
    return "lvvit_tiny"


@pytest.mark.parametrize("file", [*CONTAINERS, "weights.safetensors"])
def test_weights_load_from_every_container(tmp_path, tiny_lvvit, file):
    model, images = small(), families.images("lvvit")
    if file.endswith(".safetensors"):
        save_file(model.state_dict(), tmp_path / file)
    else:
        torch.save(CONTAINERS[file](model.state_dict()), tmp_path / file)
    again = create_model(tiny_lvvit, checkpoint=tmp_path / file)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


def test_files_that_do_not_fit_are_refused(tmp_path, tiny_lvvit):
    weights = small().state_dict()
    path = tmp_path / "weights.pth"

    def refused(stored, match):
        torch.save(stored, path)
        with pytest.raises(GTPError, match=match):
            create_model(tiny_lvvit, checkpoint=path)

    refused({key: weights[key] for key in list(weights)[2:]}, r"2 keys are missing \(cls_token, pos_embed\), 0 are not")
    refused({**weights, "extra": torch.zeros(1)}, r"1 are not known \(extra\)")
    refused({**weights, "head.bias": torch.zeros(7)}, r"head.bias is \(7,\) and should be \(10,\)")
    refused([1, 2], "has no weights")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(GTPError, match="is not a torch file"):
        create_model(tiny_lvvit, checkpoint=path)
    torch.save({"state_dict": weights, "args": Namespace(lr=1)}, path)
    with pytest.raises(GTPError, match="contains pickled Python objects"):
        create_model(tiny_lvvit, checkpoint=path)
    torch.save(weights, path)
    with pytest.raises(GTPError, match="create the model with the img_size it was trained with"):
        create_model(tiny_lvvit, checkpoint=path, img_size=32)
    with pytest.raises(GTPError, match="has no weights"):
        create_model(tiny_lvvit, checkpoint=path, meta=True)
    with pytest.raises(GTPError, match="there is no file"):
        create_model(tiny_lvvit, checkpoint=tmp_path / "nothing.pth")
    with pytest.raises(GTPError, match="the nearest are lvvit_s"):
        create_model("lvvit_ss")
    with pytest.raises(GTPError, match="not in timm"):
        create_model("lvvit_s", pretrained=True)


def test_checkpoints_of_timm_models_load_too(tmp_path):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    create_model("test_vit", checkpoint=tmp_path / "vit.safetensors")
    with pytest.raises(GTPError, match="does not fit deit_tiny_patch16_224"):
        create_model("deit_tiny_patch16_224", checkpoint=tmp_path / "vit.safetensors")


def test_the_second_head_reads_the_tokens_that_remain():
    fast, images = patch(small(), GTP(propagate=5)), families.images("lvvit")
    with torch.no_grad():
        features = fast.forward_features(images)
        assert features.shape[1] == 1 + 64 - 20
        expected = fast.head(features[:, 0]) + 0.5 * fast.aux_head(features[:, 1:]).amax(dim=1)
        torch.testing.assert_close(fast(images), expected)


def test_changed_networks_are_refused():
    model = small()
    model.blocks[1].attn.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"blocks\[1\].attn has hooks"):
        patch(model, GTP())
    model = small()
    model.blocks[2].mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"blocks\[2\].mlp is Identity; supported: Mlp"):
        patch(model, GTP())

    class Other(LVViT):
        pass

    with pytest.raises(UnsupportedModelError, match="subclass"):
        patch(Other(**small_models.SMALL), GTP())
