"""verify: is what the package does on this device right, and how fast is it? For GPUs, on which its authors have none.

Each check passes, fails, or cannot be made here; a check that raises has failed, and says with what. Everything but the
times can be tried on a CPU.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.kernels import describe, triton_set
from gtp_vit.patching import patch, tower_of
from gtp_vit.profiling.benchmark import Samples, Timing, interleave, speedups_over
from gtp_vit.profiling.operator_equality import OF_DEIT_S, Equality, Sizes, compare_operators
from gtp_vit.profiling.slicing import slicing_like

BATCH_SIZES = (1, 8, 64, 256)
MODES = ("eager", "compiled", "CUDA graph")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of outputs, relative to their largest
# Launches that a reducing layer may have above an unreduced one. Counted without a GPU, Triton kernels have at most 9
# (19 instead of 10), which are given a third more, as only a profiler shows what ATen splits; torch operators have 50.
MORE_ON_TRITON, MORE_ON_TORCH = 12, 50
FUSED_ATTENTION = ("flash", "fmha", "cudnn", "attention")  # in the names of kernels
Forward = Callable[[Tensor], object]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool | None  # None: it cannot be made here
    detail: str


@dataclass(frozen=True)
class Speed:
    """Times of one model in one mode at one batch size."""

    batch_size: int
    mode: str  # one of MODES
    model: str  # unreduced, slicing or the method
    timing: Timing
    peak_megabytes: float | None  # on a GPU


@dataclass
class Verification:
    """Everything that was found."""

    machine: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    operators: list[Equality] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    line: str = ""  # to paste

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]


def machine(device: torch.device, fast: nn.Module) -> dict[str, str]:
    """The device that is measured, and the kernels that run on it."""
    about = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about = {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GB",
            "multiprocessors": str(properties.multi_processor_count),
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            **_by_nvidia_smi(),
        }
    problem = triton_set.why_not(device, next(fast.parameters()).dtype)
    with torch.no_grad():
        about |= {
            "Triton": "runs" if problem is None else problem,
            "kernels": describe("auto", next(fast.parameters())),
        }
    return about


def _by_nvidia_smi() -> dict[str, str]:
    """Driver, clock and power limit; nothing where the program is not there."""
    names = {"driver": "driver_version", "clock": "clocks.max.sm", "power limit": "power.limit"}
    asked = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (part.strip() for part in done.stdout.splitlines()[0].split(",")), strict=False))


def verify(
    model: nn.Module,
    fast: nn.Module,
    images: Tensor,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    rounds: int = 20,
    sizes: Sizes = OF_DEIT_S,
    progress: Callable[[str], None] = lambda step: None,
) -> Verification:
    """All checks, then the times; `images` are those of the largest batch, on the device."""
    device = images.device
    report = Verification(machine(device, fast))
    with torch.no_grad(), eval_mode(model, fast):
        few = images[: min(8, len(images))]
        checks: dict[str, Callable[[], tuple[bool | None, str]]] = {
            "operators": lambda: _operators(device, sizes, report),
            "no synchronisation": lambda: no_synchronisation(fast, few),
            "launches": lambda: launches(model, fast, few),
            "CUDA graph": lambda: cuda_graph(fast, few),
            "torch.compile": lambda: compiled(fast, few),
        }
        for name, check in checks.items():
            progress(name)
            report.checks.append(_attempt(name, check))
        for size in batch_sizes:
            progress(f"speed at batch {size}")
            try:
                report.speeds += speeds(model, fast, images[:size], rounds=rounds, report=report)
            except torch.OutOfMemoryError:
                report.checks.append(
                    Check(f"speed at batch {size}", None, "not enough memory for all models and modes")
                )
    report.line = line_of(report, images.dtype)
    return report


def _attempt(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    try:
        return Check(name, *check())
    except Exception as error:  # whatever it is, it is what the report is for
        first = str(error).strip().splitlines() or ["no message"]
        return Check(name, False, f"{type(error).__name__}: {first[0]}")


def _operators(device: torch.device, sizes: Sizes, report: Verification) -> tuple[bool, str]:
    report.operators = compare_operators(device, sizes=sizes)
    wrong = [row for row in report.operators if not row.passed]
    if wrong:
        worst = wrong[0]
        where = f"{worst.operator}, {worst.dtype}, {worst.case} against the {worst.against}"
        how = f"{worst.different_tokens:.2%} other tokens, largest error {worst.largest_error:.1e}"
        return False, f"{len(wrong)} of {len(report.operators)} comparisons fail, first {where}: {how}" + (
            "" if worst.same_bits else ", other bits in another run"
        )
    largest = max((row.different_tokens for row in report.operators), default=0.0)
    return True, f"{len(report.operators)} comparisons, at most {largest:.2%} other tokens, the same bits in every run"


def no_synchronisation(fast: nn.Module, images: Tensor) -> tuple[bool | None, str]:
    """Torch raises where the host would wait for the GPU."""
    if images.device.type != "cuda":
        return None, f"there is nothing to wait for on {images.device.type}"
    fast(images)  # what is made once may wait
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(images)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True, "the host never waits in a forward pass"


def launches(model: nn.Module, fast: nn.Module, images: Tensor) -> tuple[bool | None, str]:
    """Kernels that the profiler sees, against those of the unreduced model and the budget of the reducing layers."""
    if images.device.type != "cuda":
        return None, f"nothing is launched on {images.device.type}"
    (plain, _), (own, attention) = _profiled(model, images), _profiled(fast, images)
    reduction = tower_of(fast).reduction
    on_triton = describe(reduction.kernels, next(fast.parameters())) == "Triton"
    budget = plain + (MORE_ON_TRITON if on_triton else MORE_ON_TORCH) * reduction.vit.depth
    allowed = f"{own} a forward pass, {plain} unreduced, at most {budget} allowed"
    return own <= budget, f"{allowed}; attention by {attention or 'no fused kernel'}"


def _profiled(model: nn.Module, images: Tensor) -> tuple[int, str]:
    """The number of kernels that a forward pass launches, and the name of attention's."""
    model(images)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        model(images)
        torch.cuda.synchronize()
    return _count_kernels([event.name for event in record.events() if event.device_type.name == "CUDA"])


