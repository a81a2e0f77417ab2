"""Adding a method is one file and one line: commands, budgets, search, finetuning, documents and tests take it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gtp_vit import METHODS, GTPError, Target, TrainingConfig, create_model, finetune, macs, patch, read_recipe, tune
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.models import bundled
from gtp_vit.profiling.budget import method_at_macs
from gtp_vit.testing import cases, check, families
from support.toy_method import Toy


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(METHODS, Toy.name, Toy)  # the one line


def images(count):
    pixels, labels = bundled.sample_images()
    return bundled.normalise(pixels[:count]), labels[:count]


@pytest.mark.parametrize("case", cases([Toy(dropped=5)], {name: families.factory_of(name) for name in ("vit", "gap")}))
def test_it_is_held_to_the_promises_of_all_methods(case):
    check(case)


def test_its_settings_are_flags(capsys):
    assert main(["macs", "fashion_vit", "--method", "toy", "--dropped", "9", "--json"]) == ExitCode.OK
    counted = macs(create_model("fashion_vit"), Toy(dropped=9), shorten_last_block=True)
    assert json.loads(capsys.readouterr().out)["toy"] == counted.total
    assert main(["macs", "fashion_vit", "--method", "toy", "--droped", "9"]) == ExitCode.USAGE
    assert "--dropped" in capsys.readouterr().err


@pytest.mark.slow
def test_it_can_be_compared_at_a_budget(tmp_path, capsys):
    model = create_model("fashion_vit")
    target = 0.6 * macs(model).total
    assert macs(model, method_at_macs(model, "toy", target), shorten_last_block=True).total == pytest.approx(
        target, rel=0.01
    )
    words = ["compare", "--macs", "0.6", "--methods", "toy", "gtp", "--limit", "24", "--rounds", "0"]
    assert main([*words, "--output", str(tmp_path), "--json"]) == ExitCode.OK
    assert "toy" in capsys.readouterr().out
    assert "toy" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_it_can_be_tuned(tmp_path, capsys):
    path = tmp_path / "recipe.json"
    words = ["tune", "--method", "toy", "--macs", "0.7", "--images", "40", "--search-passes", "6"]
    assert main([*words, "--output", str(path)]) == ExitCode.OK
    assert "toy" in capsys.readouterr().out
    model = create_model("fashion_vit")
    found = read_recipe(path)
    assert patch(model, found).reduction.method == found.method
    assert len(found.method.dropped) == 12
    with pytest.raises(
        ValueError, match=f"these have: {', '.join(name for name, each in METHODS.items() if each.schedule_field)}"
    ):
        tune(model, images(40)[0], Target("macs", 0.7), method="evit")


def test_it_can_be_finetuned_and_what_it_has_learned_is_kept(tmp_path):
    model = create_model("fashion_vit")
    settings = TrainingConfig(
        epochs=2, batch_size=8, micro_batch=8, repeats=1, lr=1e-3, smoothing=0.0, ramp_start=1, mixup=0, cutmix=0
    )
    found = finetune(model, Toy(dropped=8), InMemoryDataset(*images(8)), settings, output=tmp_path, workers=0)
    learned = load_file(tmp_path / "channels.safetensors")
    assert torch.equal(learned["channels.weight"], found.model.reducer.channels["weight"])
    assert not torch.equal(learned["channels.weight"], torch.ones(64))
    plain = create_model("fashion_vit", checkpoint=tmp_path / "weights.safetensors")
    again = patch(plain, tmp_path / "weights.safetensors")
    assert again.reduction.method == Toy(dropped=8, channels=str(tmp_path / "channels.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(images(8)[0]), found.model(images(8)[0]))


def test_what_it_has_learned_is_not_lost_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "weight_file_fields", ())
    settings = TrainingConfig(epochs=1, batch_size=8, micro_batch=8, repeats=1)
    with pytest.raises(GTPError, match=r"toy has learned channels\.weight, and none of its settings names a file"):
        finetune(create_model("fashion_vit"), Toy(), InMemoryDataset(*images(8)), settings, output=tmp_path, workers=0)


def test_it_is_in_the_documents(capsys):
    path = Path(__file__).parents[2] / "docs/make_methods.py"
    spec = importlib.util.spec_from_file_location("make_methods", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "| `Toy` | nothing | not needed | yes | yes | a weight for each channel |" in module.properties()
    assert main(["methods"]) == ExitCode.OK
    assert "toy" in capsys.readouterr().out
