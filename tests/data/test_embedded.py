"""The model inside the package: it classifies, its card is true, and the methods are in the order we claim."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from gtp_vit import Identity, create_model, macs, patch
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.models import bundled
from gtp_vit.tuning.compare import compare, models_of, plan_comparison

ROOT = Path(__file__).parents[2]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CARD = (bundled.FOLDER / "MODEL_CARD.md").read_text()


def card(pattern):
    return float(re.search(pattern, CARD)[1])


def accuracy(model, images, labels):
    with torch.inference_mode():
        parts = [model(bundled.normalise(part)).argmax(1) for part in images.split(200)]
    return 100 * float((torch.cat(parts) == labels).float().mean())


def test_it_is_small_and_of_the_promised_shape():
    model = create_model("fashion_vit")
    assert model.patch_embed.grid_size == (14, 14)
    assert len(model.blocks) == 12
    assert model.num_prefix_tokens == 1
    assert sum(path.stat().st_size for path in bundled.FOLDER.glob("*.safetensors")) < 3e6


@pytest.mark.time_limit(5)
def test_it_classifies_the_images_in_the_package():
    images, labels = bundled.sample_images()
    assert len(images) == len(labels) >= 300
    assert set(labels.tolist()) == set(range(10))
    found = accuracy(create_model("fashion_vit"), images, labels)
    assert found == pytest.approx(card(r"on the \d+ images in the package: ([\d.]+) %"), abs=0.3)
    assert found > 88


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="no Fashion-MNIST here: install Debian's package dataset-fashion-mnist")
def test_the_card_is_true_of_the_whole_test_set():
    sys.path.insert(0, str(ROOT / "training"))
    try:
        import embedded as trainer
    finally:
        sys.path.pop(0)
    images, labels = trainer.read(DEBIAN, "test")
    shipped, _ = bundled.sample_images()
    assert torch.equal(images[: len(shipped)], shipped)
    faster = patch(create_model("fashion_vit"), Identity())  # the same logits, the last block for the class token only
    found = accuracy(faster, images, labels)
    assert found >= 90
    assert found == pytest.approx(card(r"on all 10,000 test images: ([\d.]+) %"), abs=0.05)


@pytest.mark.slow
def test_less_damage_than_tome_and_tome_less_than_gtp_at_equal_cost():
    model = create_model("fashion_vit")
    images, labels = bundled.sample_images()
    budget = 0.55 * macs(model).total
    plans, _ = plan_comparison(model, ("gtp", "tome", "gtp_plus"), [budget])
    for each in plans[1:]:
        assert each.macs == pytest.approx(budget, rel=0.01)
    _, found = compare(models_of(model, plans), plans, InMemoryDataset(bundled.normalise(images), labels))
    kl = {score.name.split(" @")[0]: score["kl"].value for score in found.scores}
    assert kl["gtp_plus"] <= kl["tome"] < kl["gtp"]


@pytest.mark.slow
def test_commands_without_a_model_use_it(tmp_path, capsys):
    assert main(["evaluate", "--limit", "20", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["rows"][0]["model"] == "fashion_vit"
    assert main(["visualise", "--remove", "14", "--output", str(tmp_path), "--json"]) == ExitCode.OK
    drawn = json.loads(capsys.readouterr().out)
    assert len(drawn["pictures"]) == len(list(tmp_path.glob("*.png"))) > 0
    assert main(["tune", "--macs", "0.7", "--images", "40", "--search-passes", "8", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)[0]["model"] == "fashion_vit"
    # as timm's scripts spell it
    assert main(["evaluate", "--model", "fashion_vit", "--limit", "20", "--json"]) == ExitCode.OK
    capsys.readouterr()
