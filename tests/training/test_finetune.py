"""Finetuning: what each method's protocol does, what is written, resuming bit for bit, and input that is wrong."""

import contextlib
import copy
import csv
import dataclasses
import json
import os
import signal
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gtp_vit
from gtp_vit import (
    ATS,
    GTP,
    METHODS,
    DynamicViT,
    EViT,
    EvoViT,
    GTPError,
    ToMe,
    TrainingConfig,
    TriLevel,
    finetune,
    macs,
    patch,
)
from gtp_vit.backbones import small_models
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.core.attention import PLAIN
from gtp_vit.core.loop import run
from gtp_vit.core.reducer import Method, Reducer
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.items import Batch, Item
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.data.transforms import make_transform
from gtp_vit.metrics.classes import Classification
from gtp_vit.metrics.output_cache import OutputCache
from gtp_vit.models import bundled
from gtp_vit.runs import identity
from gtp_vit.testing import families
from gtp_vit.training import dynamicvit
from gtp_vit.training.checkpoint import lock_run_folder
from gtp_vit.training.data import Mixer, SeededAugmentation, epoch_order, micro_batches_of, open_training_images
from gtp_vit.training.log import Log, LogEntry
from gtp_vit.training.loop import FinetuneOutput, check_processes
from gtp_vit.training.protocols import Protocol, protocol_of
from gtp_vit.training.trainer import NonFiniteError, Trainer, set_method
from support.process import start_python

pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
FILES = {"log.csv", "log.jsonl", "state.pt", "weights.safetensors"}
QUICK = {"epochs": 2, "batch_size": 8, "micro_batch": 4, "repeats": 1, "lr": 1e-3}


@pytest.fixture(scope="module")
def model():
    return families.make("vit")


