"""What needs no model is answered without torch; what is answered so is what the parser itself would say."""

import importlib
import itertools
import json
import re
import subprocess
import sys

import pytest

from gtp_vit.backbones import known_backbones
from gtp_vit.cli import app, sources
from gtp_vit.cli.app import COMMANDS, ExitCode, main
from gtp_vit.cli.commands import models
from gtp_vit.cli.parser import flags_of
from gtp_vit.errors import UnknownNameError
from gtp_vit.methods import METHODS
from gtp_vit.models import bundled
from gtp_vit.models.factory import names

TYPOS = [
    ["evaluate", "--limt", "3"],
    ["tune", "--macss=0.6"],
    ["embed", "-q"],
    ["compare", "--metods", "gtp"],
    ["finetune", "--epoch", "3"],
    ["benchmark", "--method", "gtp", "--propagat", "3"],
    ["check", "--jsn"],
]


@pytest.mark.parametrize("words", TYPOS, ids=" ".join)
def test_a_typo_gets_the_same_answer_sooner(words, capsys, monkeypatch):
    with pytest.raises(UnknownNameError) as quick:
        sources.check_flag_names(words[0], words[1:])
    monkeypatch.setattr(app, "check_flag_names", lambda *words: None)
    assert main(words) == ExitCode.USAGE
    assert capsys.readouterr().err == f"gtp-vit: {quick.value}\n"
    assert "unknown flag" in str(quick.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_that_exists_is_called_a_typo(command, capsys):
    assert main([command, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    own = set(re.findall(r"^  (?:(-\w), )?(--[\w-]+)", text.replace("[no-]", ""), re.M))
    for spelling in filter(None, itertools.chain(*own)):
        sources.check_flag_names(command, [spelling])
    for method in METHODS.values() if "--method METHOD" in text else ():
        for flag in flags_of(method):
            for spelling in flag.spellings():
                sources.check_flag_names(command, ["--method", method.name, spelling])


def test_negative_numbers_values_recipes_and_foreign_methods_are_left_to_the_parser():
    for words in (
        ["tune", "--macs", "-0.5"],
        ["evaluate", "--method", "tome", "--r", "3"],
        ["macs", "--method", "recipe.json", "--whatever", "3"],
        ["macs", "--method=a_method_of_another_package", "--its-setting", "3"],
        ["evaluate", "--limt", "--help"],
    ):
        sources.check_flag_names(words[0], words[1:])


def test_a_command_whose_flags_cannot_be_read_is_left_to_the_parser(tmp_path, monkeypatch):
    (tmp_path / "cli/commands").mkdir(parents=True)
    (tmp_path / "methods").mkdir()
    (tmp_path / "cli/commands/toy.py").write_text(
        "class Toy(make_dataclass('More', [('size', int)])):\n    width: int = 3\n"
    )
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    sources.check_flag_names("toy", ["--size", "3"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], ExitCode.OK),
        (["--version"], ExitCode.OK),
        (["evalute"], ExitCode.USAGE),
        (["evaluate", "--limt", "3"], ExitCode.USAGE),
        (["benchmark", "--method", "gtp", "--propagat", "3"], ExitCode.USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_it_takes_a_fraction_of_a_second_and_no_torch(words, code):
    program = (
        "import json, resource, sys; from gtp_vit.cli.app import main; code = main(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(json.dumps([code, used.ru_utime + used.ru_stime, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    given, seconds, torch = json.loads(done.stdout.splitlines()[-1])
    assert (given, torch) == (code, False)
    assert seconds < 0.5


def test_ctrl_c_while_importing_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["check"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "gtp-vit: interrupted; run it again\n"


PROGRAM = """
import importlib, signal, sys, time
from gtp_vit.cli.app import main

class Callback:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def work(*_):
    Callback()
    begun = time.monotonic()
    while time.monotonic() - begun < 30:
        pass
    raise AssertionError("nobody interrupted it")

command = type(sys)("command")
command.main = work
importlib.import_module = work if sys.argv[1] == "import" else lambda _: command
sys.exit(main(["check"]))
"""


@pytest.mark.parametrize("when", ["import", "work"])
def test_ctrl_c_that_python_only_prints_is_not_lost(when):
    """While libraries are imported it may come in a callback of Python's own, which cannot raise."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, when], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "gtp-vit: interrupted; run it again\n")


def test_the_first_model_is_named_before_libraries_list_theirs(monkeypatch):
    def listed(self):
        raise AssertionError("this takes a second")

    for family in known_backbones().values():
        monkeypatch.setattr(type(family), "model_names", listed)
    assert next(names("*")) == bundled.NAME


def test_models_are_named_as_they_are_found(monkeypatch, capsys):
    printed = []

    def refusal(name):
        printed.append(capsys.readouterr().out)
        return "no" if name == "b" else None

    monkeypatch.setattr(models, "names", lambda pattern: ["a", "b", "c"])
    monkeypatch.setattr(models, "unsupported_reason", refusal)
    assert main(["models"]) == ExitCode.OK
    assert (printed, capsys.readouterr().out) == (["", "a\n", ""], "c\n")
