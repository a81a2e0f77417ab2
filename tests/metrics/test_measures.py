"""Measures: what it means for each kind of output that a reduced model is near the unreduced one."""

import base64
import json
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import GTPPlus, Identity, SearchConfig, Target, ToMe, create_model, patch, tune, tune_and_patch
from gtp_vit.backbones import small_models
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.errors import GTPError, SettingError
from gtp_vit.metrics.base import UNREDUCED, decode_array, encode_arrays
from gtp_vit.metrics.dense import PatchFeatures, patch_features
from gtp_vit.metrics.embeddings import Embeddings
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.metrics.registry import select_measure
from gtp_vit.metrics.regression import Regression
from gtp_vit.tensors import rescale
from gtp_vit.testing import families

PLUS = GTPPlus(remove=(20, 0, 9, 4))


def small(name="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    return timm.create_model(name, **{**small_models.SMALL, **settings}).eval()


def in_memory(count=24):
    return InMemoryDataset(families.images("vit", count), torch.arange(count) % 10)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "classes"),
        ({"num_classes": 0}, "embedding"),
        ({"num_classes": 1}, "regression"),
        ({"num_classes": 0, "global_pool": ""}, "dense"),
    ],
)
def test_the_measure_follows_what_a_model_returns(settings, name):
    model = small(**settings)
    assert select_measure(model).name == name
    assert select_measure(patch(model, PLUS)).name == name
    found = evaluate({UNREDUCED: model, "plus": patch(model, PLUS, restore=True)}, in_memory())
    assert found.measure.name == name
    unreduced, reduced = found.scores
    assert (unreduced.damage.value, unreduced.not_finite) == (pytest.approx(0, abs=1e-6), 0)
    assert reduced.damage.value > 10 * abs(unreduced.damage.value)
    assert reduced.damage.low < reduced.damage.value < reduced.damage.high


@pytest.mark.parametrize("family", families.NAMES)
def test_every_family_has_a_measure(family):
    model, images = families.make(family), families.images(family)
    measure = select_measure(model)
    with torch.no_grad():
        found = measure.outputs("it", patch(model, PLUS, restore=measure.restores), images)
        assert found.shape == measure.outputs("it", model, images).shape
        patches = math.prod(patch(model, PLUS).reduction.vit.grid)
        assert patch_features(model, images).shape[:2] == (3, patches)


