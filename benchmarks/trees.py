"""Is this tree as fast as another one? For changes that are not meant to cost time.

    python benchmarks/trees.py OLD/src src

Two processes, one for each tree, take turns: while one runs the other waits, and ratios are of neighbouring turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = [
    ("deit_tiny_patch16_224", "gtp_plus", 1),
    ("deit_small_patch16_224", "gtp_plus", 1),
    ("deit_small_patch16_224", "gtp_plus", 8),
    ("deit_small_patch16_224", "gtp", 1),
    ("deit_small_patch16_224", "gtp", 8),
    ("deit_small_patch16_224", "tome", 8),
    ("deit_small_patch16_224", "evit", 8),
]
ROUNDS = 41


def worker() -> None:
    """Read a case, then time one forward pass for each line that comes in."""
    import timm
    import torch

    import gtp_vit

    name, method, batch = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    fast = gtp_vit.patch(timm.create_model(name).eval(), gtp_vit.METHODS[method]())
    images = torch.randn(batch, 3, 224, 224)
    passes = max(1, 8 // batch)
    with torch.inference_mode():
        for _ in range(3):
            fast(images)
        print(Path(gtp_vit.__file__).parent, flush=True)
        for _ in sys.stdin:
            fast(images)  # the other process has emptied the caches
            begin = time.perf_counter()
            for _ in range(passes):
                fast(images)
            print((time.perf_counter() - begin) / passes, flush=True)


def start(source: str, case: tuple[str, str, int]) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, "--worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(case), file=process.stdin, flush=True)
    used = process.stdout.readline().strip()
    if not used.startswith(str(Path(source).resolve())):
        sys.exit(f"{source} was not used, but {used}")
    return process


def turn(process: Any) -> float:
    print("go", file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    old, new = sys.argv[1:3]
    print("new / old: median of the ratios of neighbouring turns, and their quartiles")
    for case in CASES:
        first, second = start(old, case), start(new, case)
        ratios = []
        for index in range(ROUNDS):
            pair = (first, second) if index % 2 == 0 else (second, first)
            times = {process.pid: turn(process) for process in pair}
            ratios.append(times[second.pid] / times[first.pid])
        low, middle, high = statistics.quantiles(ratios, n=4)
        name, method, batch = case
        print(f"{name} {method} batch {batch}: {middle:.3f} ({low:.3f} .. {high:.3f})", flush=True)
        for process in (first, second):
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
