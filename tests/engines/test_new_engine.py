"""A new engine is one file, tests/support/toy_engine.py, and one line in ENGINES: all commands take it."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import gtp_vit
from gtp_vit import create_model, patch
from gtp_vit.cli import model_flags
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.cli.commands import demo
from gtp_vit.demo.exported_model import inspect_file
from gtp_vit.demo.markup import file_html
from gtp_vit.engines import ENGINES, engine_names, formats
from gtp_vit.engines.exported_file import ExportedFile
from support.engines import torch_can_export
from support.toy_engine import ToyEngine

pytestmark = pytest.mark.skipif(not torch_can_export(), reason="this torch exports other programs")
FILE = "fashion_vit-gtp_plus-f32.toy"
FEW = ("--limit", "20", "-b", "8", "-j", "0")


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    """The line in ENGINES; processes that an engine runs in find its file."""
    monkeypatch.setitem(ENGINES, "toy", ToyEngine())
    package, tests = Path(gtp_vit.__file__).parents[1], Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{package}:{tests}")

    def short(*_, **__):
        model = create_model("fashion_vit")
        model.blocks = model.blocks[:3]
        return model

    monkeypatch.setattr(model_flags, "create_model", short)


@pytest.fixture
def file(once):
    """A file for the toy, written by the command."""

    def make(folder):
        assert main(["export", "--format", "toy", "--output", str(folder), "--images", "16"]) == ExitCode.OK

    return once("toy", make) / FILE


def answer(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == ExitCode.OK, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("command", "flag"), [("export", "format"), ("benchmark", "engine"), ("tune", "engine"), ("embed", "engine")]
)
def test_flags_and_errors_name_it(command, flag, capsys):
    names = ",".join(formats() if flag == "format" else engine_names())
    main([command, "--help"])
    assert names.endswith(",toy")
    assert f"--{flag} {{{names}}}" in capsys.readouterr().out
    assert main([command, f"--{flag}", "toi"]) == ExitCode.USAGE
    assert "did you mean 'toy'" in capsys.readouterr().err


def test_its_precisions_are_checked(capsys):
    assert main(["benchmark", "--engine", "toy", "--precision", "int8"]) == ExitCode.USAGE
    assert "toy has no int8 on a CPU; give f32" in capsys.readouterr().err


@pytest.mark.slow
def test_check_says_what_it_is_here(capsys):
    assert answer(capsys, "check")["toy"] == f"torch {version('torch')}; it is a toy"


def test_a_file_for_no_engine_is_told_its_ending():
    with pytest.raises(gtp_vit.GTPError, match=r"end its name in .* or \.toy \(toy\)$"):
        ExportedFile.read(Path("x.pb"))


@pytest.mark.slow
def test_export_writes_a_file_and_a_card(file):
    assert {each.name for each in file.parent.iterdir()} == {FILE, f"{FILE}.md"}
    metadata = ExportedFile.read(file).metadata
    assert (metadata.engine, metadata.batch, metadata.output) == ("toy", 1, ("classes", 10))
    card = file.with_name(f"{FILE}.md").read_text()
    for text in (
        "for Toy Engine",
        "[batch, 1, 28, 28], batch 1",
        "Not run here:\n```kotlin\n",
        "images that were given",
    ):
        assert text in card


@pytest.mark.slow
def test_evaluate_and_embed_run_its_files(file, tmp_path, capsys):
    _, reduced = answer(capsys, "evaluate", file, *FEW)["rows"]
    expected = answer(capsys, "evaluate", "--method", "deploy", *FEW)["rows"][1]
    assert reduced["kl"] == pytest.approx(expected["kl"], abs=1e-4)
    assert reduced["settings"]["engine"] == "toy"
    assert main(["embed", str(file), *FEW, "--output", str(tmp_path / "vectors")]) == ExitCode.OK
    (shard,) = gtp_vit.read_embeddings(tmp_path / "vectors")
    images = gtp_vit.models.bundled.normalise(gtp_vit.models.bundled.sample_images()[0])[:20]
    with torch.inference_mode():
        outputs = patch(model_flags.create_model(), "deploy")(images)
    torch.testing.assert_close(torch.from_numpy(shard.embeddings), outputs, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_benchmark_times_it_and_its_files(file, capsys):
    words = ("--rounds", "3", "--batch-size", "2")
    (timed,) = answer(capsys, "benchmark", "--engine", "toy", "--method", "deploy", *words)["timed"]
    assert timed["engine"] == "toy"
    assert [timing["name"] for timing in timed["timings"]][:2] == ["unreduced", "gtp_plus"]
    (timed,) = answer(capsys, "benchmark", file, *words)["timed"]
    assert timed["engine"] == "toy"
    assert FILE in [timing["name"] for timing in timed["timings"]]


@pytest.mark.slow
def test_tune_measures_in_it(capsys):
    words = ("--images", "20", "--search-passes", "3", "--timing-batch", "1", "-b", "8")
    (recipe,) = answer(capsys, "tune", "--engine", "toy", "--method", "tome", "--macs", "0.9", *words)
    assert recipe["measured"]["engine"]["name"] == "toy"


@pytest.mark.slow
def test_the_demo_shows_its_files(file):
    filed = demo._page_subject(demo.Demo(model=str(file)), [])
    study = inspect_file(filed, filed.examples[0].picture, timed=False)
    assert study.damage is not None
    html = file_html(filed, study, [])
    assert "Toy Engine, f32" in html
    assert "torch.export.load" in filed.python
