"""The bench: images that cannot be read, runs that are killed, files that nobody sees half of, budgets, intervals."""

import csv
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from gtp_vit import GTP, METHODS, GTPError, ToMe, create_model, macs, patch
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data import dataset as data_tools
from gtp_vit.data import image_file
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.loader import batches
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import Evaluation, bootstrap, evaluate
from gtp_vit.profiling.budget import method_at_macs
from gtp_vit.runs.files import write_atomically
from gtp_vit.runs.journal import Journal
from gtp_vit.testing import families
from gtp_vit.tuning.compare import budgets_of, compare, models_of, plan_comparison, with_timings
from support.process import start_python

MODEL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 4}
pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 small pictures of 4 classes."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for label in range(4):
        for number in range(10):
            path = root / f"class{label}" / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **MODEL).eval()


@pytest.fixture
def broken(folder, tmp_path):
    """The same pictures, of which three cannot be read."""
    for path in folder.rglob("*.png"):
        copy = tmp_path / "broken" / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    root = tmp_path / "broken"
    (root / "class1" / "3.png").write_bytes(b"no picture")
    (root / "class2" / "5.png").write_bytes((root / "class2" / "5.png").read_bytes()[:900])
    return root


def in_memory(count=24):
    images = families.images("vit", count)
    return InMemoryDataset(images, torch.arange(count) % 10)


def timms_validation(model, folder, input_size, first=None):
    """Top-1, as timm's script computes it."""
    config = {**timm.data.resolve_model_data_config(model), "input_size": input_size}
    dataset = timm.data.create_dataset("", root=str(folder))
    dataset.reader.samples = dataset.reader.samples[:first]
    loader = timm.data.create_loader(
        dataset,
        batch_size=8,
        is_training=False,
        use_prefetcher=False,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
        **{key: config[key] for key in ("input_size", "mean", "std", "crop_pct", "interpolation")},
    )
    right, total = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            (top1,) = timm.utils.accuracy(model(images), labels)
            right, total = right + float(top1) * len(labels), total + len(labels)
    return right / total, total


@pytest.mark.filterwarnings("ignore:unclosed file")  # timm's own data set leaves them open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_accuracy_equals_timms_own_validation(model, folder):
    dataset = open_images(model, DataSettings(data_dir=folder))
    (score,) = evaluate({UNREDUCED: model}, dataset, batch_size=7, workers=0).scores
    assert (score["top1"].value, score.images) == (pytest.approx(timms_validation(model, folder, (3, 32, 32))[0]), 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_accuracy_of_a_real_model_equals_timms_own_validation(data):
    (weights,) = (data / "assets/weights").glob("vit_tiny_patch16_224*.safetensors")
    model = create_model("vit_tiny_patch16_224", checkpoint=weights)
    folder = data / "assets/imagenet/val"
    dataset = open_images(model, DataSettings(data_dir=folder, limit=40))
    (score,) = evaluate({UNREDUCED: model}, dataset, batch_size=40, workers=0).scores
    expected, images = timms_validation(model, folder, (3, 224, 224), first=40)
    assert (score["top1"].value, score.images) == (pytest.approx(expected), images)
    assert score["top1"].value > 60


def test_figures_by_hand():
    class Fixed(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits, self.weight = logits, nn.Parameter(torch.zeros(1))

        def forward(self, images):
            return self.logits[: len(images)]

    base = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    other = torch.tensor([[0.0, 2.0], [0.0, 2.0], [0.0, 1.0]])
    dataset = InMemoryDataset(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1]))
    found = evaluate({UNREDUCED: Fixed(base), "other": Fixed(other)}, dataset, batch_size=3)
    unreduced, reduced = found.scores
    assert unreduced["top1"].value == pytest.approx(200 / 3)  # of equal logits the first class counts, as in argmax
    assert reduced["top1"].value == pytest.approx(200 / 3)
    assert reduced["top5"].value == 100
    assert reduced["agreement"].value == pytest.approx(100 / 3)
    assert reduced["top1_change"].value == pytest.approx(0)
    p = 1 / (1 + math.exp(-2))
    kl = (2 * p - 1) * 2
    last = math.log(0.5) * 0.5 * 2 - 0.5 * (math.log(1 / (1 + math.e)) + math.log(math.e / (1 + math.e)))
    assert reduced["kl"].value == pytest.approx((kl + last) / 3, rel=1e-6)
    assert found.differences([("other", UNREDUCED, "kl")])[0].value == pytest.approx(reduced["kl"].value)


