"""Converters in environments of their own: what is missing is said in one line, and nothing half-made is left."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from gtp_vit import GTPError, export
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.engines import ENGINES
from gtp_vit.engines.converter import READY, Converter
from gtp_vit.engines.executorch import ExecuTorch
from gtp_vit.testing import families

TOY = Converter("toy", ("toy-converter==1.0",), ("sys",), 0.5, 3, "toy_script.py")


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("TOY", "LITERT", "EXECUTORCH"):
        monkeypatch.delenv(f"GTP_VIT_{name}_PYTHON", raising=False)


@pytest.fixture
def program(tmp_path):
    """program(lines): a program of the shell in the place of Python."""

    def make(lines):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return path

    return make


def test_what_is_missing_is_said_with_size_time_and_both_ways_to_get_it():
    assert TOY.missing() == (
        "needs toy-converter==1.0 in an environment of their own (0.5 GB, about 3 minutes): gtp-vit export --format "
        "toy --install-converter makes one, or name its Python with --converter-python or GTP_VIT_TOY_PYTHON"
    )


def test_a_python_that_is_named_is_asked_for_its_modules(monkeypatch, tmp_path):
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", sys.executable)
    assert TOY.missing() is None
    lacking = dataclasses.replace(TOY, modules=("sys", "no_such_module")).missing()
    python = sys.executable
    assert lacking == f"needs no_such_module for {python}: {python} -m pip install toy-converter==1.0"
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", str(tmp_path / "nowhere"))
    assert "has no Python at" in TOY.missing()


def test_a_python_that_does_not_start_is_not_told_to_install_anything(monkeypatch, program):
    python = program("echo 'no such library' >&2; exit 127")
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", str(python))
    assert TOY.missing() == (
        f"cannot use {python}: it stopped: no such library; set --converter-python or GTP_VIT_TOY_PYTHON to another "
        "Python"
    )


def test_versions_are_those_of_the_python_that_is_named(monkeypatch):
    assert TOY.versions() == {}
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", sys.executable)
    named = dataclasses.replace(TOY, requirements=("numpy==0.1", "torch==0.1"))
    here = {name: importlib.metadata.version(name) for name in ("numpy", "torch")}
    assert named.versions() == {"numpy": here["numpy"], "torch of the converter": here["torch"]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("echo first >&2; echo 'ValueError: no such operator' >&2; exit 1", "stopped: ValueError: no such operator"),
        ("kill -9 $$", "was ended by signal 9"),
        ("exit 3", "stopped: code 3, no message"),
    ],
    ids=["error", "killed", "silent"],
)
def test_a_converter_that_fails_is_one_line(monkeypatch, program, lines, message):
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", str(program(lines)))
    with pytest.raises(GTPError, match=f"the converter of toy {message}"):
        TOY.call("convert")


def test_its_python_finds_no_package_of_ours(monkeypatch, program, tmp_path):
    monkeypatch.setenv("GTP_VIT_TOY_PYTHON", str(program('echo "$@"')))
    words = TOY.call("convert", tmp_path).split()
    assert words[0] == "-I"
    assert words[1].endswith("engines/toy_script.py")
    assert words[2:] == ["convert", str(tmp_path)]


def test_an_installation_is_announced_and_kept(monkeypatch):
    commands, said = [], []

    def done(command, **_):
        commands.append(command)
        TOY.folder.mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("gtp_vit.engines.converter.subprocess.run", done)
    TOY.install(said.append)
    assert said == [f"installing toy-converter==1.0 into {TOY.folder}: 0.5 GB, about 3 minutes"]
    assert commands[0][1:3] == ["-m", "venv"]
    assert commands[1][1:] == ["-m", "pip", "install", "--quiet", "toy-converter==1.0"]
    assert TOY.python() == TOY.folder / "bin/python"
    TOY.install(said.append)
    assert len(commands) == 2


@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_an_installation_that_does_not_end_leaves_nothing(monkeypatch, how):
    def run(command, **_):
        TOY.folder.mkdir(parents=True, exist_ok=True)
        (TOY.folder / "half").touch()
        if "pip" in command and how == "is interrupted":
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, "pip" in command, "", "ERROR: no matching distribution")

    monkeypatch.setattr("gtp_vit.engines.converter.subprocess.run", run)
    with pytest.raises(KeyboardInterrupt if how == "is interrupted" else GTPError) as caught:
        TOY.install(lambda _: None)
    if how == "fails":
        assert "stopped: ERROR: no matching distribution; its folder was deleted" in str(caught.value)
    assert not TOY.folder.exists()
    assert TOY.python() is None


def test_an_installation_that_was_killed_is_not_used():
    (TOY.folder / "bin").mkdir(parents=True)
    (TOY.folder / "bin/python").symlink_to(sys.executable)
    assert TOY.python() is None
    (TOY.folder / READY).touch()
    assert TOY.python() == TOY.folder / "bin/python"


def test_a_disk_without_room_is_said_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10**8))
    with pytest.raises(GTPError, match=r"has 0\.1 GB free, and toy needs 0\.8; set XDG_CACHE_HOME"):
        TOY.install(lambda _: None)
    assert not TOY.folder.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "executorch"), "1.5 GB, about 5 minutes): gtp-vit export --format executorch --install-conv"),
        (("--format", "executorch", "--converter-python", "nowhere"), "executorch has no Python at"),
        (("--format", "executorch", "--converter-python", "x", "--install-converter"), "give one of them"),
        (("--format", "onnx", "--converter-python", "x"), "onnxruntime converts in this Python; remove --converter"),
        (("--format", "onnx", "--install-converter"), "onnxruntime converts in this Python; remove --install-conv"),
    ],
    ids=["missing", "nowhere", "both", "named for nothing", "installed for nothing"],
)
def test_flags_of_converters(monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.setenv("GTP_VIT_EXECUTORCH_PYTHON", "")  # so that what the command sets is undone
    assert main(["export", *words, "--output", str(tmp_path / "out")]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lines", ["exit 1", "kill -9 $$"], ids=["fails", "killed"])
def test_an_export_whose_converter_ends_leaves_no_file(monkeypatch, program, tmp_path, lines):
    asked = '[ "$2" = -c ] && exit 0'  # for its modules
    monkeypatch.setenv("GTP_VIT_EXECUTORCH_PYTHON", str(program(f"{asked}\n{lines}")))
    model = families.make("vit")
    model.blocks = model.blocks[:1]
    (tmp_path / "out").mkdir()
    with pytest.raises(GTPError, match=r"the converter of executorch (stopped|was ended)"):
        export(model, tmp_path / "out" / "x.pte")
    assert not list((tmp_path / "out").iterdir())


def test_cards_for_phones_have_kotlin_and_swift_and_say_that_these_were_not_run():
    for engine in (ENGINES["litert"], ExecuTorch()):
        python, kotlin, swift = engine.examples("x.file", "f32")
        assert [python.language, kotlin.language, swift.language] == ["python", "kotlin", "swift"]
        assert all("not run here" in each.note for each in (kotlin, swift))
        assert all("x.file" in each.code for each in (python, kotlin, swift))
