"""Models quantised by torchao, before they are patched or after; torch.compile takes both."""

from __future__ import annotations

import warnings

import pytest
import torch

from gtp_vit import ATS, EvoViT, GTPPlus, Identity, ToMe, macs, patch
from gtp_vit.methods.gtp_plus.calibration import Calibration, weight_fingerprint
from gtp_vit.patching import host_of
from gtp_vit.testing import families

CONFIGS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig", "int4")
# Queries, keys and values from one layer, with a bias and without, from three layers, or from a parameter.
FAMILIES = ("vit", "eva02", "dinov3", "hf_vit", "open_clip", "torchvision")


@pytest.fixture(scope="module", autouse=True)
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of torch's newest version
        return pytest.importorskip("torchao.quantization")


def quantised(model, config, torchao):
    """The same model, its weights quantised in place."""
    if config == "int4":
        groups = torchao.PerGroup(8)
        made = torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=groups)
    else:
        made = getattr(torchao, config)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(model, made)
    return model


@pytest.mark.time_limit(6)  # the first one imports torchao, whose sources may not be compiled yet
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_before_patching_or_after_is_the_same(family, config, torchao):
    images = families.images(family)
    model = quantised(families.make(family), config, torchao)
    before = patch(model, GTPPlus(remove=9))
    after = quantised(patch(families.make(family), GTPPlus(remove=9)), config, torchao)
    with torch.inference_mode():
        reduced, unreduced = families.output(before, images), families.output(model, images)
        assert torch.equal(families.output(after, images), reduced)
        assert not torch.equal(reduced, unreduced)
        torch.testing.assert_close(families.output(patch(model, Identity()), images), unreduced, atol=0.02, rtol=0)
    with torch.no_grad():
        assert torch.equal(families.output(before, images), reduced)


@pytest.mark.parametrize("method", [ToMe(r=9), ATS(), EvoViT()], ids=lambda method: method.name)
def test_methods_that_read_parts_of_the_projection(method, torchao):
    images = families.images("vit")
    before = patch(quantised(families.make("vit"), CONFIGS[0], torchao), method)
    after = quantised(patch(families.make("vit"), method), CONFIGS[0], torchao)
    with torch.inference_mode():
        assert torch.equal(before(images), after(images))


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_a_calibration_knows_its_weights_in_8_bits(config, torchao):
    model, images = families.make("vit"), families.images("vit")
    vit, weights = host_of(model).vit, weight_fingerprint(host_of(model).block_weights)
    probe = torch.randn(vit.depth, vit.dim, generator=torch.Generator().manual_seed(0))
    method = GTPPlus(remove=9, calibration=Calibration(probe, vit.grid, (0,), weights).to_text())
    counted = macs(patch(model, method))
    quantised(model, config, torchao)
    moved = weight_fingerprint(host_of(model).block_weights) - weights
    assert 0 < moved.abs().max() < 0.1
    fast = patch(model, method)  # is not refused
    with torch.inference_mode():
        assert fast(images).isfinite().all()
    assert macs(fast) == counted


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS[:2])
@pytest.mark.parametrize("first", ["quantised", "patched"])
def test_torch_compile_takes_both_orders(first, config, torchao):
    model, images, method = families.make("vit"), families.images("vit"), GTPPlus(remove=9)
    if first == "quantised":
        fast = patch(quantised(model, config, torchao), method)
    else:
        fast = quantised(patch(model, method), config, torchao)
    with torch.inference_mode():
        eager = fast(images)
        compiled = torch.compile(fast, fullgraph=True)(images)
    # Compiled code rounds activations a little differently, which are then rounded to 8 bits.
    torch.testing.assert_close(compiled, eager, atol=0.05 if "Dynamic" in config else 1e-4, rtol=0)