class Fixed(torch.nn.Module):
    """Returns given outputs, whatever it sees."""

    def __init__(self, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.outputs = torch.tensor(outputs)

    def forward(self, images):
        return self.outputs[: len(images)]


def on(measure, base, other, labels=(-1, -1, -1, -1)):
    images = InMemoryDataset(torch.zeros(len(base), 1, 2, 2), torch.tensor(labels))
    found = evaluate({UNREDUCED: Fixed(base), "other": Fixed(other)}, images, measure=measure)
    return {name: interval.value for name, interval in found.scores[1].figures.items()}


EAST, NORTH, WEST, NEARLY = [1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [3.0, 0.3]


def test_embeddings_by_hand():
    """Of four embeddings one turns by 90 degrees: from near the first to the side of the second."""
    found = on(
        Embeddings(num_neighbours=1), [EAST, NORTH, WEST, NEARLY], [EAST, NORTH, WEST, [-0.1, 1.0]], (0, 1, 1, 0)
    )
    turned = 1 - (-0.3 + 0.3) / 1
    assert found["distance"] == pytest.approx(turned / 4)
    # Nearest before: 0 -> 3, 1 -> 3 (cosine 0.0995 against 0 and 0), 2 -> 1, 3 -> 0. After: 0 -> 1 (cosine 0), 1 -> 3,
    # 2 -> 3 (0.0995), 3 -> 1.
    assert found["neighbours"] == pytest.approx(25.0)
    # Votes after: 0 gets 1's label (wrong), 1 gets 3's (wrong), 2 gets 3's (wrong), 3 gets 1's (wrong).
    assert found["knn"] == 0.0
    assert found["knn_change"] == pytest.approx(0 - 75)  # before: 0 right, 1 wrong, 2 right, 3 right
    assert found["distance_p95"] == pytest.approx(np.quantile([0, 0, 0, turned], 0.95))


def test_texts_by_hand():
    texts = torch.tensor([EAST, NORTH])
    found = on(
        Embeddings(num_neighbours=1, text_embeddings=texts),
        [EAST, NORTH, EAST, NEARLY],
        [EAST, EAST, EAST, NEARLY],
        (0, 1, 1, 0),
    )
    assert found["zero_shot_agreement"] == 75.0
    assert found["zero_shot_top1"] == 50.0
    with pytest.raises(SettingError, match="texts have 3 numbers, those of unreduced 2"):
        on(Embeddings(num_neighbours=1, text_embeddings=torch.ones(2, 3)), [EAST] * 4, [EAST] * 4)


def test_numbers_by_hand():
    found = on(Regression(), [[4.0], [0.0], [-4.0], [8.0]], [[4.0], [1.0], [-4.0], [8.0]])
    assert found["error"] == pytest.approx(0.25 / 4)  # a mean difference of 1/4, a mean size of 4


def test_labels_that_say_nothing_give_no_accuracy():
    vectors = [EAST, NORTH, WEST, NEARLY]
    for labels in ((-1,) * 4, (0, 1, 2, 3), (5,) * 4):
        assert "knn" not in on(Embeddings(num_neighbours=1), vectors, vectors, labels)


def test_too_many_neighbours_are_refused():
    with pytest.raises(GTPError, match="10 neighbours are asked for, and among 4 images each has 3 others"):
        on(Embeddings(), [EAST] * 4, [EAST] * 4)


def test_fewer_neighbours_are_no_advice_where_there_is_room_for_none():
    for count in (1, 2):
        with pytest.raises(GTPError, match=r"1 neighbour is asked for.*; give more images$") as refused:
            on(Embeddings(num_neighbours=1), [EAST] * count, [EAST] * count, [-1] * count)
        assert ("among 1 image each has 0 others" in str(refused.value)) == (count == 1)
    with pytest.raises(GTPError, match=r"give more images, or --num-neighbours 1$"):
        on(Embeddings(num_neighbours=2), [EAST] * 3, [EAST] * 3, [-1] * 3)


def test_embeddings_that_are_not_finite_are_counted_and_never_a_figure():
    images = InMemoryDataset(torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.long))
    vectors = [EAST, NORTH, WEST, NEARLY]
    spoilt = [EAST, [math.nan, 1.0], WEST, NEARLY]
    found = evaluate({UNREDUCED: Fixed(vectors), "it": Fixed(spoilt)}, images, measure=Embeddings(num_neighbours=1))
    assert (found.scores[1].not_finite, found.not_finite()) == (
        1,
        ["it: 1 of 4 images have outputs that are not finite, or zero, which has no direction"],
    )
    assert math.isnan(found.scores[1].damage.value)
    with pytest.raises(GTPError, match="unreduced model's outputs are not finite on 1 of 4 images"):
        evaluate({UNREDUCED: Fixed(spoilt)}, images, measure=Embeddings(num_neighbours=1))


class Scaled(torch.nn.Module):
    """A model whose outputs are those of another, times a number."""

    def __init__(self, model, factor):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, images):
        return self.model(images) * self.factor


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_the_length_of_embeddings_changes_no_figure(factor):
    """Neither the lengths of the reduced model's, nor those of both."""
    model = small(num_classes=0)
    fast = patch(model, PLUS)
    texts = {
        "text_embeddings": torch.randn(3, 192, generator=torch.Generator().manual_seed(0))[:, : model.num_features]
    }
    measure = Embeddings(num_neighbours=5, **texts)
    plain = evaluate({UNREDUCED: model, "it": fast}, in_memory(), measure=measure)
    for base in (model, Scaled(model, factor)):
        found = evaluate({UNREDUCED: base, "it": Scaled(fast, factor)}, in_memory(), measure=measure)
        for figure, value in plain.per_image_values["it"].items():
            np.testing.assert_allclose(found.per_image_values["it"][figure], value, atol=1e-6)
    same = evaluate({UNREDUCED: model, "it": Scaled(model, 1e30)}, in_memory(), measure=measure)
    assert same.scores[1]["neighbours"].value == 100
    assert same.scores[1].damage.value == pytest.approx(0, abs=1e-6)


