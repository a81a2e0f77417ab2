"""Adding a measure is one file, tests/support/toy_measure.py, and one line: commands, search, pages and documents."""

import json
import runpy
from html import escape
from pathlib import Path

import pytest
import torch

from gtp_vit import GTPError, calibrate, create_model, patch, read_recipe
from gtp_vit.cli import sources
from gtp_vit.cli.app import Exit, main
from gtp_vit.demo.demo_model import embedded_examples, make_subject
from gtp_vit.demo.inspection import look
from gtp_vit.demo.markup import study_html
from gtp_vit.methods.gtp_plus.learning.sensitivity import learn_sensitivity
from gtp_vit.metrics.registry import MEASURES, measure_of
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
    return bundled.normalise(bundled.test_images()[0][:count])


def answer(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == Exit.OK, err
    return json.loads(out)


@pytest.mark.parametrize("command", ["evaluate", "compare", "tune"])
def test_help_names_it_and_its_settings(command, capsys):
    assert main([command, "--help"]) == Exit.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "--measure {auto,toy,classes" in text
    assert "toy: the first outputs alone" in text
    assert "--first INT" in text
    assert "For --measure toy: how many outputs are read." in text


@pytest.mark.slow
def test_it_is_chosen_by_what_the_model_returns_and_refuses_other_models():
    assert measure_of(create_model("fashion_vit")) == ToyMeasure()
    small = create_model("fashion_vit")
    small.reset_classifier(5)
    assert measure_of(small).name == "classes"
    with pytest.raises(GTPError, match=r"5 outputs, and the toy reads one of ten, or measure it as classes"):
        measure_of(small, "toy")
    with pytest.raises(GTPError, match="first is a setting of toy"):
        measure_of(small, first=3)


def test_errors_name_its_settings_and_name(capsys):
    assert main(["evaluate", "--measure", "toi"]) == Exit.USAGE
    assert "did you mean 'toy'" in capsys.readouterr().err
    assert main(["evaluate", "--measure", "toy", "--frst", "3"]) == Exit.USAGE
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
    assert main([*words, *first]) == Exit.OK
    gaps = [answer(capsys, *words, *each)["rows"][1]["gap"] for each in (first, second)]
    assert gaps[0] != gaps[1]


@pytest.mark.slow
def test_compare_ranks_by_its_damage_and_plots_its_headline(tmp_path, capsys):
    words = ["compare", "--macs", "0.6", "--methods", "tome", "gtp", "--rounds", "0", *FEW]
    assert main([*words, "--output", str(tmp_path)]) == Exit.OK
    page = (tmp_path / "report.html").read_text()
    assert "Marked: the least toy gap." in page
    assert "near %" in page
    assert escape(ToyMeasure.meaning) in page


@pytest.mark.slow
@pytest.mark.parametrize("target", [("--macs", "0.7"), ("--max-gap", "0.9"), ("--min-near", "1")])
def test_its_bounds_are_targets_of_tune(target, tmp_path, capsys):
    path = tmp_path / "recipe.json"
    words = ["tune", "--method", "tome", "--images", "40", "--search-passes", "6", *target, "--output", str(path)]
    assert main(words) == Exit.OK, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "held-out toy gap" in shown
    assert ToyMeasure.meaning in shown
    stored = json.loads(path.read_text())
    assert stored["measured"]["measure"] == "toy"
    if target[0] == "--max-gap":
        assert stored["measured"]["figures"]["gap"] <= 0.9
    assert patch(create_model("fashion_vit"), read_recipe(path)) is not None


def test_its_targets_are_flags_and_fit_its_models_alone(capsys):
    assert main(["tune", "--help"]) == Exit.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-gap NUMBER" in text
    assert "at most this gap" in text
    assert main(["tune", "--measure", "classes", "--max-gap", "0.1", "--images", "40"]) == Exit.USAGE
    assert "max_gap does not fit" in capsys.readouterr().err
    assert main(["tune", "--max-gap", "200"]) == Exit.USAGE
    assert "--max-gap" in capsys.readouterr().err


@pytest.mark.slow
def test_calibration_asks_for_its_direction():
    model, few = create_model("fashion_vit"), images(40)
    by_toy, by_classes = (learn_sensitivity(model, few, measure=name).calibration.probe for name in ("toy", "classes"))
    assert not torch.equal(by_toy, by_classes)
    recipe = calibrate(model, few, measure="toy", macs=0.7)
    assert patch(model, recipe).reduction.method.calibration is not None


def test_the_demo_shows_its_damage():
    subject = make_subject("fashion_vit", create_model("fashion_vit"), embedded_examples(), "...")
    study = look(subject, subject.examples[0].picture, ["tome"], 0.65)
    assert subject.measure == ToyMeasure()
    assert f"<dt>toy gap</dt><dd>{study.columns[0].damage:.4f}</dd>" in study_html(subject, study, [], None)


def test_it_is_in_the_documents():
    make_encoders = runpy.run_path(str(Path(__file__).parents[2] / "docs/make_encoders.py"))
    row = "| whose first outputs are all that is read | `toy` | near %; toy gap | `--max-gap`, `--min-near` |"
    assert row in make_encoders["measures"]()
