"""Adding a command is one file, tests/support/toy_command.py, and one line in COMMANDS."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import gtp_vit.cli.commands
from gtp_vit.cli import sources
from gtp_vit.cli.app import COMMANDS, ExitCode, main

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _registered(tmp_path, monkeypatch):
    """The line, and the file among the commands."""
    folder = tmp_path / "cli/commands"
    folder.mkdir(parents=True)
    shutil.copy(SUPPORT / "toy_command.py", folder / "toy.py")
    monkeypatch.setattr(gtp_vit.cli.commands, "__path__", [*gtp_vit.cli.commands.__path__, str(folder)])
    monkeypatch.setitem(COMMANDS, "toy", "Say a word")
    monkeypatch.delitem(sys.modules, "gtp_vit.cli.commands.toy", raising=False)


def test_the_list_of_commands_has_it(capsys):
    assert main(["--help"]) == ExitCode.OK
    assert "toy        Say a word" in capsys.readouterr().out


def test_its_help_is_made_of_its_fields(capsys):
    assert main(["toy", "--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    for part in ("usage: gtp-vit toy [WORD] [flags]", "--times INT", "How often it is said.", "(default: 3)"):
        assert part in shown


def test_it_answers_as_others_do(capsys):
    assert main(["toy", "ping", "--times", "2"]) == ExitCode.OK
    assert capsys.readouterr().out.count("ping") == 2
    assert main(["toy", "ping", "--times", "2", "--json"]) == ExitCode.OK
    assert "ping" in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["toi"], "did you mean 'toy'"),
        (["toy", "--tims", "2"], "did you mean '--times'"),
        (["toy", "--times", "two"], "--times"),
        (["toy", "--times", "-1"], "--times"),
    ],
    ids=" ".join,
)
def test_mistakes_get_one_line(words, hint, capsys):
    assert main(words) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert hint in said
    assert said.count("\n") == 1


def test_a_misspelled_flag_is_found_by_reading_its_file(tmp_path, monkeypatch):
    """Before it is imported, and torch with it."""
    shutil.copytree(sources.PACKAGE / "cli", tmp_path / "package/gtp_vit/cli")
    shutil.copy(SUPPORT / "toy_command.py", tmp_path / "package/gtp_vit/cli/commands/toy.py")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "package/gtp_vit")
    with pytest.raises(gtp_vit.GTPError, match="did you mean '--times'"):
        sources.check_flag_names("toy", ["--tims", "2"])
