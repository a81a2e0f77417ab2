"""Our GTP reproduces the outputs of the original implementation: kept tokens, sizes, logits, graph."""

import pytest
import timm
import torch
from timm.layers import LayerNorm

from gtp_vit import Identity, patch, trace
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.methods.gtp.graph import adjacency, normalise_matrix
from support import goldens
from support.goldens import gtp_of

ENTRIES = [f"gtp_{number:02d}" for number in range(22)]
LVVIT = ["gtp_lvvit_0", "gtp_lvvit_1", "gtp_lvvit_2"]
NO_CLASS_TOKEN = ["gtp_nocls_0", "gtp_nocls_1"]
OWN_MODELS = ["gtp_nocls_layerscale_0", "gtp_clsavg_0"]


@pytest.fixture(scope="module")
def golden(data):
    return goldens.read(data / "golden", "base", "gtp")


@pytest.fixture(scope="module")
def shipped():
    """The few that have a small model of their own, so that they are beside the tests."""
    return goldens.read(goldens.SHIPPED, "gtp")


@pytest.fixture(scope="module")
def deit_tiny(data):
    return goldens.deit_tiny(data)


@pytest.fixture(scope="module")
def images(data):
    return goldens.inputs(data)


@pytest.fixture
def part(request):
    return goldens.part_of(request.param)


def compare(entry, model, images, kernels):
    fast = patch(model, gtp_of(entry["settings"]), kernels=kernels)
    compared, tensors = entry["comparison"]["compare_images"], entry["data"]
    found = trace(fast, images)
    assert len(compared) > 0
    for number, layer in enumerate(found.layers):
        assert torch.equal(layer.kept[compared], tensors[f"kept_{number:02d}"][compared].long())
        if f"size_{number:02d}" in tensors:
            size, expected = layer.sizes[compared], tensors[f"size_{number:02d}"][compared]
            torch.testing.assert_close(size, expected, rtol=0, atol=entry["comparison"]["sizes_atol"])
    ordinary: list[Tokens] = []  # the trace takes the general path; this is what a forward pass does
    with torch.no_grad():
        run(fast, images, observe=ordinary.append)
    for number, tokens in enumerate(ordinary[1:]):
        assert torch.equal(tokens.cell[compared], tensors[f"kept_{number:02d}"][compared].long())
        if f"size_{number:02d}" in tensors:
            size, expected = tokens.size[compared], tensors[f"size_{number:02d}"][compared]
            torch.testing.assert_close(size, expected, rtol=0, atol=entry["comparison"]["sizes_atol"])
    for lossless in (True, False):
        with torch.no_grad():
            logits = patch(model, gtp_of(entry["settings"]), shorten_last_block=lossless, kernels=kernels)(images)
        difference = (logits - tensors["logits"])[compared].abs().max()
        assert difference <= entry["comparison"]["logits_atol"]
    if "graph_normalised" in tensors:
        tokens = fast.reducer.start(fast.reduction.backbone.embed(fast, images[:1]))
        graph = normalise_matrix(adjacency(tokens.method_state.lists.neighbours))[0]
        torch.testing.assert_close(graph, tensors["graph_normalised"], rtol=0, atol=1e-6)
    if "fraction_of_removed_tokens_without_receiver_per_block" in entry and entry["settings"]["alpha"] > 0:
        if entry["settings"]["propagation"] == "GraphProp" and len(compared) == len(images):
            lost = [layer.lost.mean().item() for layer in found.layers]
            expected = entry["fraction_of_removed_tokens_without_receiver_per_block"]
            assert lost == pytest.approx(expected, abs=1e-5)


def test_unreduced_model_equals_the_golden(golden, deit_tiny, images):
    tensors = golden["base_00"]["data"]
    fast = patch(deit_tiny, Identity())
    seen = []
    with torch.no_grad():
        torch.testing.assert_close(fast(images), tensors["logits"], rtol=0, atol=2e-4)
        run(fast, images, observe=seen.append)
    torch.testing.assert_close(seen[0].x[0], tensors["embed"], rtol=0, atol=1e-5)
    classes = torch.stack([tokens.x[:, 0] for tokens in seen[1:]], dim=1)
    torch.testing.assert_close(classes, tensors["cls_after_block"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ENTRIES)
@goldens.PARTS
def test_gtp_on_real_weights_equals_the_golden(golden, deit_tiny, images, part, name, kernels):
    entry, images = part(golden[name], images)
    compare(entry, deit_tiny, images, kernels)


@pytest.mark.parametrize("name", NO_CLASS_TOKEN)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_gtp_without_class_token_equals_the_golden(shipped, name, kernels):
    compare_on_its_own_model(shipped, name, kernels)


@pytest.mark.parametrize("name", OWN_MODELS)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_gtp_with_layerscale_or_averaged_tokens_equals_the_golden(golden, name, kernels):
    compare_on_its_own_model(golden, name, kernels)


def compare_on_its_own_model(golden, name, kernels):
    entry = golden[name]
    own = entry["own_model"]
    arguments = {key: own[key] for key in own if key not in ("note", "weights_in", "inputs_in", "key_names")}
    model = timm.models.VisionTransformer(**arguments).eval()
    source = golden[own["weights_in"].split("/")[0]]["data"]
    model.load_state_dict({key[2:]: value for key, value in source.items() if key.startswith("w.")})
    if "layerscale" in name:  # the original's ViT-Medium factories leave the blocks' LayerNorms at eps 1e-5
        for module in model.blocks.modules():
            if isinstance(module, LayerNorm):
                module.eps = 1e-5
    inputs = source["inputs"]
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), entry["data"]["logits_unreduced"], rtol=0, atol=2e-5)
    compare(entry, model, inputs, kernels)


@pytest.mark.parametrize("name", LVVIT)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_gtp_on_lvvit_equals_the_golden(shipped, name, kernels):
    from gtp_vit.backbones.lvvit import LVViT

    entry = shipped[name]
    own = entry["own_model"]
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "skip_lam", "num_classes")
    model = LVViT(**{key: own[key] for key in sizes}).eval()
    source = shipped["gtp_lvvit_0"]["data"]
    model.load_state_dict({key[2:]: value for key, value in source.items() if key.startswith("w.")}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(source["inputs"]), entry["data"]["logits_unreduced"], rtol=0, atol=2e-5)
    as_it_acts = {**entry, "settings": {**entry["settings"], "sparsity": 1}}  # the official LV-ViT ignores it
    compare(as_it_acts, model, source["inputs"], kernels)


def test_every_golden_of_gtp_is_compared(golden, shipped):
    assert set(golden) == {*ENTRIES, *NO_CLASS_TOKEN, *OWN_MODELS, *LVVIT, "base_00"}
    assert set(shipped) == {*NO_CLASS_TOKEN, *LVVIT}
