"""Does a run that was killed, again and again, end with the files of one that was not?

    python benchmarks/stress.py --times 20 --seconds 1800

`gtp-vit finetune`, `compare` and `tune` on the model inside the package, with images in files, as a journal is kept
for these only. Each is run once without a kill; then it is killed with SIGKILL at random moments after it has begun to
write, and started again until it ends by itself. The files that are left must be the same byte for byte, but for dates
and times (TIMES). Exit code 1 if anything differs, fails or was never killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from gtp_vit.models import bundled

IMAGES = 64
LOOKS = 0.01  # seconds between two looks at the files
HANGS = 1200  # seconds after which a run that nobody kills is taken to hang
WORK = {
    "finetune": [
        *("--method", "gtp", "--propagate", "14", "--epochs", "2", "--batch-size", "16", "--micro-batch", "16"),
        *("--save-every", "1", "--log-every", "1", "--repeats", "1", "--device", "cpu", "--output", "out"),
    ],
    "compare": ["--methods", "gtp", "tome", "--macs", "0.8", "--rounds", "0", "-b", "8", "--output", "out"],
    "tune": ["--macs", "0.8", "--search-passes", "12", "--images", "40", "--output", "out/recipe.json"],
}
# What says when a run was made and how long it took; the value behind each is left out.
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
TIMES = {
    "*.json": rf'"(?:date|seconds|minutes|images_per_second|[a-z_]*time[a-z_]*)": (?:"[^"]*"|{NUMBER}|null)',
    "*.html": r"20\d\d-\d\d-\d\dT[\d:+.]+",
    "log.csv": rf",{NUMBER}(?=\r?\n)",  # the last column is images per second
    "*.jsonl": rf'"(?:seconds|images_per_second|[a-z_]*time[a-z_]*)": (?:{NUMBER}|null)',
}
PRIVATE = (".lock", "tensorboard", "state.pt")  # to resume from
TIMED = ("finetune-calm/out/report.html", "finetune-wild/out/report.html")  # a page with a plot of images per second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="kills of each command")
    parser.add_argument("--seconds", type=float, default=1800, help="no new kill after this; 0 = no limit")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--commands", nargs="+", choices=sorted(WORK), default=sorted(WORK))
    flags = parser.parse_args()
    if flags.times < 1 or flags.seconds < 0:
        parser.error("--times must be at least 1, and --seconds not negative")
    end = time.monotonic() + flags.seconds if flags.seconds else float("inf")
    with tempfile.TemporaryDirectory(prefix="gtp-vit-stress-") as folder:
        write_images(Path(folder) / "images")
        problems = [
            problem
            for command in flags.commands
            for problem in stress(Path(folder), command, flags.times, end, random.Random(f"{flags.seed} {command}"))
        ]
    for problem in problems:
        print(f"DIFFERS {problem}")
    print("verdict: " + (f"{len(problems)} problems" if problems else "every file is that of an undisturbed run"))
    return 1 if problems else 0


def write_images(folder: Path) -> None:
    """Some images of the package as files, a folder for each class."""
    images, classes = bundled.sample_images()
    for number, (image, label) in enumerate(zip(images[:IMAGES], classes[:IMAGES].tolist(), strict=True)):
        path = folder / f"{label:02d}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze(0).numpy()).save(path)


def stress(folder: Path, command: str, times: int, end: float, chance: random.Random) -> Iterator[str]:
    """How the files of a command that was killed differ from those of one that was not."""
    calm, wild = folder / f"{command}-calm", folder / f"{command}-wild"
    code, said, work = run(calm, command, folder, None)
    if code != 0:
        yield f"{command}: without a kill it ends with {code}: {said}"
        return
    print(f"{command}: writes for {work:.1f} s without a kill", flush=True)
    killed = ended = 0
    while killed < times and time.monotonic() < end:
        moment = chance.uniform(0, work)
        code, said, _ = run(wild, command, folder, moment)
        if code == -signal.SIGKILL:
            killed += 1
            left = len(list(wild.rglob("*")))
            print(f"{command}: kill {killed} of {times}, {moment:.2f} s at work, {left} files and folders", flush=True)
            continue
        if code != 0:
            yield f"{command}: started again after {killed} kills it ends with {code}: {said}"
            return
        ended += 1
        print(f"{command}: ended by itself before {moment:.2f} s", flush=True)
        yield from differences(command, calm, wild)
        shutil.rmtree(wild)  # the next kills are of a new run
    if not killed:
        yield f"{command}: never killed; give more --seconds"
        return
    code, said, _ = run(wild, command, folder, None)
    if code != 0:
        yield f"{command}: started again after {killed} kills it ends with {code}: {said}"
        return
    yield from differences(command, calm, wild)
    print(f"{command}: {killed} kills at work, {ended + 1} runs that ended", flush=True)


def run(place: Path, command: str, folder: Path, moment: float | None) -> tuple[int, str, float]:
    """Run a command in a folder of its own; killed, with all that it started, so many seconds after it began to write.

    Returns exit code, last words and for how many seconds it wrote.
    """
    place.mkdir(exist_ok=True)
    before = state(place)
    words = ["--data-dir", str(folder / "images"), "--workers", "0", "--threads", "1", *WORK[command]]
    began = None
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "gtp_vit.cli.app", command, "fashion_vit", *words],
            cwd=place,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        start = time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if began is None and state(place) != before:
                began = now
            if now - start > HANGS or (moment is not None and began is not None and now - began >= moment):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(LOOKS)
        said.seek(0)
        words_said = " ".join(said.read().split())[-300:]
    return process.returncode, words_said, 0 if began is None else time.monotonic() - began


def state(place: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files; a lock is no work."""
    files = {}
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            if path.is_file() and path.suffix != ".lock":
                status = path.stat()
                files[str(path)] = (status.st_size, status.st_mtime_ns)
    return files


def differences(command: str, calm: Path, wild: Path) -> Iterator[str]:
    """Every file that is in one only, or is another but for dates and times."""
    one, other = contents(calm), contents(wild)
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"{command}: {name} is there {'without' if name in one else 'after'} kills only"
        elif one[name] != other[name]:
            yield f"{command}: {name} is another one after kills"
    print(f"{command}: compared {', '.join(sorted(one.keys() & other.keys()))}", flush=True)
    if not one:
        yield f"{command}: it has written nothing"


def contents(folder: Path) -> dict[str, bytes]:
    """The files that a run leaves, without dates and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not set(parts) & set(PRIVATE) and not any(path.match(timed) for timed in TIMED):
            content = path.read_bytes()
            for pattern, times in TIMES.items():
                if path.match(pattern):
                    content = re.sub(times.encode(), b"", content)
            found["/".join(parts)] = content
    return found


if __name__ == "__main__":
    sys.exit(main())