def test_an_embedding_of_zeros_has_no_direction_and_is_named():
    images = InMemoryDataset(torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.long))
    vectors, zero = [EAST, NORTH, WEST, NEARLY], [EAST, [0.0, 0.0], WEST, NEARLY]
    found = evaluate({UNREDUCED: Fixed(vectors), "it": Fixed(zero)}, images, measure=Embeddings(num_neighbours=1))
    assert found.not_finite() == ["it: 1 of 4 images have outputs that are not finite, or zero, which has no direction"]
    assert math.isnan(found.per_image_values["it"]["distance"][1])
    with pytest.raises(GTPError, match=r"embeddings are zero on 1 of 4 images \(the first is image 1 of those"):
        evaluate({UNREDUCED: Fixed(zero)}, images, measure=Embeddings(num_neighbours=1))


def test_the_scale_of_patch_features_changes_no_figure():
    base, other = torch.randn(2, 3, 9, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    whole, labels = torch.ones(3, dtype=torch.bool), torch.zeros(3)
    plain = PatchFeatures().compare(base, other, labels, whole)
    for factor in (1e30, 1e-30):
        for key, value in PatchFeatures().compare(base * factor, other * factor, labels, whole).items():
            np.testing.assert_allclose(value, plain[key], rtol=1e-5)


def test_rescaling_rounds_nothing():
    vectors = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    scaled = rescale(vectors)
    assert ((scaled.abs().amax(dim=1) >= 0.5) & (scaled.abs().amax(dim=1) < 1)).all()
    factor = scaled[:, 0] / vectors[:, 0]
    assert torch.equal(factor.log2(), factor.log2().round())
    assert torch.equal(scaled, vectors * factor.unsqueeze(1))
    odd = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    assert torch.equal(rescale(odd).nan_to_num(5.0), odd.nan_to_num(5.0))


def test_neighbours_are_sought_among_some_of_very_many_images(monkeypatch):
    monkeypatch.setattr("gtp_vit.metrics.evaluate.MAX_VECTORS", 24)
    model = small(num_classes=0)
    found = evaluate({UNREDUCED: model, "plus": patch(model, PLUS)}, in_memory(48))
    assert int((~np.isnan(found.per_image_values["plus"]["neighbours"])).sum()) == 24
    assert not np.isnan(found.per_image_values["plus"]["distance"]).any()
    assert 0 < found.scores[1]["neighbours"].value <= 100


class Broken(torch.nn.Module):
    """A model whose embeddings are not finite."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images) * math.nan


def test_embeddings_that_are_not_finite_have_no_neighbours_and_no_votes():
    model = small(num_classes=0)
    found = evaluate({UNREDUCED: model, "broken": Broken(model)}, in_memory(), measure="embedding")
    assert found.scores[1].not_finite == 24
    assert (found.scores[1]["neighbours"].value, found.scores[1]["knn"].value) == (0, 0)


def test_neighbours_that_chance_would_keep_are_refused():
    model = small(num_classes=0)
    with pytest.raises(
        GTPError, match=r"among 20 images each has 19 others, of which at most half .* --num-neighbours 9"
    ):
        evaluate({UNREDUCED: model, "plus": patch(model, PLUS)}, in_memory(20))


def test_neighbours_of_images_that_were_held_out_are_sought_among_all():
    model = small(num_classes=0)
    held_out = tune(
        model, families.images("vit", 55), Target("macs", 0.4), search=SearchConfig(passes=1, calibrate=False)
    ).measured.held_out
    assert held_out.images == 11
    assert held_out.figures["neighbours"] < 100  # among 10 others all would be


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (torch.ones(32), r"texts are \[32\]; give a vector for each text"),
        (torch.zeros(3, 32), "zero or not finite for 3 of 3 texts"),
        (torch.full((2, 32), math.nan), "zero or not finite for 2 of 2 texts"),
    ],
)
def test_embeddings_of_texts_that_say_nothing(texts, message):
    model = small(num_classes=0)
    with pytest.raises(SettingError, match=message):
        evaluate({UNREDUCED: model}, in_memory(), measure=Embeddings(text_embeddings=texts))


def test_arrays_survive_a_journal():
    arrays = {
        "a": np.array([1.5, math.nan]),
        "b": np.array([3, -1]),
        "v": np.array([[1, 2], [math.nan, math.nan]], dtype=np.float32),
    }
    stored = json.loads(json.dumps(encode_arrays(arrays)))
    assert stored["v"] == [base64.b64encode(np.array([1, 2], dtype=np.float32).tobytes()).decode(), ""]
    for name, array in arrays.items():
        assert np.array_equal(decode_array(stored[name]), array, equal_nan=True)


def test_dense_wants_restored_models():
    model = small()
    with pytest.raises(SettingError, match="without restore"):
        evaluate({UNREDUCED: model, "plus": patch(model, PLUS)}, in_memory(), measure="dense")
    found = evaluate(
        {UNREDUCED: model, "all": patch(model, Identity(), restore=True)}, in_memory(), measure=PatchFeatures()
    )
    assert found.scores[1].damage.value == 0


@pytest.mark.parametrize(
    ("settings", "target", "figure"),
    [
        ({"num_classes": 0}, Target("min_cosine", 0.99), "distance"),
        ({"num_classes": 0}, Target("min_neighbours", 60), "neighbours"),
        ({"num_classes": 1}, Target("max_error", 0.3), "error"),
        ({}, Target("max_error", 0.4, "dense"), "patch_error"),
    ],
)
def test_targets_of_every_measure(settings, target, figure):
    model = small(**settings)
    recipe = tune(model, families.images("vit", 60), target, search=SearchConfig(passes=6))
    goal, value = target.name, target.value
    found = recipe.measured.figures[figure]
    assert {"min_cosine": 1 - found >= value, "min_neighbours": found >= value, "max_error": found <= value}[goal]
    assert recipe.measured.measure == select_measure(model, target.measure).name
    assert recipe.measured.fraction < 1


def test_targets_of_other_measures_are_refused():
    with pytest.raises(SettingError, match=r"max_kl does not fit.*embedding; give one of macs, speedup, min_cosine"):
        tune(small(num_classes=0), families.images("vit", 24), Target("max_kl", 0.1))
    with pytest.raises(SettingError, match="24 images are too few to tune on; give at least 55"):
        tune(small(num_classes=0), families.images("vit", 24), Target("macs", 0.7))


def test_tune_and_patch_for_dense_gives_the_grid_back():
    model, images = small(), families.images("vit", 24)
    fast = tune_and_patch(model, images, Target("macs", 0.7, "dense"), search=SearchConfig(passes=2))
    assert fast.forward_features(images[:1]).shape == model.forward_features(images[:1]).shape


def test_an_encoder_takes_the_checkpoint_of_a_classifier(tmp_path):
    whole = timm.create_model("test_vit")
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    encoder = create_model("test_vit", checkpoint=tmp_path / "whole.safetensors", num_classes=0)
    assert torch.equal(encoder.blocks[0].mlp.fc1.weight, whole.blocks[0].mlp.fc1.weight)
    assert select_measure(encoder).name == "embedding"


def test_measures_that_do_not_fit_are_refused():
    with pytest.raises(SettingError, match="scores 10 classes, which is not an embedding"):
        select_measure(small(), "embedding")
    with pytest.raises(SettingError, match="measure it as dense"):
        select_measure(small(global_pool=""), "regression")
    with pytest.raises(
        SettingError,
        match="text_embeddings is a setting of embedding, and this model's outputs are measured as classes",
    ):
        select_measure(small(), text_embeddings=torch.ones(2, 3))
    with pytest.raises(GTPError, match="measure"):
        select_measure(small(), "embeddings")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The words of a command for a small encoder, and a folder of images in two classes."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=0)
    save_file(model.state_dict(), folder / "w.safetensors")
    generator = np.random.default_rng(0)
    for index in range(56):
        path = folder / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    words = ["test_vit", "--num-classes", "0", "--checkpoint", str(folder / "w.safetensors"), "--workers", "0"]
    return [*words, "--data-dir", str(folder / "images")], folder


def run(words, capsys, code=ExitCode.OK):
    assert main(words) == code, capsys.readouterr().err
    return capsys.readouterr()


@pytest.mark.slow
def test_commands_measure_an_encoder(encoder, capsys, tmp_path):
    words, folder = encoder
    found = json.loads(run(["evaluate", *words, "--method", "tome", "--r", "4", "--json"], capsys).out)
    row = found["rows"][1]
    assert row["measure"] == "embedding"
    assert {"distance", "distance_p95", "neighbours", "knn", "knn_change_low"} <= row.keys()
    assert not {"top1", "kl", "agreement"} & row.keys()
    text = run(["evaluate", *words, "--method", "tome", "--r", "4"], capsys).out
    assert "same neighbours" in " ".join(text.split())
    assert "10 nearest among 56" in " ".join(text.split())
    report = ["--output", str(tmp_path / "compared"), "--rounds", "0", "--macs", "0.8", "--methods", "tome", "gtp_plus"]
    run(["compare", *words, *report], capsys)
    page = (tmp_path / "compared" / "report.html").read_text()
    assert "1 - cosine" in page
    assert "KL to" not in page
    recipe = tmp_path / "r.json"
    out = run(["tune", *words, "--min-cosine", "0.9", "--search-passes", "4", "--output", str(recipe)], capsys).out
    assert "1 - cosine" in out
    assert json.loads(recipe.read_text())["measured"]["measure"] == "embedding"
    run(["tune", *words, "--measure", "dense", "--macs", "0.8", "--search-passes", "2"], capsys)
    # A table of another measure is never mixed with an unfinished one.
    torch.save(torch.ones(3, 5), folder / "x.pt")
    np.save(folder / "wrong.npy", np.ones((3, 5), dtype=np.float32))
    for given, message in (("wrong.npy", "texts have 5 numbers"), ("x.pt", "give a .safetensors file")):
        err = run(["evaluate", *words, "--text-embeddings", str(folder / given)], capsys, ExitCode.USAGE).err
        assert message in err
    err = run(["tune", *words, "--max-kl", "0.1"], capsys, ExitCode.USAGE).err
    assert "max_kl does not fit" in err


def test_methods_at_equal_cost_are_in_one_order():
    """A strong reduction is further away than a weak one by every measure."""
    for settings, measure in (({}, "classes"), ({"num_classes": 0}, "embedding"), ({}, "dense")):
        model = small(**settings)
        models = {UNREDUCED: model}
        for name, method in (("weak", ToMe(r=2)), ("strong", ToMe(r=14))):
            models[name] = patch(model, method, restore=measure == "dense")
        found = evaluate(models, in_memory(), measure=measure)
        assert found.scores[1].damage.value < found.scores[2].damage.value