def test_intervals_cover_the_mean_and_are_paired():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    found = bootstrap(values[None])[0]
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.2)
    assert bootstrap(values[None]) == [found]
    assert bootstrap(np.array([[1.0]]))[0].value == 1.0


def test_unreadable_pictures_are_named_and_not_replaced(model, broken, monkeypatch):
    monkeypatch.setattr(image_file, "MAX_PIXELS", 3000)
    Image.new("RGB", (60, 60)).save(broken / "class0" / "0.png")
    dataset = open_images(model, DataSettings(data_dir=broken))
    found = evaluate({UNREDUCED: model}, dataset, batch_size=8, workers=0)
    assert found.scores[0].images == 37
    assert len(found.unreadable) == 3
    text = "\n".join(found.unreadable)
    assert "class1/3.png" in text
    assert "class2/5.png" in text
    assert "60 x 60 pixels are more than" in text


def evaluate_words(folder, tmp_path, *more):
    """The command on a small model with the right number of classes."""
    weights = tmp_path / "vit.safetensors"
    if not weights.exists():
        torch.manual_seed(0)
        save_file(timm.create_model("test_vit", num_classes=4).state_dict(), weights)
    model = ["test_vit", "--num-classes", "4", "--checkpoint", str(weights)]
    return ["evaluate", *model, "--data-dir", str(folder), *more]


@pytest.mark.slow
def test_evaluate_command_writes_timms_columns_and_ours(folder, tmp_path, capsys):
    results, page = tmp_path / "out" / "r.csv", tmp_path / "r.html"
    words = evaluate_words(folder, tmp_path, "--remove", "4", "--workers", "0")
    assert main([*words, "--results-file", str(results), "--html", str(page)]) == ExitCode.OK
    rows = list(csv.DictReader(results.read_text().splitlines()))
    assert [row["method"] for row in rows] == ["", "gtp_plus"]
    timms = ["model", "top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct", "interpolation"]
    assert list(rows[0])[: len(timms)] == timms
    assert float(rows[1]["gmacs"]) < float(rows[0]["gmacs"])
    assert json.loads(rows[1]["settings"])["remove"] == 4
    assert rows[0]["images"] == "40"
    assert float(rows[0]["kl"]) == 0 < float(rows[1]["kl"])
    assert "KL to unreduced" in page.read_text()
    assert not list(tmp_path.rglob("*.journal"))
    assert "KL to unreduced" in capsys.readouterr().out
    assert main([*words, "--json"]) == ExitCode.OK
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def test_unreadable_pictures_show_in_the_exit_code(broken, tmp_path, capsys):
    results = tmp_path / "r.json"
    words = evaluate_words(broken, tmp_path, "--workers", "0", "--remove", "4", "--results-file", str(results))
    assert main(words) == ExitCode.INCOMPLETE
    assert "2 of the images could not be read" in capsys.readouterr().err
    assert json.loads(results.read_text())[0]["images"] == 38
    assert json.loads(results.read_text())[0]["unreadable"] == 2


@pytest.mark.time_limit(10)
def test_a_killed_evaluation_goes_on_without_counting_an_image_twice(folder, tmp_path):
    results = tmp_path / "r.json"
    words = evaluate_words(folder, tmp_path, "--workers", "0", "--remove", "4", "-b", "3")
    words += ["--results-file", str(results)]
    journal = tmp_path / "r.json.journal"
    code = (
        "import sys, time\n"
        "from gtp_vit.metrics import evaluate\n"
        "slow = evaluate._run\n"
        "def wait(*a):\n"
        "    time.sleep(0.2)\n"
        "    return slow(*a)\n"
        "evaluate._run = wait\n"
        "from gtp_vit.cli.app import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    child = start_python(code, *words)
    deadline = time.time() + 120
    while time.time() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.05)
    child.kill()
    child.join()
    lines = journal.read_bytes().splitlines(keepends=True)
    assert 4 <= len(lines) < 15  # killed in the middle
    journal.write_bytes(b"".join(lines) + b'{"index": [9')  # and in the middle of a line
    assert not results.exists()
    assert main(words) == ExitCode.OK
    again = json.loads(results.read_text())
    assert again[0]["images"] == 40
    results.unlink()
    assert main(words) == ExitCode.OK
    assert json.loads(results.read_text()) == again


