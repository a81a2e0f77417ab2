"""A refused command leaves nothing: no journal, no folder, no manifest."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import GTPError
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.writer import Layout, embed_to_folder
from gtp_vit.runs.files import check_writable
from gtp_vit.runs.journal import Journal

SIZES = {"img_size": 32, "num_classes": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint, and 24 pictures in two classes."""
    place = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    save_file(timm.create_model("vit_tiny_patch16_224", **SIZES).state_dict(), place / "w.safetensors")
    pixels = np.random.default_rng(0)
    for number in range(24):
        path = place / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    return place


@pytest.fixture
def words(place):
    given = ["vit_tiny_patch16_224", "--checkpoint", str(place / "w.safetensors"), "--img-size", "32"]
    return [*given, "--num-classes", "2", "--data-dir", str(place / "images"), "--workers", "0"]


REFUSED = {
    "two targets": (["tune", "--macs", "0.65", "--max-kl", "0.02"], "2 targets are given"),
    "share above one": (["tune", "--macs", "1.5"], "macs is 1.5"),
    "out of reach": (["tune", "--macs", "0.01"], "cannot be reached"),
    "no passes": (["tune", "--search-passes", "0"], "--search-passes is 0"),
    "no batch": (["tune", "--batch-size", "0"], "batch"),
    "no schedule": (["tune", "--method", "identity"], "has no schedule"),
    "wrong target": (["tune", "--min-cosine", "0.9"], "does not fit this model"),
    "too few images": (["tune", "--images", "2"], "too few"),
    "no such method": (["compare", "--methods", "nonsense"], "unknown method"),
    "no such recipe": (["compare", "--recipes", "nonsense.json"], "nonsense.json"),
    "a share of MACs that is none": (["compare", "--macs", "2"], "--macs is 2"),
    "neighbours": (["evaluate", "--measure", "embedding"], "not an embedding"),
    "a figure of all images": (
        ["evaluate", "--measure", "dense", "--num-neighbours", "0"],
        "num_neighbours is a setting of",
    ),
    "embed": (["embed", "--patches", "--logits"], "two different outputs"),
    "export": (["export", "--precision", "bf16"], "bf16"),
    "finetune": (["finetune", "--batch-size", "1000", "--micro-batch", "500"], "only 24"),
    "visualise": (["visualise", "nowhere.png"], "there is no picture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_command_leaves_nothing(name, words, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command, *more), said = REFUSED[name]
    folder = ["--output", "made/deep"]
    output = {"tune": ["--output", "made/r.json"], "evaluate": ["--results-file", "made/r.json"]}.get(command, folder)
    if command == "visualise":
        words = [words[0], *more, *words[1:7]]
        more = []
    assert main([command, *words, *more, *output]) == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["export", "--output", "fast.onnx"],
        ["embed", "--output", "vectors.parquet"],
        ["visualise", "fashion_vit", "a.png", "--output", "b.png"],
        ["compare", "--output", "report.html"],
        ["finetune", "fashion_vit", "--output", "weights.safetensors"],
        ["tour", "--output", "tour.HTML"],
    ],
    ids=lambda words: words[0],
)
def test_no_folder_is_made_where_a_file_was_meant(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == ExitCode.USAGE
    assert "and it is a folder that is wanted, e.g. " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_corrected_command_runs_where_the_refused_one_did_not(words, tmp_path, capsys):
    output = ["--output", str(tmp_path / "r.json"), "--search-passes", "1", "--method", "tome"]
    assert main(["tune", *words, "--macs", "0.65", "--max-kl", "0.02", *output]) == ExitCode.USAGE
    assert main(["tune", *words, "--macs", "0.8", "--images", "24", *output]) == ExitCode.OK, capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]


def test_a_journal_without_work_is_deleted_and_one_with_work_is_kept(tmp_path):
    path = tmp_path / "a" / "b" / "r.journal"
    Journal(path, {"model": "a"}).__exit__(GTPError)
    assert list(tmp_path.iterdir()) == []
    journal = Journal(path, {"model": "a"})
    journal.append(1)
    journal.__exit__(KeyboardInterrupt)
    journal = Journal(path, {"model": "a"})
    assert journal.entries == [1]
    journal.__exit__(GTPError)  # without more work
    assert path.exists()
    with pytest.raises(GTPError, match="different run"):
        Journal(path, {"model": "b"})
    assert path.exists()


def test_looking_whether_a_place_can_be_written_makes_nothing(tmp_path):
    check_writable(tmp_path / "a" / "b" / "c.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(GTPError, match="cannot write"):
        check_writable(tmp_path / "file" / "b" / "c.json")


def test_an_embedding_run_that_fails_at_once_leaves_no_folder(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0).eval()
    images = InMemoryDataset(torch.zeros(4, 3, 64, 64), torch.zeros(4, dtype=torch.long))  # the model takes 32
    with pytest.raises(Exception, match="doesn't match"):
        embed_to_folder(
            tmp_path / "v", BatchEmbedder(model), images, {"run": 1}, Layout(batch_size=4, shard_size=4), workers=0
        )
    assert list(tmp_path.iterdir()) == []
