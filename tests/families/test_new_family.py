"""Adding a family of models is one file and two lines: every method, budgets, search and finetuning take it."""

import pytest
import torch

from gtp_vit import METHODS, Training, finetune, macs, patch, trace, tune
from gtp_vit.backbones import BACKBONES
from gtp_vit.data.dataset import InMemory
from gtp_vit.testing import cases, check, families
from support.toy_family import ToyBackbone, ToyViT

pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(BACKBONES, "toy", ToyBackbone())  # the two lines
    monkeypatch.setitem(families.FAMILIES, "toy", {"toy": ToyViT})


@pytest.mark.parametrize("name", METHODS)
def test_it_is_held_to_the_promises_of_all_families(name):
    (case,) = cases([METHODS[name]()], {"toy": ToyViT})  # here, where the backbone is registered
    check(case)


def test_it_has_costs_a_default_and_a_trace():
    model, images = families.make("toy"), families.images("toy")
    fast = patch(model)
    assert macs(fast).total < 0.7 * macs(model).total
    assert trace(fast, images).layers[-1].kept.shape[1] < 64


def test_it_can_be_tuned_and_finetuned(tmp_path):
    model = families.make("toy")
    images = torch.randn(24, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    recipe = tune(model, images, macs=0.7, evaluations=3)
    settings = Training(epochs=1, batch_size=8, micro_batch=8, repeats=1, drop_path=0)
    found = finetune(model, recipe, InMemory(images, torch.arange(24) % 10), settings, output=tmp_path, workers=0)
    assert found.model(images[:2]).shape == (2, 10)
