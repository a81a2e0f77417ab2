"""environment: what this machine is, for bug reports and for knowing what a measured time means."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 64"


@dataclass(frozen=True)
class Environment:
    """Versions and hardware."""

    gtp_vit: str
    python: str
    torch: str
    timm: str
    system: str
    cpu: str
    threads: int
    instruction_sets: str
    accelerator: str
    kernels: str
    onednn_max_cpu_isa: str


def environment() -> Environment:
    """The environment of this process."""
    import torch

    from gtp_vit import kernels

    cuda = torch.cuda.is_available()
    return Environment(
        gtp_vit=importlib.metadata.version("gtp-vit"),
        python=platform.python_version(),
        torch=torch.__version__,
        timm=importlib.metadata.version("timm"),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
        instruction_sets=torch.backends.cpu.get_cpu_capability(),
        accelerator=torch.cuda.get_device_name() if cuda else "none",
        kernels=kernels.status(),
        onednn_max_cpu_isa=os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
    )


def bf16_verdict() -> str:
    """Does a bf16 product work here? Some virtual machines advertise AMX and then kill the process that uses it.

    Takes a few seconds: it is tried in a process of its own.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "does not answer within two minutes"
    if done.returncode == 0:
        return "works"
    if done.returncode < 0:
        return (
            f"KILLS THE PROCESS (signal {-done.returncode}): this machine advertises AMX and cannot run it; "
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts"
        )
    return f"fails: {(done.stderr.decode(errors='replace').strip().splitlines() or ['no message'])[-1]}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def commit() -> str:
    """The commit of the source tree that runs; an installed package may lie inside an unrelated repository."""
    source = Path(__file__).resolve().parents[3]
    asked = ["git", "-C", str(source), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    here = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # hooks set GIT_DIR
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, env=here)
    except (OSError, subprocess.CalledProcessError):
        return "installed package"
    root, short = done.stdout.splitlines()
    return short if Path(root) == source else "installed package"
