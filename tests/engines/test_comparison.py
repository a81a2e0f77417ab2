"""benchmark --engines: one table, in which an engine that is not installed is a line with the command for it."""

import json
from pathlib import Path

import pytest

import gtp_vit
from gtp_vit import create_model
from gtp_vit.cli import model_flags
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.engines import ENGINES
from gtp_vit.engines.comparison import EngineFigures, EngineRow
from gtp_vit.profiling.benchmark import Timing
from gtp_vit.report.engines import engine_table
from support.engines import torch_can_export
from support.toy_engine import ToyEngine

pytestmark = pytest.mark.skipif(not torch_can_export(), reason="this torch exports other programs")
TIMING = Timing("reduced", 10.04, (9.0, 11.0), 1.406, (1.3, 1.5), 1.45)


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Three layers, the toy engine, and no converter."""

    def create(*_, **__):
        model = create_model("fashion_vit")
        model.blocks = model.blocks[:3]
        return model

    monkeypatch.setattr(model_flags, "create_model", create)
    monkeypatch.setitem(ENGINES, "toy", ToyEngine())
    package, tests = Path(gtp_vit.__file__).parents[1], Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{package}:{tests}")
    monkeypatch.delenv("GTP_VIT_EXECUTORCH_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_rows_of_the_table():
    full = EngineFigures(7.04, 1.2e-6, 98.44, 0.0123, TIMING, 512.4)
    bare = EngineFigures(None, 0.0, None, None, TIMING, None)
    _, rows = engine_table(
        [
            EngineRow("litert", "f32", full),
            EngineRow("torch", "f32", bare),
            EngineRow("executorch", "int8", None, "needs executorch: install it"),
        ]
    )
    assert rows == [
        ["litert", "f32", "7.0", "1.2e-06", "98.4", "0.012", "10.0", "1.41", "1.30 .. 1.50", "512"],
        ["torch", "f32", "-", "0", "-", "-", "10.0", "1.41", "1.30 .. 1.50", "-"],
        ["executorch: needs executorch: install it", "int8", *["-"] * 8],
    ]


@pytest.mark.time_limit(10)
def test_an_engine_that_is_not_installed_is_a_line(short, capsys, tmp_path):
    words = ("--engines", "torch", "executorch", "--method", "deploy", "--rounds", "3", "-b", "1", "--images", "8")
    assert main(["benchmark", *words, "--json", "--html", str(tmp_path / "page.html")]) == ExitCode.OK
    torch_row, *others = json.loads(capsys.readouterr().out)["engines"]
    assert torch_row["figures"]["max_difference"] < 1e-5
    assert torch_row["figures"]["kl"] > 1e-4
    assert torch_row["figures"]["time"]["speedup"] > 0
    assert [(row["engine"], row["precision"], row["figures"]) for row in others] == [
        ("executorch", "f32", None),
        ("executorch", "int8", None),
    ]
    assert "gtp-vit export --format executorch --install-converter" in others[0]["problem"]
    assert "--install-converter" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_file_is_made_checked_and_timed(short, capsys):
    words = ("--engines", "toy", "--method", "deploy", "--rounds", "3", "-b", "1", "--images", "8")
    assert main(["benchmark", *words, "--json"]) == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)["engines"]
    assert row["figures"]["max_difference"] < 1e-4
    assert 0 < row["figures"]["megabytes"] < 10
    assert row["figures"]["peak_megabytes"] is None or row["figures"]["peak_megabytes"] > 50
    assert row["figures"]["time"]["name"] == "reduced"


def test_an_engine_that_fails_is_a_line_and_an_exit_code(short, capsys, monkeypatch):
    def fail(*_, **__):
        raise gtp_vit.GTPError("it does not convert")

    monkeypatch.setattr("gtp_vit.engines.comparison.export", fail)
    words = ("--engines", "toy", "--method", "deploy", "--rounds", "3", "-b", "1", "--images", "8")
    assert main(["benchmark", *words]) == ExitCode.INCOMPLETE
    out, err = capsys.readouterr()
    assert "toy: it does not convert" in " ".join(out.split())
    assert "no figures of toy f32; the table says why" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "openvino"), "--engine is for one engine; remove it with --engines"),
        (("--compile",), "--compile is for one engine; remove it with --engines"),
        (("-b", "1", "8"), "--batch-size has several numbers; give one with --engines"),
        (("x.onnx",), "x.onnx is for one engine; name the model it was made from"),
    ],
    ids=["engine", "compile", "batches", "file"],
)
def test_flags_that_do_not_go_with_it(capsys, words, message):
    assert main(["benchmark", *words, "--engines", "all"]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_misspelled_engine_is_named(capsys):
    assert main(["benchmark", "--engines", "litret"]) == ExitCode.USAGE
    assert "did you mean 'litert'" in capsys.readouterr().err
