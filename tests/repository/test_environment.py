"""What `make demo` and `make test` install, and when: .ci/environment.py, with pip replaced."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The script on a copy of all that it looks at, in a folder with a space in its name."""
    root = tmp_path / "a copy"
    for pattern in ("pyproject.toml", "setup.py", "constraints*.txt", "src/gtp_vit/kernels/sources.py", "src/**/cpp/*"):
        for path in ROOT.glob(pattern):
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "make_venv", lambda folder: folder.mkdir(exist_ok=True))
    return module


@pytest.fixture
def installed(environment, monkeypatch):
    """What was installed: the words of each call."""
    calls = []
    monkeypatch.setattr(environment, "run", lambda folder, constraints, text, *words: calls.append(words))
    return calls


def set_up(environment, *groups, constraints="constraints.txt"):
    folder = environment.ROOT / ".venv"
    environment.make(folder, environment.ROOT / constraints, *(groups or ("",)))
    return folder


def test_the_demo_installs_the_package_alone_and_the_tests_add_their_tools(environment, installed):
    set_up(environment)
    assert not [words for words in installed if "--group" in words]
    assert any("--editable" in words for words in installed)
    installed.clear()
    set_up(environment, "dev")
    assert installed == [("--group", "dev")]


def test_nothing_is_installed_twice(environment, installed):
    set_up(environment, "dev")
    installed.clear()
    set_up(environment, "dev")
    set_up(environment)
    assert installed == []


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "constraints.txt", "setup.py", "src/gtp_vit/kernels/cpp/parallel.h"]
)
def test_a_change_installs_again(environment, installed, changed):
    set_up(environment, "dev")
    installed.clear()
    with open(environment.ROOT / changed, "a") as file:
        file.write("\n")
    set_up(environment, "dev")
    assert any("--editable" in words for words in installed)
    assert ("--group", "dev") in installed


def test_what_was_interrupted_goes_on(environment, installed, monkeypatch):
    set_up(environment)
    installed.clear()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(environment, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            set_up(environment, "dev")
    set_up(environment, "dev")
    assert installed == [("--group", "dev")]


def test_of_two_at_once_the_second_waits_and_installs_nothing(environment, monkeypatch, capsys):
    begun, calls = threading.Event(), []

    def install(*_):
        begun.set()
        time.sleep(0.2)
        calls.append(1)

    monkeypatch.setattr(environment, "run", install)
    first = threading.Thread(target=set_up, args=(environment,))
    first.start()
    begun.wait()
    set_up(environment)
    first.join()
    assert len(calls) == 2  # what builds, and the package
    assert "waiting for another process" in capsys.readouterr().out


def test_the_lock_is_free_again_after_a_failure(environment, monkeypatch):
    def fail(*_):
        raise environment.Failure("no network")

    monkeypatch.setattr(environment, "run", fail)
    with pytest.raises(environment.Failure):
        set_up(environment)
    with open(environment.ROOT / ".venv.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_failure_is_one_line_with_pips_own_reason(environment, tmp_path):
    command = [sys.executable, "-c", "print('ERROR: no matching distribution'); raise SystemExit(1)"]
    with pytest.raises(environment.Failure, match=r"could not install things: ERROR: no matching.*network\?") as error:
        environment.command_line(tmp_path, "things (many)", command)
    assert "\n" not in str(error.value)


def test_too_little_space_is_said_before_anything_is_installed(environment, installed, monkeypatch):
    usage = shutil.disk_usage(environment.ROOT)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: usage._replace(free=int(2e9)))
    with pytest.raises(environment.Failure, match=r"has 2.0 GB left, and up to 8 GB are needed"):
        set_up(environment)
    assert installed == []


def test_an_old_python_is_refused(environment, monkeypatch, capsys):
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 1, "final", 0))
    monkeypatch.setattr(environment.sys, "argv", ["environment.py", ".venv", "constraints.txt"])
    assert environment.main() == 1
    assert capsys.readouterr().err == (
        "environment: Python 3.9.1 is too old; gtp-vit needs 3.10 or newer: make PYTHON=python3.12 ...\n"
    )


def test_a_half_made_environment_is_made_anew(tmp_path):
    """A real one, and its Python gone."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    broken = tmp_path / "venv/bin/python"
    broken.parent.mkdir(parents=True)
    broken.symlink_to("/nowhere/python")
    assert module.pip_version(broken) == ()


def test_make_help_lists_the_targets():
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    targets = [line.split()[1] for line in done.stdout.splitlines()]
    assert targets[:3] == ["help", "demo", "page"]
    assert {"test", "test-slow", "test-all", "test-oldest", "docs", "package", "format"} <= set(targets)
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