@pytest.fixture(scope="module")
def images():
    return InMemoryDataset(families.images("vit", 24), torch.arange(24) % 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Splits of 4 classes with pictures."""
    root = tmp_path_factory.mktemp("splits")
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label in range(4):
            for number in range(count):
                path = root / split / f"class{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def words(folder, tmp_path_factory):
    """The command on a small model with the right number of classes."""
    weights = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), weights)
    data = ["--data-dir", str(folder), "--workers", "0"]
    steps = ["--epochs", "1", "--batch-size", "8", "--micro-batch", "4", "--repeats", "1"]
    return ["finetune", "test_vit", "--num-classes", "4", "--checkpoint", str(weights), *data, *steps]


def go(model, images, output, method=None, *, restart=False, **settings):
    settings = TrainingConfig(**QUICK | settings)
    return finetune(
        model, method or GTP(propagate=8), images, settings, output=FinetuneOutput(output, restart=restart), workers=0
    )


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


@contextlib.contextmanager
def stopped_at(step):
    """A run that ends before this step."""
    train_step = Trainer.train_step

    def stop(self, now, *rest):
        if now == step:
            raise KeyboardInterrupt
        return train_step(self, now, *rest)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Trainer, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def same(one, other):
    """Bit for bit, all the way down."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def trainer_of(model, method, **settings):
    settings = TrainingConfig(**{**QUICK, "batch_size": 4, **settings})
    settings.check()
    found = Trainer(model, method, settings, 4)
    found.start_epoch(method)
    return found


def batch(family="vit", count=4):
    return Batch(torch.arange(count), families.images(family, count), torch.arange(count) % 10, {})


# what is learned


def test_the_defaults_are_the_papers():
    settings, protocol = TrainingConfig(), protocol_of(GTP(), TrainingConfig())
    assert (settings.epochs, protocol.lr, protocol.min_lr, protocol.weight_decay) == (30, 1e-5, 1e-6, 0.05)
    assert (settings.mixup, settings.cutmix, settings.smoothing, settings.reprob) == (0.8, 1.0, 0.1, 0.25)
    assert settings.auto_augment == "rand-m9-mstd0.5-inc1"
    assert protocol_of(GTP(), TrainingConfig(lr=3e-4)).lr == 3e-4


# Without parameters, with parameters of its own, and with an order of tokens that it learns.
LEARN_DIFFERENTLY = ("gtp_plus", "dynamicvit", "evovit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in LEARN_DIFFERENTLY else pytest.mark.slow) for name in METHODS]
)
def test_every_method_learns_from_the_unreduced_model_without_labels(model, images, tmp_path, name):
    unlabelled = InMemoryDataset(images.images, torch.full((24,), -1))
    method = METHODS[name]()
    lr = {"evit": 3e-4, "dynamicvit": 1e-4}.get(name, 1e-3)
    plain = {"mixup": 0, "cutmix": 0, "drop_path": 0.0, "epochs": 4, "warmup": 0.0}
    before = copy.deepcopy(model.state_dict())
    found = go(model, unlabelled, tmp_path, method, labels=False, lr=lr, **plain)
    losses = [entry.figures["loss"] for entry in found.log]
    if name != "identity":  # which is the teacher from the beginning
        assert losses[-1] < losses[0]
    assert same(before, dict(model.state_dict()))
    assert gtp_vit.is_patched(found.model)
    assert not found.model.training
    assert found.model.reduction.method == method


@pytest.mark.parametrize(
    "family", ["deit_distilled", "dinov2_registers", "gap", "siglip", "lvvit", "avg_with_class_token"]
)
@pytest.mark.parametrize("distill", [None, 0.0])
def test_every_parameter_has_a_part_in_the_loss(family, distill):  # torch's distribution relies on it
    model = families.make(family)
    for name in ("gtp", "dynamicvit", "evovit") if families.has_class_token(family) else ("gtp", "dynamicvit"):
        own = trainer_of(model, METHODS[name](), distill=distill)
        own.train_step(0, 1, [batch(family)])
        assert not [key for key, p in own.student.named_parameters() if p.requires_grad and p.grad is None]


def test_the_loss_is_cross_entropy_and_the_distance_from_the_teacher(model):
    own = trainer_of(model, ToMe(r=4), distill=0.3, mixup=0, cutmix=0, smoothing=0.0, drop_path=0.0)
    terms = own.compute_loss(batch())
    logits, teacher = patch(model, ToMe(r=4))(batch().images), model(batch().images)
    cross = torch.nn.functional.cross_entropy(logits, batch().labels)
    kl = (teacher.softmax(1) * (teacher.log_softmax(1) - logits.log_softmax(1))).sum(1).mean()
    torch.testing.assert_close(terms["cross_entropy"], cross)
    torch.testing.assert_close(terms["kl"], kl)
    torch.testing.assert_close(terms["loss"], cross + 0.3 * kl)


@pytest.mark.slow
def test_a_weight_of_0_for_the_teacher_means_0(model):
    plain = {"mixup": 0, "cutmix": 0, "smoothing": 0.0, "drop_path": 0.0}
    for distill, weight in ((0.0, 0.0), (0.25, 0.25), (None, 0.5)):  # None: as the authors of DynamicViT
        own = trainer_of(model, DynamicViT(keep_ratio=0.5), distill=distill, **plain)
        terms = own.compute_loss(batch())
        wanted = terms["cross_entropy"] + 2 * terms["ratio"] / 3
        if weight:
            wanted = wanted + weight * (terms["kl"] + terms["token"])
        torch.testing.assert_close(terms["loss"], wanted)
        assert ("kl" in terms) == own.protocol.needs_teacher(own.settings) == (weight > 0)
    for method in (GTP(propagate=8), EvoViT(keep_ratio=0.5)):
        assert "kl" not in trainer_of(model, method, distill=0.0, **plain).compute_loss(batch())
        assert "kl" not in trainer_of(model, method, **plain).compute_loss(batch())
        terms = trainer_of(model, method, labels=False, **plain).compute_loss(batch())
        torch.testing.assert_close(terms["loss"], terms["kl"])
    for method in (GTP(), DynamicViT()):
        with pytest.raises(GTPError, match="distill is 0 and labels are not used: nothing is left to learn from"):
            trainer_of(model, method, distill=0.0, labels=False)


def test_evit_is_finetuned_in_eval_mode(model):
    own = trainer_of(model, EViT(keep_rate=0.5))
    assert not own.model.training
    assert own.protocol.warmup == own.protocol.drop_path == 0
    assert trainer_of(model, GTP(propagate=8)).model.training


def test_dynamicvit_trains_its_predictors_alone_at_first(model):
    own = trainer_of(model, DynamicViT(keep_ratio=0.5), lr=1e-5, epochs=2)
    start = copy.deepcopy(own.model.state_dict())
    figures = own.train_step(1, 2, [batch()])  # in the first of two epochs; step 0 is the warm-up's first
    changed = {key for key, value in own.model.state_dict().items() if not torch.equal(value, start[key])}
    assert changed
    assert all(key.startswith("reducer.predictors") for key in changed)
    rates = {group["frozen"]: group["initial_lr"] for group in own.optimizer.param_groups}
    assert rates[False] == pytest.approx(100 * rates[True])
    assert {"loss", "cross_entropy", "ratio", "kl", "token"} < figures.keys()
    own.train_step(2, 2, [batch()])  # in the second epoch
    changed = {key for key, value in own.model.state_dict().items() if not torch.equal(value, start[key])}
    assert "blocks.0.attn.qkv.weight" in changed
    assert not {"cls_token", "pos_embed"} & changed


def test_dynamicvits_loss_is_the_one_that_equals_the_goldens(model):
    own = trainer_of(model, DynamicViT(keep_ratio=0.5), mixup=0, cutmix=0, smoothing=0.0)
    torch.manual_seed(3)
    found = own.compute_loss(batch())
    torch.manual_seed(3)
    student = dynamicvit.outputs(own.model, batch().images)
    labels = torch.nn.functional.one_hot(batch().labels, 10).float()
    wanted = dynamicvit.losses(student, dynamicvit.outputs(model, batch().images), labels, own.model.reducer)
    torch.testing.assert_close(found["loss"], wanted.total)


@pytest.mark.parametrize("head", ["class", "pooled"])
def test_evovit_has_two_heads_in_training_and_one_outside(model, head):
    method = EvoViT(keep_ratio=0.5, head=head)
    own = trainer_of(model, method, mixup=0, cutmix=0, smoothing=0.0, drop_path=0.0)
    loss = own.compute_loss(batch())["loss"]
    x = run(own.model, batch().images)
    logits = [model.head(model.norm(token)) for token in (x.x[:, 0], x.image.mean(dim=1))]
    wanted = sum(0.5 * torch.nn.functional.cross_entropy(each, batch().labels) for each in logits)
    torch.testing.assert_close(loss, wanted)
    assert own.eval_model().state_dict().keys() == model.state_dict().keys()
    protocol = protocol_of(method, TrainingConfig())
    assert protocol.method_at(method, 0.5).layer_wise
    assert not protocol.method_at(method, 0.7).layer_wise


def test_reduction_can_grow(model):
    vit = patch(model, GTP()).reduction.vit
    assert EViT(keep_rate=0.6).scaled(vit, 0.5).keep_rate == pytest.approx(0.8)
    assert TriLevel(keep_ratio=0.6, attn_ratio=0.2).scaled(vit, 0.5).attn_ratio == pytest.approx(0.6)
    assert GTP(propagate="linear:2:8").scaled(vit, 0.5).propagate == (1, 2, 3, 4)
    assert ToMe(r=8).scaled(vit, 0.25).r == 2
    assert ToMe(r=8).scaled(vit, 1.0) == ToMe(r=8)
    with pytest.raises(GTPError, match="ats has no strength that could grow"):
        ATS().scaled(vit, 0.5)


@dataclass(frozen=True, kw_only=True, repr=False)
class Toy(Method):
    """Keeps the first tokens, scaled by a factor that is learned."""

    name = "toy"
    r: int = 8

    def build(self, vit):
        return ToyReducer(self, vit)


class ToyReducer(Reducer):
    def __init__(self, method, vit):
        super().__init__(vit)
        self.method, self.inner = method, torch.nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fraction", torch.tensor(method.r / 10), persistent=False)
        self.plan = self.removals(vit.grid)

    def removals(self, grid):
        return (self.method.r,) * self.vit.depth

    def adjust(self, layer, tokens):
        return PLAIN

    def reduce(self, attention):
        tokens = attention.tokens.add(attention.branch() * self.inner.weight)
        rows = torch.arange(tokens.image.shape[1] - self.removals_of(tokens)[attention.layer])
        return tokens.keep(rows.expand(len(tokens.x), -1))


@pytest.mark.parametrize("method", [Toy(r=8), GTP(propagate=8), ToMe(r=8)])
def test_a_growing_reduction_is_the_one_that_the_model_carries(model, method):
    own = patch(copy.deepcopy(model), method)
    before = own.reducer
    for value in before.buffers():
        value.add_(1)
    learned = {key: id(value) for key, value in before.state_dict(keep_vars=True).items()}
    half = dataclasses.replace(method, **{"propagate" if isinstance(method, GTP) else "r": 4})
    set_method(own, half)
    assert own.reduction.method == own.reducer.method == half
    assert own.reducer.plan == half.build(own.reduction.vit).plan == (4,) * 4
    assert macs(own).total == macs(patch(model, half)).total
    # What was learned is the same object, which the optimiser knows; what follows from the settings is new.
    assert {key: id(value) for key, value in own.reducer.state_dict(keep_vars=True).items()} == learned
    if isinstance(method, Toy):
        assert own.reducer.fraction == pytest.approx(0.4)
        assert own.reducer.seen == 1
    images = families.images("vit", 2)
    with torch.no_grad():
        assert len(run(own, images).image[0]) == 64 - 4 * 4
    again = own.reducer
    set_method(own, half)
    assert own.reducer is again


def test_growing_reduction_is_used_and_the_whole_one_is_evaluated(model, images, tmp_path):
    seen = []
    begin = Trainer.start_epoch
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Trainer, "start_epoch", lambda self, method: seen.append(method) or begin(self, method))
        found = go(model, images, tmp_path, EViT(keep_rate=0.5), epochs=3, ramp_start=1, ramp_epochs=1)
    assert [method.keep_rate for method in seen] == [1.0, 1.0, 0.5]
    assert found.model.reducer.method.keep_rate == 0.5