def test_a_journal_of_another_run_is_not_mixed_in(tmp_path):
    path = tmp_path / "a.journal"
    first = Journal(path, {"model": "a", "images": 3})
    first.append({"x": 1})
    with pytest.raises(GTPError, match="another run is writing"):
        Journal(path, {"model": "a", "images": 3})
    first.close(finished=False)
    with pytest.raises(GTPError, match="of a different run: model was a and is b"):
        Journal(path, {"model": "b", "images": 3})
    again = Journal(path, {"model": "a", "images": 3})
    assert again.entries == [{"x": 1}]
    again.close(finished=True)
    assert not path.exists()


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "r.txt"
    write_atomically(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GTPError, match="No space left on device; choose another path"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.txt"]
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(GTPError, match="cannot write"):
        write_atomically(tmp_path / "file" / "r.txt", "new")


def test_folders_that_do_not_fit_are_refused(model, folder, tmp_path):
    with pytest.raises(GTPError, match="there is no folder"):
        open_images(model, DataSettings(data_dir=tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(GTPError, match="no images in"):
        open_images(model, DataSettings(data_dir=tmp_path / "empty"))
    with pytest.raises(GTPError, match="has 4 classes, but the model has 10"):
        open_images(families.make("vit"), DataSettings(data_dir=folder))


def test_batches_keep_the_order_and_can_begin_later(model, folder):
    dataset = open_images(model, DataSettings(data_dir=folder, limit=11))
    places = [batch.indices.tolist() for batch in batches(dataset, batch_size=4, workers=2)]
    assert places == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    places = [batch.indices.tolist() for batch in batches(dataset, batch_size=4, workers=0, skip=8)]
    assert places == [[8, 9, 10]]


def test_streams_are_counted_and_resumed(model, folder):
    files = sorted(folder.rglob("*.png"))[:7]
    pictures = [(Image.open(path), 1) for path in files]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    stream = data_tools.StreamingImageDataset(pictures, transform, (3, 32, 32))
    places = [batch.indices.tolist() for batch in batches(stream, batch_size=3, workers=0, skip=3)]
    assert places == [[3, 4, 5], [6]]


# A schedule, a share, and numbers with limits of their own.
QUICKEST = ("gtp_plus", "evit", "mctf")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICKEST else pytest.mark.slow) for name in METHODS if name != "identity"],
)
def test_every_method_reaches_a_budget(name):
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    for share in (0.8, 0.6):
        target = share * macs(model).total
        method = method_at_macs(model, name, target)
        assert macs(model, method, shorten_last_block=True).total == pytest.approx(target, rel=0.01)


def test_budgets_that_cannot_be_reached_are_refused():
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    with pytest.raises(
        GTPError,
        match=r"0\.1 GMACs cannot be reached by evovit .* takes 0\.\d+ to 1\.\d+: ask for a share of 0\.\d+ to 0",
    ):
        method_at_macs(model, "evovit", 0.1e9)
    assert budgets_of(model, [8]) == [macs(model, GTP(propagate=8), shorten_last_block=True).total]


def test_compare_runs_all_methods_that_fit():
    model = families.make("vit")
    plans, left_out = plan_comparison(model, (), [0.75 * macs(model).total])
    assert left_out == []
    assert [p.name.split(" @")[0] for p in plans] == [UNREDUCED, *[name for name in METHODS if name != "identity"]]
    models = models_of(model, plans)
    rows, found = compare(models, plans, in_memory())
    assert all(row.timing is None for row in rows)
    rows = with_timings(rows, models, families.images("vit"), 3)
    assert isinstance(found, Evaluation)
    assert all(row.timing is not None for row in rows)
    assert rows[0].score["kl"].value == 0
    gap = families.make("gap")
    plans, left_out = plan_comparison(gap, (), [0.75 * macs(gap).total])
    fitting = [p.name.split(" @")[0] for p in plans]
    needing = [name for name, method in METHODS.items() if method.needs_class_token]
    assert fitting == [UNREDUCED, *[name for name in METHODS if name not in {*needing, "identity"}]]
    assert [text.split()[0] for text in left_out] == needing
    with pytest.raises(GTPError, match="evit cannot be compared here: EViT ranks tokens by the class token"):
        plan_comparison(gap, ("evit",), [0.75 * macs(gap).total])


