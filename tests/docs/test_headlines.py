"""What the README claims of GTP+, measured anew on real models and images where they are at hand."""

import pytest

from gtp_vit import GTPPlus, create_model, macs, patch
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.profiling.budget import method_at_macs

IMAGES = 64  # of 2,000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_gtp_plus_does_less_than_half_of_tomes_damage_at_65_percent_of_the_macs(data, name):
    (weights,) = (data / "assets/weights").glob(f"{name}.*.safetensors")
    model = create_model(name, checkpoint=weights)
    images = open_images(model, DataSettings(data_dir=data / "assets/imagenet/val", limit=IMAGES, ignore_exif=True))
    budget = 0.65 * macs(model).total
    reduced = {
        "tome": patch(model, method_at_macs(model, "tome", budget)),
        "gtp_plus": patch(model, method_at_macs(model, "gtp_plus", budget)),
        "recipe": patch(model),  # the one in the package
    }
    assert isinstance(reduced["recipe"].reducer.method, GTPPlus)
    for fast in reduced.values():
        assert macs(fast).total == pytest.approx(budget, rel=0.01)
    found = evaluate({UNREDUCED: model, **reduced}, images, batch_size=32, workers=0)
    kl = {score.name: score["kl"].value for score in found.scores}
    assert found.scores[0].images == IMAGES
    assert max(kl["gtp_plus"], kl["recipe"]) < 0.5 * kl["tome"], kl
