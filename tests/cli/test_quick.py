"""What needs no model is answered without torch; what is answered so is what the commands themselves would say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_vit
import gtp_vit_command
from gtp_vit.cli import models
from gtp_vit.cli.app import COMMANDS, Exit, main
from gtp_vit.cli.words import flags_of
from gtp_vit.methods import METHODS
from gtp_vit_command.flags import known_words

SOURCE = Path(gtp_vit.__file__).parent
TYPOS = [
    ["evalute"],
    ["evaluate", "--limt", "3"],
    ["tune", "--macss=0.6"],
    ["embed", "-q"],
    ["compare", "--metods", "gtp"],
    ["finetune", "--epoch", "3"],
    ["benchmark", "--method", "gtp", "--propagat", "3"],
    ["check", "--jsn"],
]


@pytest.mark.parametrize("words", TYPOS, ids=" ".join)
def test_a_typo_gets_the_same_answer_sooner(words, capsys):
    assert gtp_vit_command.quick_answer(words) == Exit.USAGE
    quick = capsys.readouterr().err
    assert main(words) == Exit.USAGE
    assert quick == capsys.readouterr().err


def test_help_is_the_same(capsys):
    for words, code in ((["--help"], Exit.OK), ([], Exit.USAGE)):
        assert gtp_vit_command.quick_answer(words) == code
        quick = capsys.readouterr().out
        assert main(words) == code
        assert quick == capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_that_exists_is_called_a_typo(command):
    import importlib

    found = vars(importlib.import_module(f"gtp_vit.cli.{command}"))[command.capitalize()]
    for method in METHODS.values():
        assert set(flags_of(found, method)[0]) <= known_words(SOURCE)
    assert gtp_vit_command.quick_answer([command, "--help"]) is None


def test_negative_numbers_values_and_good_words_are_left_to_the_command(capsys):
    for words in (["tune", "--macs", "-0.5"], ["evaluate", "--method", "tome", "--r", "3"], ["--version"]):
        assert gtp_vit_command.quick_answer(words) is None
    assert capsys.readouterr().err == ""


def test_it_takes_a_fraction_of_a_second_and_no_torch():
    code = (
        "import json, resource, sys, gtp_vit_command as g; g.main(['--help']); g.main(['evaluate', '--limt', '3']); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(json.dumps([used.ru_utime + used.ru_stime, 'torch' in sys.modules, 'gtp_vit' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == [False, False]
    assert seconds < 0.5


def test_ctrl_c_while_importing_is_one_line(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(gtp_vit_command, "quick_answer", interrupted)
    assert gtp_vit_command.main(["check"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "gtp-vit: interrupted; run it again\n"


def test_models_are_named_as_they_are_found(monkeypatch, capsys):
    seen = []

    def refusal(name):
        seen.append(capsys.readouterr().out)
        return "no" if name == "b" else None

    monkeypatch.setattr(models, "names", lambda pattern: ["a", "b", "c"])
    monkeypatch.setattr(models, "refusal", refusal)
    assert main(["models"]) == Exit.OK
    assert (seen, capsys.readouterr().out) == (["", "a\n", ""], "c\n")
    assert gtp_vit_command.quick_answer(["models"]) is None
    assert "building each model without weights" in capsys.readouterr().err
