"""Adding a family of models is one file and one line: methods, commands, errors, documents and the test kit take it."""

import runpy
from pathlib import Path

import pytest
import torch

from gtp_vit import (
    METHODS,
    GTPError,
    SearchConfig,
    Target,
    TrainingConfig,
    UnsupportedModelError,
    create_model,
    embed,
    finetune,
    macs,
    patch,
    trace,
    tune,
)
from gtp_vit.backbones import BACKBONES
from gtp_vit.backbones.host import remove_classifier
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.testing import cases, check, families
from support.toy_family import ToyBackbone

pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(BACKBONES, "toy", ToyBackbone())  # the one line


@pytest.mark.parametrize("name", METHODS)
def test_it_is_held_to_the_promises_of_all_families(name):
    (case,) = cases([METHODS[name]()], {"toy": families.factories()["toy"]})
    check(case)


def test_it_is_named_where_all_families_are(capsys):
    with pytest.raises(UnsupportedModelError, match=r"supported are timm's VisionTransformer.*; the toys's ToyViT"):
        patch(torch.nn.Linear(2, 2))
    assert main(["models", "toy:*"]) == ExitCode.OK
    assert capsys.readouterr().out.split() == ["toy:small", "toy:deep"]
    make_models = runpy.run_path(str(Path(__file__).parents[2] / "docs/make_models.py"))
    assert "| the toys | `ToyViT` | the toys of the tests |" in make_models["families"]()


def test_it_is_made_by_name(capsys):
    assert macs(create_model("toy:deep", meta=True)).total > macs(create_model("toy:small")).total
    assert main(["macs", "toy:deep", "--method", "tome", "--r", "9", "--json"]) == ExitCode.OK
    with pytest.raises(GTPError, match="unknown model 'toy:smal'; the nearest are toy:small"):
        create_model("toy:smal")


def test_it_embeds_without_its_classifier():
    model = families.make("toy")
    remove_classifier(model)
    (part,) = embed(patch(model), families.images("toy"))
    assert part.embeddings.shape == (3, 24)


def test_it_has_costs_a_default_and_a_trace():
    model, images = families.make("toy"), families.images("toy")
    fast = patch(model)
    assert macs(fast).total < 0.7 * macs(model).total
    assert trace(fast, images).layers[-1].kept.shape[1] < 64


def test_it_can_be_tuned_and_finetuned(tmp_path):
    model = families.make("toy")
    images = torch.randn(24, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    recipe = tune(model, images, Target("macs", 0.7), search=SearchConfig(passes=3))
    settings = TrainingConfig(epochs=1, batch_size=8, micro_batch=8, repeats=1, drop_path=0)
    found = finetune(
        model, recipe, InMemoryDataset(images, torch.arange(24) % 10), settings, output=tmp_path, workers=0
    )
    assert found.model(images[:2]).shape == (2, 10)
