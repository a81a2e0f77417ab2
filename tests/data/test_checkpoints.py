"""Weights from a file for a model of another size."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

from gtp_vit import GTPError, ToMe, create_model, patch
from gtp_vit.errors import SettingError


def test_positions_of_a_checkpoint_are_resampled_on_request(tmp_path):
    file = tmp_path / "weights.safetensors"
    own = timm.create_model("test_vit", num_classes=4).eval()
    save_file({**own.state_dict(), "pos_embed": torch.randn_like(own.pos_embed)}, file)
    stored = load_file(file)
    wanted = timm.create_model("test_vit", num_classes=4, img_size=(96, 64)).eval()
    stored["pos_embed"] = resample_abs_pos_embed(stored["pos_embed"], (6, 4), num_prefix_tokens=1)
    wanted.load_state_dict(stored)
    flags = {"checkpoint": file, "num_classes": 4}
    found = create_model("test_vit", **flags, img_size=(96, 64), resample_positions=True)
    images = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        assert torch.equal(found(images), wanted(images))
        assert patch(found, ToMe(r=2))(images).shape == (2, 4)
    with pytest.raises(GTPError, match=r"resample: --resample-positions"):
        create_model("test_vit", **flags, img_size=(96, 64))
    for missing in ({"img_size": 96}, {"checkpoint": file}):
        with pytest.raises(SettingError, match="give checkpoint and img_size, too"):
            create_model("test_vit", resample_positions=True, **missing)
    own_file = tmp_path / "fashion.safetensors"
    save_file(create_model("fashion_vit").state_dict(), own_file)
    with pytest.raises(SettingError, match="leave out resample_positions"):
        create_model("fashion_vit", checkpoint=own_file, img_size=32, resample_positions=True)
