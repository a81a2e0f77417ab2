"""PaliGemma, Gemma 3 and models of open_clip around a reduced ViT: what is done with them besides a forward pass."""

import copy
import pickle

import pytest
import torch

from gtp_vit import GTPPlus, Identity, patch, unpatch
from support.open_clips import open_clip_models

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers needs Python 3.11")
pytest.importorskip("open_clip")
from support.vlms import gemma3, paligemma  # noqa: E402  needs transformers

REDUCING = GTPPlus(remove=5)
MODELS = {
    "paligemma": (paligemma, False),
    "paligemma, restored": (paligemma, True),
    "gemma3, restored": (gemma3, True),
} | {
    f"open_clip {number}": (lambda number=number: list(open_clip_models())[number][0], False) for number in (0, 1, 2, 4)
}


def features(model, images):
    if hasattr(model, "encode_image"):
        return model.encode_image(images)
    return model.get_image_features(pixel_values=images).pooler_output


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=MODELS)
def subject(request):
    """A model, how it is patched, and images."""
    make, restore = MODELS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    return model, lambda model, method: patch(model, method, restore=restore), images


def test_an_image_alone_in_a_batch_or_in_another_layout_has_the_same_features(subject):
    model, patched, images = subject
    fast = patched(model, REDUCING)
    with torch.no_grad():
        expected = features(fast, images)
        plain = features(patched(model, Identity()), images)
        assert expected.shape != plain.shape or not torch.allclose(expected, plain, atol=1e-3)
        close(torch.cat([features(fast, image[None]) for image in images]), expected)
        close(features(fast, images.to(memory_format=torch.channels_last)), expected)
        close(features(fast, images.repeat_interleave(2, dim=3)[..., ::2]), expected)
        assert torch.equal(features(fast, images), expected)


def test_copies_and_pickles_do_the_same_and_the_model_comes_back(subject):
    model, patched, images = subject
    fast = patched(model, REDUCING)
    assert list(fast.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        expected = features(fast, images)
        assert torch.equal(features(copy.deepcopy(fast), images), expected)
        assert torch.equal(features(pickle.loads(pickle.dumps(fast)), images), expected)
        assert torch.equal(features(unpatch(fast), images), features(model, images))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradients_are_the_models_own_and_survive_checkpointing(subject):
    model, patched, images = subject

    def gradients(each):
        model.zero_grad()
        features(each, images).square().sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    expected, found = gradients(model), gradients(patched(model, Identity()))
    assert expected
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient, 1e-4 * max(1, float(gradient.abs().max())))
    model.train()
    fast = patched(model, REDUCING).train()
    whole = gradients(fast)
    if hasattr(fast, "gradient_checkpointing_enable"):
        fast.gradient_checkpointing_enable()
    else:
        fast.set_grad_checkpointing(True)
    again = gradients(fast)
    assert whole.keys() == again.keys() == expected.keys()
    for name, gradient in whole.items():
        close(again[name], gradient, 1e-5 * max(1, float(gradient.abs().max())))


def test_half_precision_and_autocast_are_the_models_own(subject):
    model, patched, images = subject
    same, fast = patched(model, Identity()), patched(model, REDUCING)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(features(same, images), features(model, images), 2e-2)
            assert features(fast, images).dtype == features(model, images).dtype
        model.bfloat16()
        found = features(patched(model, REDUCING), images.bfloat16())
        assert found.dtype == torch.bfloat16
        assert bool(found.isfinite().all())
        close(features(patched(model, Identity()), images.bfloat16()), features(model, images.bfloat16()), 2e-2)
