"""Tables and help texts in the width of the terminal: figures stay whole, texts are on the left."""

import os
import re
import subprocess
import sys

import pytest

from gtp_vit.cli import help as help_texts
from gtp_vit.cli import render
from gtp_vit.cli.app import COMMANDS, main
from gtp_vit.cli.render import NUMERIC_CELL, table_lines

COLUMNS = ["method", "GMACs", "top-1 %", "change", "KL to unreduced", "speed-up", "img/s", "settings"]
ROWS = [
    ["unreduced", "0.137", "91.50", "+0.00 [+0.00, +0.00]", "0.0000 [0.0000, 0.0000]", "not timed", "-", ""],
    ["gtp", "12.1091", "90.25", "-1.25 [-2.75, +0.25]", "nan [nan, nan]", "1.07 (1.04 .. 1.14)", "1195.6", "GTP()"],
    [
        "ats",
        "0.1",
        "9.9",
        "-5.00",
        "0.1",
        "1",
        "2",
        "ATS(budget='keep:0.869140625:3:4:5:6:7:8:9:10:11', layers=(1, 2))",
    ],
]


def figures(text):
    return sorted(re.findall(r"\d[\d.]*", text))


@pytest.mark.parametrize("room", [40, 60, 80, 100, 130, 160, 220])
def test_every_figure_is_whole_in_every_width(room):
    lines = table_lines(COLUMNS, ROWS, room)
    assert max(map(len, lines)) <= room
    blocks = any(line.startswith("method: ") for line in lines)
    repeated = len(ROWS) - 1 if blocks else 0  # headings have a figure too: top-1
    wanted = [cell for row in ROWS for cell in row] + COLUMNS + ["top-1"] * repeated
    assert figures(" ".join(lines)) == figures(" ".join(wanted))


def test_texts_are_on_the_left_and_figures_on_the_right():
    head, _, *body = table_lines(["name", "count", "what"], [["a", "1", "x"], ["long name", "100", "longer"]], 80)
    assert head == "name       count  what"
    assert body == ["a              1  x", "long name    100  longer"]


def test_texts_are_broken_where_a_table_is_too_wide_and_very_narrow_ones_are_blocks():
    assert len(table_lines(COLUMNS, ROWS, 220)) == 2 + len(ROWS)
    assert table_lines(COLUMNS, ROWS, 130)[0].startswith("method ")
    assert len(table_lines(COLUMNS, ROWS, 130)) > 2 + len(ROWS)
    assert table_lines(COLUMNS, ROWS, 80)[0] == "method: unreduced"


def test_a_figure_is_broken_only_before_its_bracket():
    lines = table_lines(["a", "b"], [["x", "0.0123 [0.0100, 0.0200]"]], 25)
    assert [line.split() for line in lines[2:]] == [["x", "0.0123"], ["[0.0100,", "0.0200]"]]


def test_a_table_without_rows():
    assert len(table_lines(["a", "b"], [], 80)) == 2


def test_brackets_are_text_and_not_markup(capsys):
    render.print_table("[bold]title[/bold]", ["a [x]", "b"], [["[nan, nan]", "nan [nan, nan]"]])
    out = capsys.readouterr().out
    assert "[bold]title[/bold]" in out
    assert "nan [nan, nan]" in out


def test_progress_is_one_line_on_a_terminal_and_few_lines_in_a_log(capsys, monkeypatch):
    with render.progress("evaluating") as update:
        update(1, 10)
    assert capsys.readouterr().err == ""  # a log gets a line each half minute
    monkeypatch.setattr(render, "LOG_SECONDS", 0)
    with render.progress("evaluating") as update, render.status("exporting") as step:
        update(5, 10, best="KL 0.1")
        update(7)
        step("checking")
    timed, counted, said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"evaluating: 5 of 10, 0\.0 minutes left  KL 0\.1", timed)
    assert (counted, said) == ("evaluating: 7", "exporting: checking")


def test_progress_on_a_terminal_is_gone_at_the_end_and_has_no_colours(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    with render.progress("evaluating") as update:
        update(5, 10, best="\x1b[31m" + "long " * 30)
    written = capsys.readouterr().err
    assert "\x1b" not in written
    assert max(map(len, written.split("\r"))) < 60
    assert written.endswith(f"\r{'':<59}\r")
    assert "evaluating: 5 of 10" in written


def in_terminal(columns, *words):
    """What a command shows in a terminal of so many columns."""
    pty = pytest.importorskip("pty")
    outer, inner = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "gtp_vit.cli.app", *words],
        stdout=inner,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(inner)
    shown = b""
    while True:
        try:
            piece = os.read(outer, 65536)
        except OSError:  # the command has ended
            break
        if not piece:
            break
        shown += piece
    os.close(outer)
    assert running.wait() == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "").splitlines()


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_the_figures_that_a_pipe_shows(capsys):
    words = ["macs", "deit_small_patch16_224", "--remove", "8"]
    assert main(words) == 0
    piped = capsys.readouterr().out
    shown = in_terminal(80, *words)
    assert max(map(len, shown)) <= 80
    assert figures(" ".join(shown)) == figures(piped)
    assert not any("…" in line for line in shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_to_the_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert main([command, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 72
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 77  # one example is longer than that


def test_long_examples_are_continued_as_a_shell_reads_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    line = "  gtp-vit evaluate vit_tiny_patch16_224 --pretrained --data-dir imagenet/val"
    made = help_texts.example(line)
    assert max(map(len, made.splitlines())) <= 50
    assert made.replace("\\\n", "").split() == line.split()


@pytest.mark.parametrize(
    ("cell", "is_figure"),
    [("1.07 (1.04 .. 1.14)", True), ("+0.5", True), ("", True), ("14 x 14", True), ("GTP()", False), ("P=8", False)],
)
def test_what_counts_as_a_figure(cell, is_figure):
    assert bool(NUMERIC_CELL.fullmatch(cell)) == is_figure
