"""gtp-vit tour: what `make demo` shows."""

import json
from pathlib import Path

import pytest

from gtp_vit.cli.app import ExitCode, main
from gtp_vit.cli.commands.tour import SHARE, in_one_sentence

ROOT = Path(__file__).parents[2]


def tour(tmp_path, *words):
    return main(["tour", "--limit", "24", "--rounds", "3", "--output", str(tmp_path / "out"), *words])


@pytest.mark.slow
def test_it_shows_three_methods_at_one_cost_in_80_columns(tmp_path, capsys):
    assert tour(tmp_path, "--json") == ExitCode.OK
    result = json.loads(capsys.readouterr().out)
    names = [row["method"] for row in result["rows"]]
    assert names == ["unreduced", "GTP (the paper)", "ToMe", "GTP+ (ours)"]
    assert {row["MACs"] for row in result["rows"][1:]} == {f"{SHARE:.0%}"}
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<img") == 3 * 3
    assert "What to see" in page


@pytest.mark.time_limit(8)
def test_it_says_what_to_see_and_what_to_type_next(tmp_path, capsys):
    assert tour(tmp_path) == ExitCode.OK
    out = capsys.readouterr().out
    table = out.splitlines()[2:8]
    assert table[0].startswith("method")
    assert max(map(len, table)) <= 80
    assert "What to see: at the same cost" in out
    assert "gtp-vit benchmark deit_small_patch16_224" in out


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"gtp": 0.1, "tome": 0.3}, "GTP (the paper) moves the answers least; ToMe moves them 3.0 times as far."),
        ({"gtp": 0.1, "tome": 0.0}, "ToMe does not move the answers at all."),
    ],
)
def test_the_sentence_says_who_is_best_here(damage, text):
    assert in_one_sentence(damage) == f"What to see: at the same cost {text}"


@pytest.mark.parametrize("words", [["--rounds", "2"], ["--limit", "-1"]])
def test_what_makes_no_sense_is_refused(tmp_path, capsys, words):
    assert main(["tour", *words, "--output", str(tmp_path)]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_it_is_what_make_demo_runs():
    assert "gtp-vit tour --output build/demo" in (ROOT / "Makefile").read_text()