def _count_kernels(names: Sequence[str]) -> tuple[int, str]:
    kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
    fused = [name for name in kernels if any(part in name.lower() for part in FUSED_ATTENTION)]
    return len(kernels), fused[0][:60] if fused else ""


def as_cuda_graph(model: nn.Module, images: Tensor) -> Forward:
    """The model as one captured graph for images of this shape; other images are copied into its input."""
    held = images.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(held)

    def replay(other: Tensor) -> object:
        held.copy_(other)
        graph.replay()
        return output

    return replay


def cuda_graph(fast: nn.Module, images: Tensor) -> tuple[bool | None, str]:
    """Captured with some images and replayed with others, it gives what eager mode gives."""
    if images.device.type != "cuda":
        return None, f"{images.device.type} has no CUDA graphs"
    replay = as_cuda_graph(fast, images)
    other = images.flip(0) * 0.5
    return _same_outputs(replay(other), fast(other), images.dtype)


def compiled(fast: nn.Module, images: Tensor, backend: str | None = None) -> tuple[bool, str]:
    """One graph, which gives what eager mode gives. Without a GPU it is traced and not compiled."""
    on_gpu = images.device.type == "cuda"
    backend = backend or ("inductor" if on_gpu else "eager")
    torch.compiler.reset()
    options = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    graph = torch.compile(fast, fullgraph=True, dynamic=False, backend=backend, **options)  # type: ignore[call-overload]
    for _ in range(3):  # the first passes warm up and capture
        output = graph(images)
    same, detail = _same_outputs(output, fast(images), images.dtype)
    return same, f"{detail}, in one graph" + ("" if on_gpu else "; traced, not compiled")


def _same_outputs(output: object, expected: object, dtype: torch.dtype) -> tuple[bool, str]:
    assert isinstance(output, Tensor)
    assert isinstance(expected, Tensor)
    scale = expected.float().abs().max().clamp(min=1e-6)
    apart = float((output.float() - expected.float()).abs().max() / scale)
    return apart <= TOLERANCE[dtype], f"largest difference from eager mode {apart:.1e} of the largest output"


