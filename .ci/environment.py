"""Makes a virtual environment with the package and, if asked, the tools for its tests: make demo, make test.

    python3 .ci/environment.py FOLDER CONSTRAINTS [GROUP]

Only what is missing is installed: a second call takes a blink and needs no network, one after Ctrl+C goes on, and of
two at the same time the second waits for the first. It needs the standard library only, as nothing is installed yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 10)
OLDEST_PIP = (25, 1)  # the first one that knows dependency groups
SPACE = 8  # GB that torch, with the CUDA packages it brings on Linux, and all tools need at the most
NATIVE = ("setup.py", "src/gtp_vit/kernels/sources.py", "src/gtp_vit/kernels/cpp/*")


class Failure(Exception):
    """What went wrong, in one line, and what to do."""


def main() -> int:
    folder, constraints, *groups = sys.argv[1:]
    try:
        if sys.version_info[:2] < OLDEST_PYTHON:
            version = ".".join(map(str, sys.version_info[:3]))
            raise Failure(f"Python {version} is too old; gtp-vit needs 3.10 or newer: make PYTHON=python3.12 ...")
        make(Path(folder).absolute(), ROOT / constraints, groups[0] if groups else "")
    except Failure as failure:
        print(f"environment: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nenvironment: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def make(folder: Path, constraints: Path, group: str) -> None:
    """Do the steps that are not done yet, one process at a time."""
    wanted = fingerprint(folder, constraints)
    stamps = [folder / name for name in ("package", group) if name]
    if all(is_done(stamp, wanted) for stamp in stamps):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is setting up {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        steps = [stamp for stamp in stamps if not is_done(stamp, wanted)]
        if not steps:
            return
        make_venv(folder)
        for stamp in steps:
            install(folder, constraints, "" if stamp.name == "package" else stamp.name)
            stamp.write_text(wanted)


def fingerprint(folder: Path, constraints: Path) -> str:
    """Of all that decides what is installed. An environment that was moved does not work, so its path counts."""
    native = sorted(path for pattern in NATIVE for path in ROOT.glob(pattern))
    parts = [str(folder).encode(), sys.version.encode()]
    parts += [path.read_bytes() for path in (ROOT / "pyproject.toml", constraints, *native)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_done(stamp: Path, wanted: str) -> bool:
    return stamp.is_file() and stamp.read_text() == wanted


def make_venv(folder: Path) -> None:
    """An environment whose Python and pip run; one that was left half-made is made anew."""
    python = folder / "bin/python"
    if python.exists() and pip_version(python):
        return
    say(f"a virtual environment in {folder.name}, of Python {'.'.join(map(str, sys.version_info[:2]))}")
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise Failure(
            f"{sys.executable} cannot make a virtual environment; on Debian and Ubuntu install the package "
            f"python3-venv ({(done.stderr or done.stdout).strip().splitlines()[-1]})"
        )


def pip_version(python: Path) -> tuple[int, ...]:
    """() where there is no pip that runs."""
    try:
        done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    except OSError:  # the Python that it links to is gone
        return ()
    version = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    return tuple(map(int, version.groups())) if version else ()


def install(folder: Path, constraints: Path, group: str) -> None:
    """The package, or the tools of a group."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < 1 or (free < SPACE and not (folder / "package").exists()):
        raise Failure(f"{folder.parent} has {free:.1f} GB left, and up to {SPACE} GB are needed; make some room")
    if group:
        run(folder, constraints, "tools for the tests: engines, libraries of models, lint, docs", "--group", group)
        return
    run(folder, constraints, "tools to build with", "setuptools>=77", "wheel")
    text = "torch, torchvision, timm and a few small packages (on Linux about 6 GB on disk); gtp-vit and its kernels"
    run(folder, constraints, text, "--no-build-isolation", "--editable", str(ROOT))
    if not list((ROOT / "src/gtp_vit/kernels").glob("_*.so")):
        say("no C++ compiler was found, so gtp-vit runs on torch's operators: the same results, slower")


def run(folder: Path, constraints: Path, text: str, *words: str) -> None:
    """Install, by uv where it is; its output goes to a file, which is shown where it fails."""
    python, uv = folder / "bin/python", shutil.which("uv")
    if uv:
        command = [uv, "pip", "install", "--python", python, "--quiet", "--constraint", constraints, *words]
    else:
        command = [python, "-m", "pip", "install", "--quiet", "--no-input", "--constraint", constraints, *words]
        if pip_version(python) < OLDEST_PIP:
            command_line(folder, "a newer pip", [python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1"])
    command_line(folder, text, command)


def command_line(folder: Path, text: str, command: list[str | Path]) -> None:
    log, downloads = folder / "install.log", folder / "downloads"
    downloads.mkdir(exist_ok=True)  # here they are seen to grow, and a small /tmp does not overflow
    inside = os.environ | {"TMPDIR": str(downloads)}
    with open(log, "w") as output, Ticker(folder, text):
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=inside, check=False)
    shutil.rmtree(downloads, ignore_errors=True)
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("ERROR", "error"))]
        reason = lines[-1] if lines else "see its last lines"
        what = text.partition(" (")[0]
        raise Failure(f"could not install {what}: {reason} ({log}). Is there a network? The same command tries again")


class Ticker:
    """Says what is being installed, and every few seconds how much has arrived."""

    def __init__(self, folder: Path, text: str, seconds: float = 15) -> None:
        self.folder, self.text, self.seconds = folder, text, seconds
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.tick, daemon=True)

    def __enter__(self) -> None:
        self.begin = time.monotonic()
        say(self.text)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.thread.join()

    def tick(self) -> None:
        while not self.end.wait(self.seconds):
            say(f"  {time.monotonic() - self.begin:.0f} s, {size_of(self.folder) / 1e9:.1f} GB in {self.folder.name}")


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder while others come and go."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_size
    return size


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