@pytest.mark.slow
def test_bfloat16_and_checkpointing_and_average_and_clipping(model, images, tmp_path):
    more = {"amp": "bfloat16", "grad_checkpointing": True, "ema": 0.5, "clip_grad": 0.1, "distill": 1.0}
    found = go(model, images, tmp_path, epochs=1, **more)
    stored, written = state(tmp_path), load_file(tmp_path / "weights.safetensors")
    assert same(written, {key: stored["ema"][key] for key in written})
    assert not torch.equal(stored["ema"]["head.weight"], stored["student"]["model.head.weight"])
    assert torch.equal(found.model.head.weight, stored["ema"]["head.weight"])


# order and randomness


def test_each_image_is_drawn_once_an_epoch_by_exactly_one_process():
    settings = TrainingConfig(**QUICK)
    parts = [list(micro_batches_of(24, settings, 1, 0, (rank, 2))) for rank in range(2)]
    assert sorted(place for own in parts for part in own for _, place in part) == list(range(24))
    alone = list(micro_batches_of(24, settings, 1, 0, (0, 1)))
    assert [part for pair in zip(*parts, strict=True) for part in pair] == alone
    assert list(micro_batches_of(24, settings, 1, 1, (0, 1))) == alone[2:]  # resumed in the middle
    assert epoch_order(24, settings, 0).tolist() != epoch_order(24, settings, 1).tolist()
    repeated = epoch_order(24, TrainingConfig(**QUICK | {"repeats": 3}), 0)
    assert repeated.unique(return_counts=True)[1].tolist() == [3] * 8


