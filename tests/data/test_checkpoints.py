"""Weights from a file: of another size, of another type, and what is no weight at all."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

from gtp_vit import GTPError, ToMe, create_model, patch
from gtp_vit.errors import SettingError
from gtp_vit.models import bundled


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
    with pytest.raises(SettingError, match="remove resample_positions"):
        create_model("fashion_vit", checkpoint=own_file, img_size=32, resample_positions=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weight: (100 * weight).to(torch.int8), "torch.int8, and the model has torch.float32"),
        (lambda weight: torch.complex(weight, weight), "torch.complex64, and the model has torch.float32"),
        (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "torch.qint8, and the model has"),
        (lambda weight: weight.to("meta"), "on the meta device, where it has no numbers"),
        (lambda weight: weight.to_sparse(), "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's own, on making some of these
def test_tensors_that_are_no_weights_are_refused(tmp_path, change, problem):
    """Copied into float32 the codes of 8-bit weights were taken for the weights, and figures came with exit code 0."""
    weights = bundled.create().state_dict()
    torch.save({**weights, "head.weight": change(weights["head.weight"])}, tmp_path / "w.pt")
    with pytest.raises(GTPError, match="w.pt does not fit fashion_vit: head.weight is " + problem):
        create_model("fashion_vit", checkpoint=tmp_path / "w.pt")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_other_floating_point_are_converted(tmp_path, dtype):
    weights = {name: weight.to(dtype) for name, weight in bundled.create().state_dict().items()}
    torch.save(weights, tmp_path / "w.pt")
    found = create_model("fashion_vit", checkpoint=tmp_path / "w.pt").state_dict()
    assert all(torch.equal(found[name], weight.float()) for name, weight in weights.items())