def seconds_by_events(call: Callable[[], object]) -> float:
    """Seconds of a call on the GPU, by its own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def speeds(model: nn.Module, fast: nn.Module, images: Tensor, *, rounds: int, report: Verification) -> list[Speed]:
    """Unreduced, slicing and the method, in every mode that works here, all in turns."""
    name = tower_of(fast).reduction.method.name
    models = {"unreduced": model, name: fast}
    sliced = slicing_like(tower_of(fast).reducer)
    if sliced is not None:
        models["slicing"] = patch(model, sliced, quiet=True)
    on_gpu = images.device.type == "cuda"
    calls: dict[tuple[str, str], Forward] = {}
    for mode in MODES if on_gpu else MODES[:1]:
        for label, one in models.items():
            problem = _attempt("", lambda label=label, one=one, mode=mode: _prepare(calls, mode, label, one, images))  # type: ignore[misc]
            if problem.passed is False:
                where = f"{mode}, {label}, batch {len(images)}"
                report.checks.append(Check(where, None, problem.detail))
    samples = interleave(
        {f"{mode}|{label}": (lambda run=run: run(images)) for (mode, label), run in calls.items()},  # type: ignore[misc]
        rounds=rounds,
        seconds_of=seconds_by_events if on_gpu else None,
    )
    rows = []
    for mode in MODES:
        own: Samples = {label: samples[f"{mode}|{label}"] for kind, label in calls if kind == mode}
        if "unreduced" in own:
            rows += [
                Speed(len(images), mode, timing.name, timing, _peak(calls[mode, timing.name], images))
                for timing in speedups_over(own, "unreduced")
            ]
    return rows


def _prepare(
    calls: dict[tuple[str, str], Forward], mode: str, label: str, model: nn.Module, images: Tensor
) -> tuple[bool, str]:
    """Add the model in this mode to the calls."""
    run: Forward = model
    if mode == "compiled":
        run = torch.compile(model, fullgraph=True, dynamic=False)
    elif mode == "CUDA graph":
        run = as_cuda_graph(model, images)
    run(images)
    calls[mode, label] = run
    return True, ""


def _peak(run: Forward, images: Tensor) -> float | None:
    """The most memory of a pass, in MB."""
    if images.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(images.device)
    run(images)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(images.device) / 1e6


def kept_gain(rows: Sequence[Speed]) -> Mapping[tuple[int, str], float]:
    """The share of slicing's gain that the method keeps, by batch size and mode; only where slicing gains."""
    shares = {}
    for row in rows:
        bound = next((other for other in _beside(rows, row) if other.model == "slicing"), None)
        if row.model not in ("unreduced", "slicing") and bound is not None and bound.timing.speedup > 1.02:
            shares[row.batch_size, row.mode] = (row.timing.speedup - 1) / (bound.timing.speedup - 1)
    return shares


def _beside(rows: Sequence[Speed], row: Speed) -> list[Speed]:
    return [other for other in rows if (other.batch_size, other.mode) == (row.batch_size, row.mode)]


def line_of(report: Verification, dtype: torch.dtype) -> str:
    """One line to paste: the best mode at the batch size that is next to 64."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    state = "all checks passed" if not report.failed else f"FAILED: {', '.join(check.name for check in report.failed)}"
    methods = [row for row in report.speeds if row.model not in ("unreduced", "slicing")]
    about = f"{report.machine['device']}, {names.get(dtype, str(dtype))}"
    if not methods:
        return f"{about}: {state}"
    size = min({row.batch_size for row in methods}, key=lambda batch: abs(batch - 64))
    best = max((row for row in methods if row.batch_size == size), key=lambda row: row.timing.speedup)
    bound = next((row.timing.speedup for row in _beside(report.speeds, best) if row.model == "slicing"), None)
    slicing = "" if bound is None else f" (slicing {bound:.2f})"
    return f"{about}, batch {size}, {best.mode}: {best.model} {best.timing.speedup:.2f}{slicing}; {state}"
