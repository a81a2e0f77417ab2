"""Adding a measure is one file, tests/support/toy_measure.py, and one line: commands, search, pages and documents."""

import json
import runpy
from html import escape
from pathlib import Path

import pytest
import torch

from gtp_vit import GTPError, calibrate, create_model, patch, read_recipe
from gtp_vit.cli import sources
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.demo.demo_model import bundled_examples, make_demo_model
from gtp_vit.demo.inspection import inspect_picture
from gtp_vit.demo.markup import inspection_html
from gtp_vit.methods.gtp_plus.learning.sensitivity import learn_sensitivity
from gtp_vit.metrics.registry import MEASURES, select_measure
from gtp_vit.models import bundled
from support.toy_measure import ToyMeasure

FEW = ("--limit", "24", "-b", "12", "-j", "0")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package with the file in it, for what reads files without importing them."""
    package, support = tmp_path_factory.mktemp("with_toy") / "gtp_vit", Path(__file__).parents[1] / "support"
    (package / "metrics").mkdir(parents=True)
    for each in sources.PACKAGE.iterdir():
        if each.name != "metrics":
            (package / each.name).symlink_to(each)
    for each in [*(sources.PACKAGE / "metrics").glob("*.py"), support / "toy_measure.py"]:
        (package / "metrics" / each.name).symlink_to(each)
    return package


@pytest.fixture(autouse=True)
def _registered(package, monkeypatch):
    """The one line, above those of other measures that fit the same outputs."""
    monkeypatch.setattr(sources, "PACKAGE", package)
    sources._settings.cache_clear()
    others = dict(MEASURES)
    MEASURES.clear()
    MEASURES.update({"toy": ToyMeasure, **others})
    yield
    MEASURES.clear()
    MEASURES.update(others)
    sources._settings.cache_clear()


def images(count):
    return bundled.normalise(bundled.sample_images()[0][:count])


def answer(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == ExitCode.OK, err
    return json.loads(out)


@pytest.mark.parametrize("command", ["evaluate", "compare", "tune"])
def test_help_names_it_and_its_settings(command, capsys):
    assert main([command, "--help"]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "--measure {auto,toy,classes" in text
    assert "toy: the first outputs alone" in text
    assert "--first INT" in text
    assert "For --measure toy: how many outputs are read." in text


@pytest.mark.slow
def test_it_is_chosen_by_what_the_model_returns_and_refuses_other_models():
    assert select_measure(create_model("fashion_vit")) == ToyMeasure()
    small = create_model("fashion_vit")
    small.reset_classifier(5)
    assert select_measure(small).name == "classes"
    with pytest.raises(GTPError, match=r"5 outputs, and the toy reads one of ten, or measure it as classes"):
        select_measure(small, "toy")
    with pytest.raises(GTPError, match="first is a setting of toy"):
        select_measure(small, first=3)


def test_errors_name_its_settings_and_name(capsys):
    assert main(["evaluate", "--measure", "toi"]) == ExitCode.USAGE
    assert "did you mean 'toy'" in capsys.readouterr().err
    assert main(["evaluate", "--measure", "toy", "--frst", "3"]) == ExitCode.USAGE
    assert "did you mean '--first'" in capsys.readouterr().err


def test_evaluate_writes_its_figures(tmp_path, capsys):
    words = ("evaluate", "--measure", "toy", "--first", "3", "--method", "tome", *FEW)
    unreduced, reduced = answer(capsys, *words, "--results-file", tmp_path / "rows.json")["rows"]
    assert reduced["measure"] == "toy"
    assert unreduced["gap"] == 0 < reduced["gap"]
    with torch.no_grad():
        model = create_model("fashion_vit")
        gap = (patch(model, "tome")(images(24)) - model(images(24)))[:, :3].abs().mean()
    assert reduced["gap"] == pytest.approx(float(gap), abs=1e-4)
    assert json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.slow
def test_a_run_with_other_settings_of_it_is_not_resumed(tmp_path, capsys):
    words = ["evaluate", "--method", "tome", *FEW, "--results-file", str(tmp_path / "rows.json")]
    first, second = (("--measure", "toy", "--first", number) for number in ("3", "4"))
    assert main([*words, *first]) == ExitCode.OK
    gaps = [answer(capsys, *words, *each)["rows"][1]["gap"] for each in (first, second)]
    assert gaps[0] != gaps[1]


@pytest.mark.slow
def test_compare_ranks_by_its_damage_and_plots_its_headline(tmp_path, capsys):
    words = ["compare", "--macs", "0.6", "--methods", "tome", "gtp", "--rounds", "0", *FEW]
    assert main([*words, "--output", str(tmp_path)]) == ExitCode.OK
    page = (tmp_path / "report.html").read_text()
    assert "Marked: the least toy gap." in page
    assert "near %" in page
    assert escape(ToyMeasure.explanation) in page


@pytest.mark.slow
@pytest.mark.parametrize("target", [("--macs", "0.7"), ("--max-gap", "0.9"), ("--min-near", "1")])
def test_its_bounds_are_targets_of_tune(target, tmp_path, capsys):
    path = tmp_path / "recipe.json"
    words = ["tune", "--method", "tome", "--images", "40", "--search-passes", "6", *target, "--output", str(path)]
    assert main(words) == ExitCode.OK, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "held-out toy gap" in shown
    assert ToyMeasure.explanation in shown
    stored = json.loads(path.read_text())
    assert stored["measured"]["measure"] == "toy"
    if target[0] == "--max-gap":
        assert stored["measured"]["figures"]["gap"] <= 0.9
    assert patch(create_model("fashion_vit"), read_recipe(path)) is not None


def test_its_targets_are_flags_and_fit_its_models_alone(capsys):
    assert main(["tune", "--help"]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-gap NUMBER" in text
    assert "at most this gap" in text
    assert main(["tune", "--measure", "classes", "--max-gap", "0.1", "--images", "40"]) == ExitCode.USAGE
    assert "max_gap does not fit" in capsys.readouterr().err
    assert main(["tune", "--max-gap", "200"]) == ExitCode.USAGE
    assert "--max-gap" in capsys.readouterr().err


@pytest.mark.slow
def test_calibration_asks_for_its_direction():
    model, few = create_model("fashion_vit"), images(40)
    by_toy, by_classes = (learn_sensitivity(model, few, measure=name).calibration.probe for name in ("toy", "classes"))
    assert not torch.equal(by_toy, by_classes)
    recipe = calibrate(model, few, measure="toy", macs=0.7)
    assert patch(model, recipe).reduction.method.calibration is not None


def test_the_demo_shows_its_damage():
    subject = make_demo_model("fashion_vit", create_model("fashion_vit"), bundled_examples(), "...")
    study = inspect_picture(subject, subject.examples[0].picture, ["tome"], 0.65)
    assert subject.measure == ToyMeasure()
    assert f"<dt>toy gap</dt><dd>{study.columns[0].damage:.4f}</dd>" in inspection_html(subject, study, [], None)


def test_it_is_in_the_documents():
    make_encoders = runpy.run_path(str(Path(__file__).parents[2] / "docs/make_encoders.py"))
    row = "| whose first outputs are all that is read | `toy` | near %; toy gap | `--max-gap`, `--min-near` |"
    assert row in make_encoders["measures"]()