def test_the_draws_of_an_epoch_are_made_one_part_at_a_time():
    tracemalloc.start()  # which sees Python's objects, not the order itself, a tensor
    part = next(iter(micro_batches_of(300_000, TrainingConfig(), 0, 0, (0, 1))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [draw for draw, _ in part] == list(range(0, 512, 8))
    assert [place for _, place in part] == epoch_order(300_000, TrainingConfig(), 0)[:512:8].tolist()
    assert peak < 500_000


def test_augmentation_depends_on_the_draw_alone(folder):
    model = timm.create_model("test_vit", num_classes=4)
    dataset = open_training_images(model, DataSettings(data_dir=folder, split="train"), TrainingConfig())
    draws = SeededAugmentation(dataset, 0, 1)
    first = draws[(3, 7)].image
    before = torch.random.get_rng_state()
    torch.rand(3)
    assert torch.equal(draws[(3, 7)].image, first)
    assert not torch.equal(draws[(4, 7)].image, first)
    assert not torch.equal(SeededAugmentation(dataset, 0, 2)[(3, 7)].image, first)
    torch.random.set_rng_state(before)
    draws[(5, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)  # the user's own numbers are left alone


def test_grey_images_of_torchvisions_data_sets(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (12, 28, 28), dtype=np.uint8)
    labels = np.arange(12, dtype=np.uint8) % 10
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train", "t10k"):
        head = b"\0\0\x08\x03" + np.array(pixels.shape, ">u4").tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        head = b"\0\0\x08\x01" + np.array([12], ">u4").tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    model = bundled.create(pretrained=False)
    data = DataSettings(data_dir=tmp_path, dataset="torch/fashion_mnist", crop_pct=1.0)
    plain = open_images(model, data)
    assert len(plain) == 12
    torch.testing.assert_close(plain[3].image, bundled.normalise(torch.from_numpy(pixels[3:4]))[0])
    assert plain[3].label == 3
    augmented = open_training_images(model, dataclasses.replace(data, split="train"), TrainingConfig())
    assert not augmented[3].error
    assert augmented[3].image.shape == (1, 28, 28)
    assert {SeededAugmentation(augmented, 0, 0)[(draw, 5)].error for draw in range(30)} == {""}
    before = identity.run_identity("m", model, plain).images.images
    (raw / "t10k-labels-idx1-ubyte").unlink()
    assert identity.run_identity("m", model, plain).images.images != before
    with pytest.raises(GTPError, match=r"no images in .*: Dataset not found"):
        open_images(model, data)


def test_parts_of_one_image(model, images, tmp_path):
    assert go(model, images, tmp_path, epochs=1, micro_batch=1, mixup=0, cutmix=0).log
    own = trainer_of(model, GTP(propagate=8))
    with pytest.raises(GTPError, match="too few images of one part could be read: a"):
        own.compute_loss(batch(count=4)._replace(images=torch.zeros(1, 3, 64, 64), unreadable={3: "a.png: broken"}))


def test_mixing_copes_with_an_image_that_could_not_be_read():
    mixer = Mixer(TrainingConfig(), 10)
    images, labels = mixer(families.images("vit", 3), torch.arange(3))
    assert len(images) == len(labels) == 2
    images, labels = Mixer(TrainingConfig(mixup=0, cutmix=0, smoothing=0.0), 10)(
        families.images("vit", 3), torch.arange(3)
    )
    assert labels.argmax(1).tolist() == [0, 1, 2]


def test_processes_that_read_images_change_nothing(model, images, tmp_path):
    found = []
    for workers in (0, 1):
        settings = TrainingConfig(**QUICK | {"epochs": 1})
        finetune(model, GTP(propagate=8), images, settings, output=tmp_path / str(workers), workers=workers)
        found.append(state(tmp_path / str(workers)))
    assert same(found[0]["student"], found[1]["student"])


# checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gtp", "dynamicvit", "evovit"])
def test_a_stopped_run_resumes_bit_for_bit(model, images, tmp_path, name):
    settings = {"method": METHODS[name](), "ema": 0.9, "save_every": 2, "epochs": 2}
    whole = go(model, images, tmp_path / "whole", **settings)
    with stopped_at(2):  # two steps are saved, in the middle of the first epoch
        go(model, images, tmp_path / "parts", **settings)
    assert state(tmp_path / "parts")["step"] == 2
    torch.rand(5)
    again = go(model, images, tmp_path / "parts", **settings)
    one, other = state(tmp_path / "whole"), state(tmp_path / "parts")
    for each in (one, other):
        each["log"] = [{k: v for k, v in entry.items() if k != "images_per_second"} for entry in each["log"]]
        each["log"] = [entry for entry in each["log"] if entry["step"] > 3]  # of the first epoch, a mean of other steps
    assert same(one, other)
    assert same(dict(whole.model.state_dict()), dict(again.model.state_dict()))
    written = (tmp_path / "parts" / "weights.safetensors").stat().st_mtime_ns
    assert same(
        dict(go(model, images, tmp_path / "parts", **settings).model.state_dict()), dict(again.model.state_dict())
    )
    assert (tmp_path / "parts" / "weights.safetensors").stat().st_mtime_ns == written  # there was nothing left to do


@pytest.mark.slow
def test_the_unreduced_model_runs_once_over_the_validation_images(model, images, tmp_path):
    """And the figures are those of a run that keeps nothing of it, also after a stop."""
    held_out, unreadable = Pictures(7), Pictures(7, unreadable=3)
    settings, method = TrainingConfig(**QUICK | {"epochs": 3}), GTP(propagate=8)

    def figures(name, data, most_bytes, stop=None):
        calls = []

        def count(kept, *arguments):
            calls.append(1)
            return compute(kept, *arguments)

        compute = OutputCache.compute
        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(OutputCache, "compute", count)
            monkey.setattr("gtp_vit.metrics.output_cache.MAX_BYTES", most_bytes)
            with stopped_at(stop) if stop else contextlib.nullcontext():
                finetune(model, method, images, settings, output=tmp_path / name, validation=data, workers=0)
            if stop:
                finetune(model, method, images, settings, output=tmp_path / name, validation=data, workers=0)
        return [entry for entry in state(tmp_path / name)["log"] if entry["kind"] == "validation"], len(calls)

    nothing, every_pass = figures("nothing", held_out, 0)
    assert every_pass == 4 * 2  # four passes over a batch of 4 and one of 3
    assert figures("all", held_out, 10**6) == (nothing, 2)
    assert figures("one batch", held_out, 200) == (nothing, 1 + 4)  # 4 images of 10 classes are 160 bytes
    assert figures("resumed", held_out, 10**6, stop=4) == (nothing, 2 + 2)
    assert figures("unreadable", unreadable, 10**6)[1] == 2
    # Where somebody's validation images change from pass to pass, nothing is taken from an earlier pass.
    assert figures("changing", Pictures(7, changing=True), 10**6)[1] == every_pass


def test_kept_outputs_are_those_of_the_same_images_only(model):
    cache, images = OutputCache(model, Classification()), families.images("vit", 4)
    half = batch()._replace(images=images.bfloat16())  # a type that numpy does not know
    with torch.no_grad():
        first = cache(half, images)
        assert cache(half, torch.zeros(0)) is first
        assert not torch.equal(cache(half._replace(images=half.images.flip(-1)), images.flip(-1)), first)
        assert cache(half._replace(indices=half.indices + 1), images) is not first


class Pictures(torch.utils.data.Dataset):
    """Like a folder of images."""

    def __init__(self, count, label=0, unreadable=None, changing=False):
        self.images, self.label = families.images("vit", count).clone(), label
        self.unreadable, self.changing = unreadable, changing

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.changing:
            self.images[index] = self.images[index].roll(1, -1)
        return Item(index, self.images[index], self.label, f"image {index}", "broken" * (index == self.unreadable))


@pytest.mark.parametrize("label", [-1, 10])
def test_validation_images_need_no_labels_where_nobody_reads_them(model, images, tmp_path, label):
    settings = TrainingConfig(**QUICK | {"epochs": 1, "labels": False})
    pictures = Pictures(5, label=label)
    for number, held_out in enumerate((InMemoryDataset(pictures.images, torch.full((5,), label)), pictures)):
        found = finetune(model, GTP(), images, settings, output=tmp_path / str(number), validation=held_out, workers=0)
        assert found.validations()[-1].figures.keys() == {"agreement", "kl"}


def test_weights_load_in_timm_and_say_how_they_were_made(tmp_path):
    plain = timm.create_model("test_vit", num_classes=4)
    images = InMemoryDataset(torch.randn(8, 3, 160, 160), torch.arange(8) % 4)
    found = finetune(
        plain, DynamicViT(keep_ratio=0.5), images, TrainingConfig(**QUICK | {"epochs": 1}), output=tmp_path, workers=0
    )
    file = tmp_path / "weights.safetensors"
    loaded = timm.create_model("test_vit", num_classes=4, checkpoint_path=str(file))
    assert torch.equal(loaded.head.weight, found.model.head.weight)
    with safe_open(file, "pt") as opened:
        stored = json.loads(opened.metadata()["gtp_vit_recipe"])
    assert stored["method"]["keep_ratio"] == 0.5
    assert stored["provenance"]["finetuned"]["settings"]["epochs"] == 1
    assert stored["model"] == "test_vit"
    fast = patch(loaded.eval(), str(file))  # with the predictors beside it, and no caution
    with torch.no_grad():
        torch.testing.assert_close(fast(images.images), found.model(images.images))


@pytest.mark.slow
def test_the_command_writes_weights_log_and_page_and_evaluate_reads_them(words, folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*words, "--remove", "4", "--output", str(out), "--distill", "0.5"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "Top-1" in printed
    assert "KL to the unreduced model" in printed
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["validation", "step", "validation"]
    assert {"loss", "lr", "images_per_second", "gradient"} < lines[1].keys()
    rows = list(csv.DictReader((out / "log.csv").read_text().splitlines()))
    assert float(rows[1]["loss"]) == lines[1]["loss"]
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4
    weights = str(out / "weights.safetensors")
    evaluate = ["evaluate", "test_vit", "--num-classes", "4", "--checkpoint", weights, "--method", weights]
    assert main([*evaluate, "--data-dir", str(folder / "val"), "--workers", "0", "--json"]) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[1]["settings"]["remove"] == 4
    assert rows[1]["top1"] == pytest.approx(lines[2]["top1"])


def test_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((Path(folder).name, purge_step))

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log = Log(tmp_path, [LogEntry("step", 4, 1.0, {"loss": 2.0})])
    log.add(LogEntry("step", 5, 1.25, {"loss": 1.0}))
    log.close()
    assert written == [("tensorboard", 5), ("step/epoch", 1.25, 5), ("step/loss", 1.0, 5), "closed"]
    written.clear()
    Log(tmp_path)
    assert written == [("tensorboard", 0)]  # what an earlier run left there is not shown beside a new one


@pytest.mark.slow
def test_labels_are_not_needed_by_the_command(words, folder, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted((folder / "train").rglob("*.png"))):
        (flat / f"{number}.png").write_bytes(path.read_bytes())
    place = words.index("--data-dir")
    words = [*words[: place + 1], str(flat), *words[place + 2 :]]
    assert (
        main([*words, "--no-labels", "--output", str(tmp_path / "o"), "--val-dir", str(folder / "val")]) == ExitCode.OK
    )
    assert "agreement" in capsys.readouterr().out
    assert main([*words, "--output", str(tmp_path / "p")]) == ExitCode.USAGE
    assert "has 1 classes, but the model has 4" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_model_learns_from_the_embedded_images(tmp_path, monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (16, 28, 28), generator=generator, dtype=torch.uint8)
    monkeypatch.setattr(bundled, "sample_images", lambda: (pixels, torch.arange(16) % 10))
    save_file(bundled.create(pretrained=False).state_dict(), tmp_path / "w.safetensors")
    words = ["finetune", "--checkpoint", str(tmp_path / "w.safetensors"), "--epochs", "1", "--batch-size", "6"]
    assert main([*words, "--workers", "0", "--output", str(tmp_path / "o"), "--json"]) == ExitCode.OK
    log = json.loads(capsys.readouterr().out)["log"]
    assert log[-1] | {"step": 2, "epoch": 1} == log[-1]  # 12 to learn from, 4 to evaluate on
    words += ["--limit", "6", "--val-limit", "2"]
    assert main([*words, "--workers", "0", "--output", str(tmp_path / "less"), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["log"][-1]["step"] == 1


@pytest.mark.slow
def test_unreadable_images_are_left_out_and_named(words, folder, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for path in folder.rglob("*.png"):
        copied = tmp_path / "data" / path.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    (tmp_path / "data" / "train" / "class1" / "3.png").write_bytes(b"no picture")
    place = words.index("--data-dir")
    words = [*words[: place + 1], str(tmp_path / "data"), *words[place + 2 :]]
    assert main([*words, "--output", str(tmp_path / "o")]) == ExitCode.INCOMPLETE
    assert "1 of the images could not be read and were left out: " in capsys.readouterr().err
    assert (tmp_path / "o" / "weights.safetensors").exists()


# bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1e-5}, r"lr is -1e-05; it must be a number in \(0, 10\]"),
        ({"lr": 1e-7}, "min_lr is 1e-06, more than lr, which is 1e-07"),
        (
            {"batch_size": 25, "micro_batch": 25, "mixup": 0, "cutmix": 0},
            "a step sees 25 images, but there are only 24",
        ),
        ({"micro_batch": 3}, "micro_batch 3 does not divide batch_size 8"),
        ({"batch_size": 3, "micro_batch": 3}, "mix pairs: give an even number"),
        ({"epochs": 0}, "epochs is 0"),
        ({"ramp_epochs": 3}, "full strength after 3 epochs, and there are 2"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"amp": "float8"}, "unknown amp 'float8'"),
    ],
)
def test_settings_that_make_no_sense(model, images, tmp_path, settings, message):
    with pytest.raises(GTPError, match=message):
        go(model, images, tmp_path, **settings)
    assert not (tmp_path / "state.pt").exists()


def test_models_and_labels_that_do_not_fit(model, images, tmp_path):
    with pytest.raises(GTPError, match="has no classifier"):
        go(timm.create_model("test_vit", num_classes=0), images, tmp_path)
    with pytest.raises(GTPError, match="has one output, whose softmax is always 1"):
        go(timm.create_model("test_vit", num_classes=1), images, tmp_path)
    with pytest.raises(GTPError, match="an output for every token"):
        go(families.make("all_tokens"), images, tmp_path)
    with pytest.raises(GTPError, match="an image has label 10; the model has classes 0 to 9"):
        go(model, InMemoryDataset(images.images, torch.full((24,), 10)), tmp_path)
    with pytest.raises(GTPError, match="keep_ratio is 1: no token ever leaves"):
        go(model, images, tmp_path, DynamicViT(keep_ratio=1.0))
    with pytest.raises(GTPError, match="DynamicViT reaches keep_ratio by its loss"):
        go(model, images, tmp_path, DynamicViT(), ramp_epochs=1)
    with pytest.raises(GTPError, match="has no stochastic depth"):
        go(families.make("lvvit"), images, tmp_path, drop_path=0.2)


def test_a_class_without_images_is_named(words, tmp_path, capsys):
    for label in range(4):
        (tmp_path / "data" / f"class{label}").mkdir(parents=True)
        if label != 2:
            Image.new("RGB", (40, 40)).save(tmp_path / "data" / f"class{label}" / "0.png")
    place = words.index("--data-dir")
    words = [*words[: place + 1], str(tmp_path / "data"), *words[place + 2 :]]
    assert main([*words, "--output", str(tmp_path / "o")]) == ExitCode.USAGE
    assert "class class2 has no images in" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(model, images, tmp_path):
    terms = Protocol.loss_terms
    calls = []

    def poisoned(self, *arguments):
        calls.append(1)
        found = terms(self, *arguments)
        return {**found, "loss": found["loss"] * float("nan")} if len(calls) == 10 else found  # step 5

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Protocol, "loss_terms", poisoned)
        with pytest.raises(
            NonFiniteError, match=r"the loss is nan in step 5 of 6 \(epoch 2\); the checkpoint of step 3 is kept"
        ) as caught:
            go(model, images, tmp_path)
    assert "\n" not in str(caught.value)
    stored = state(tmp_path)
    assert stored["step"] == 3
    assert all(value.isfinite().all() for value in stored["student"].values())
    assert go(model, images, tmp_path).log[-1].step == 6  # and resumes from there


def test_weights_that_are_no_numbers_are_not_saved(model, images, tmp_path):
    train_step = Trainer.train_step

    def explode(self, step, *rest):
        found = train_step(self, step, *rest)
        if step == 5:
            self.model.head.weight.data[0, 0] = float("inf")
        return found

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Trainer, "train_step", explode)
        with pytest.raises(NonFiniteError, match=r"a weight is not finite any more; the checkpoint of step 3 is kept"):
            go(model, images, tmp_path)
    assert state(tmp_path)["step"] == 3


def test_checkpoints_of_another_run_are_refused_and_kept(model, images, tmp_path, monkeypatch):
    go(model, images, tmp_path, epochs=1)
    kept = (tmp_path / "state.pt").read_bytes()
    restart = "; use --restart to discard it, or choose another --output$"
    with pytest.raises(GTPError, match=f"is of a different run: method was gtp and is tome.*{restart}"):
        go(model, images, tmp_path, ToMe(r=4), epochs=1)
    with pytest.raises(GTPError, match=r"different run: model was .*, weights was \w+ and is \w+"):
        go(timm.create_model("vit_tiny_patch16_224", **small_models.SMALL | {"depth": 5}), images, tmp_path, epochs=1)
    with pytest.raises(GTPError, match=rf"different run: epochs was 1 and is 2, distill was None and is 0\.0{restart}"):
        go(model, images, tmp_path, epochs=2, distill=0.0)
    with pytest.raises(GTPError, match=r"different run: method alpha was 0\.2 and is 0\.3; "):
        go(model, images, tmp_path, GTP(propagate=8, alpha=0.3), epochs=1)
    other = copy.deepcopy(model)
    other.head.bias.data += 1
    with pytest.raises(GTPError, match="different run: weights was"):
        go(other, images, tmp_path, epochs=1)
    changed = InMemoryDataset(images.images + 1e-3, images.labels)  # as many images, and different ones
    with pytest.raises(GTPError, match="different run: images was"):
        go(model, changed, tmp_path, epochs=1)
    with monkeypatch.context() as other_version:
        other_version.setattr(identity, "__version__", "0.0.1")
        with pytest.raises(GTPError, match=r"different run: version was \S+ and is 0\.0\.1"):
            go(model, images, tmp_path, epochs=1)
    assert (tmp_path / "state.pt").read_bytes() == kept


def test_a_damaged_checkpoint_is_refused_and_kept(model, images, tmp_path):
    go(model, images, tmp_path, epochs=1)
    whole = (tmp_path / "state.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # inside a tensor, which torch.load does not notice
    torch.save({"somebody": "else's"}, tmp_path / "foreign.pt")
    for damaged in (
        whole[:1000],
        whole[: len(whole) // 2],
        bytes(flipped),
        b"",
        (tmp_path / "foreign.pt").read_bytes(),
    ):
        (tmp_path / "state.pt").write_bytes(damaged)
        with pytest.raises(GTPError, match="is damaged, or not a checkpoint of a finetuning run; use --restart"):
            go(model, images, tmp_path, epochs=1)
        assert (tmp_path / "state.pt").read_bytes() == damaged
    assert go(model, images, tmp_path, epochs=1, restart=True).log[-1].step == 3
    assert state(tmp_path)["step"] == 3


def test_a_restarted_run_begins_anew_and_loses_nothing_before_its_first_checkpoint(model, images, tmp_path):
    before = go(model, images, tmp_path, epochs=1)
    kept = {name: (tmp_path / name).read_bytes() for name in ("state.pt", "weights.safetensors")}
    log = (tmp_path / "log.jsonl").read_bytes()
    with stopped_at(2):
        go(model, images, tmp_path, epochs=2, log_every=1, restart=True)
    assert kept == {name: (tmp_path / name).read_bytes() for name in kept}
    assert (tmp_path / "log.jsonl").read_bytes() != log
    again = go(model, images, tmp_path, epochs=1)  # the earlier run, which was at its end
    assert again.log == before.log
    assert (tmp_path / "log.jsonl").read_bytes() == log
    anew = go(model, images, tmp_path, epochs=2, restart=True)
    assert [entry.step for entry in anew.log] == [3, 6]
    go(model, images, tmp_path / "empty", epochs=2, restart=True)  # where there is nothing to discard
    assert same(state(tmp_path)["student"], state(tmp_path / "empty")["student"])


@pytest.mark.slow
def test_the_command_restarts(words, tmp_path, capsys):
    words = [*words, "--remove", "4", "--output", str(tmp_path)]
    assert main(words) == ExitCode.OK
    assert main([*words, "--lr", "1e-4"]) == ExitCode.USAGE
    assert "different run: lr was None and is 0.0001; use --restart" in capsys.readouterr().err
    assert main([*words, "--lr", "1e-4", "--restart"]) == ExitCode.OK
    assert main([*words, "--lr", "1e-4"]) == ExitCode.OK  # nothing left to do
    capsys.readouterr()
    assert state(tmp_path)["run"]["lr"] == 1e-4


KILLED = """
import os, signal, sys
import torch
from gtp_vit.cli.app import main
from gtp_vit.training.trainer import Trainer

torch.set_num_threads(1)
train_step = Trainer.train_step

def die(self, step, *rest):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, step, *rest)

Trainer.train_step = die
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_resumes_at_once_while_its_readers_live(words, folder, tmp_path, capsys):
    words = [*words, "--remove", "4", "--output", str(tmp_path / "o"), "--save-every", "1"]
    place = words.index("--workers") + 1
    with_reader = [*words[:place], "1", *words[place + 1 :]]
    killed = start_python(KILLED, *with_reader)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert state(tmp_path / "o")["step"] == 2
    assert main(words) == ExitCode.OK
    assert state(tmp_path / "o")["step"] == 3
    capsys.readouterr()


@pytest.mark.slow
def test_no_space_left(model, images, tmp_path):
    sync, train_step, full = os.fsync, Trainer.train_step, []

    def fill(number):
        if full:
            raise OSError(28, "No space left on device")
        sync(number)

    def fourth(self, step, *rest):
        full.extend([1] * (step == 3))
        return train_step(self, step, *rest)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(os, "fsync", fill)
        monkey.setattr(Trainer, "train_step", fourth)
        with pytest.raises(GTPError, match="No space left on device; choose another path or free some disk space"):
            go(model, images, tmp_path)
    assert state(tmp_path)["step"] == 3  # whole, of the epoch before
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert go(model, images, tmp_path).log[-1].step == 6


def test_two_runs_do_not_write_into_one_folder(model, images, tmp_path):
    with lock_run_folder(tmp_path), pytest.raises(GTPError, match="another run is writing"):
        go(model, images, tmp_path)


def test_a_number_of_processes_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("gtp_vit.runs.distributed.rank_and_world_size", lambda: (0, 3))
    with pytest.raises(GTPError, match=r"3 processes cannot share the 2 parts of a step.*start 1 or 2, or change"):
        check_processes(TrainingConfig(**QUICK))


def test_the_command_wants_weights_and_images(words, tmp_path, capsys):
    assert main(["finetune", "test_vit", "--data-dir", str(tmp_path)]) == ExitCode.USAGE
    assert "random weights" in capsys.readouterr().err
    place = words.index("--data-dir")
    assert main([*words[:place], *words[place + 2 :]]) == ExitCode.USAGE
    assert "needs images: give --data-dir" in capsys.readouterr().err
    (tmp_path / "val").mkdir()
    assert main([*words[: place + 1], str(tmp_path), *words[place + 2 :]]) == ExitCode.USAGE
    assert "has images to evaluate on, but no folder train to learn from" in capsys.readouterr().err
    assert main([*words, "--device", "nothing"]) == ExitCode.USAGE
    assert "device 'nothing' cannot be used" in capsys.readouterr().err


def test_the_strongest_augmentation_is_no_unreadable_image():
    config = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    transform = make_transform(config, TrainingConfig(auto_augment="rand-m10-inc1").augment())
    operations = next(step.ops for step in transform.transforms if hasattr(step, "ops"))
    (strongest,) = [each for each in operations if each.name == "PosterizeIncreasing"]
    strongest.prob = 1.0
    picture = Image.new("RGB", (8, 8), "white")
    assert strongest(picture).getextrema() == ((0, 0),) * 3  # no bit is kept: black, as Pillow had it before 13