def test_evaluation_costs_little_more_than_the_forward_passes():
    """Overhead in calls, not in time: each model runs once a batch, and nothing else of size."""
    model, calls = families.make("vit"), []
    fast = patch(model, ToMe(r=3))
    model.register_forward_hook(lambda *_: calls.append("unreduced"))
    fast.register_forward_hook(lambda *_: calls.append("tome"))
    evaluate({UNREDUCED: model, "tome": fast}, in_memory(24), batch_size=8)
    assert calls == ["unreduced", "tome"] * 3


@pytest.mark.slow
def test_visualise_writes_pictures_and_a_page(folder, tmp_path, capsys):
    weights = tmp_path / "vit.safetensors"
    save_file(timm.create_model("test_vit").state_dict(), weights)
    some = next(Path(folder).rglob("*.png"))
    words = ["visualise", "test_vit", str(some), "--checkpoint", str(weights), "--output", str(tmp_path / "v")]
    for method in ("gtp", "tome", "evovit", "evit"):
        assert main([*words, "--method", method]) == ExitCode.OK
    page = (tmp_path / "v" / "index.html").read_text()
    assert "data:image/png;base64," in page
    (drawn,) = (tmp_path / "v").glob("*.png")
    with Image.open(drawn) as picture:
        assert picture.width > 500
    assert main([*words, "--layers", "9"]) == ExitCode.USAGE
    assert "has layers 0 to 5" in capsys.readouterr().err
    assert main(["visualise", "test_vit", "no.jpg", "--checkpoint", str(weights)]) == ExitCode.USAGE
    assert "there is no picture no.jpg" in capsys.readouterr().err


def tar_of_pictures(folder, count=12, damaged=None):
    """A WebDataset of one shard, as timm wants it."""
    import io
    import tarfile

    folder.mkdir()
    generator = np.random.default_rng(0)
    with tarfile.open(folder / "val-0000.tar", "w") as tar:
        for number in range(count):
            picture = io.BytesIO()
            Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(picture, "PNG")
            data = b"no picture" if number == damaged else picture.getvalue()
            for ending, content in (("png", data), ("cls", str(number % 4).encode())):
                member = tarfile.TarInfo(f"{number:05}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    split = {"name": "validation", "filenames": ["val-0000.tar"], "num_samples": count, "shard_lengths": [count]}
    (folder / "_info.json").write_text(json.dumps({"splits": {"validation": split}}))
    return folder


@pytest.mark.filterwarnings("ignore")  # of webdataset itself
def test_webdatasets_are_read_through_timm(folder, tmp_path, capsys):
    pytest.importorskip("webdataset")
    words = evaluate_words(folder, tmp_path, "--dataset", "wds/", "--workers", "0", "--remove", "4", "--json")
    words[words.index("--data-dir") + 1] = str(tar_of_pictures(tmp_path / "shards"))
    assert main(words) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["rows"][0]["images"] == 12


@pytest.mark.filterwarnings("ignore")  # of webdataset itself
def test_what_a_stream_cannot_decode_is_counted(folder, tmp_path, capsys):
    pytest.importorskip("webdataset")
    words = evaluate_words(folder, tmp_path, "--dataset", "wds/", "--workers", "0", "--remove", "4", "--json")
    words[words.index("--data-dir") + 1] = str(tar_of_pictures(tmp_path / "shards", damaged=5))
    assert main(words) == ExitCode.INCOMPLETE
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][0]["images"] == 11
    assert "1 of the images could not be read" in err


def test_labels_that_the_model_does_not_have_are_refused(model):
    dataset = InMemoryDataset(torch.zeros(3, 3, 32, 32), torch.tensor([0, 7, 1]))
    with pytest.raises(GTPError, match="an image has label 7, but the model has 4 classes"):
        evaluate({UNREDUCED: model}, dataset)


class Unread(torch.utils.data.Dataset):
    """Images that nobody may ask for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        pytest.fail("it was read again")


@pytest.mark.filterwarnings("ignore")  # of datasets itself
def test_hugging_face_data_sets_are_read_through_timm(folder, tmp_path, capsys):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is an extra: pip install gtp-vit[data]")
    shutil.copytree(folder, tmp_path / "hf" / "validation")
    words = evaluate_words(folder, tmp_path, "--dataset", f"hfds/{tmp_path}/hf", "--workers", "0", "--json")
    words[words.index("--data-dir") + 1] = str(tmp_path / "cache")
    assert main([*words, "--remove", "4"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["rows"][0]["images"] == 40
