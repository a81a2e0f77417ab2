"""The fourth set of operators, Triton kernels on a GPU: whether they can run, and what goes into them.

`why_not` is asked once a forward pass, by `kernels.select_ops`. The kernels are in the folder gpu, which stands for
itself; it is imported, with Triton, when a pass uses it for the first time.

None has run on a GPU yet. They are checked in Triton's interpreter, and compiled for GPUs of capability 8.0 to 9.0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gtp_vit.kernels.arguments import (
    AttentionInputs,
    AttentionResult,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPPlusMergeResult,
    GTPReduceInputs,
    GTPReduceResult,
    NormParams,
)
from gtp_vit.kernels.checks import check_dtypes_and_devices

if TYPE_CHECKING:
    from types import ModuleType

MIN_VERSION, MAX_VERSION = (
    (3, 9),
    (3, 9),
)  # versions of Triton with which the kernels are checked; torch 2.15 brings 3.9
CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_TOKENS, MAX_CHANNELS, MAX_HEAD = 4096, 4096, 256  # image tokens, channels, channels of a head


def why_not(device: torch.device, dtype: torch.dtype, patches: int = 0, channels: int = 0) -> str | None:
    """Why the Triton kernels cannot run on such tokens; None = they can.

    Gradients and exported programs, for which the reference operators run whatever is asked, are not looked at.
    """
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        return f"the tokens are on {device.type}; Triton kernels are for CUDA"
    problem = why_not_here(device.index, on_cpu=device.type == "cpu")
    if problem is not None:
        return problem
    if dtype not in DTYPES:
        return f"{dtype}; Triton kernels are for float32, float16 and bfloat16"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on; convert the model instead, e.g. model.half()"
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on, and no GPU has shown yet that theirs are the same bits"
    if patches > MAX_TOKENS or channels > MAX_CHANNELS:
        return f"{patches} patches of {channels} channels; Triton kernels take up to {MAX_TOKENS} of {MAX_CHANNELS}"
    return None


def why_not_here(index: int | None = None, *, on_cpu: bool = False) -> str | None:
    """Why no Triton kernel can run on this machine, on its current GPU or that of this index; None = one can.

    `on_cpu`: where Triton interprets.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's CUDA wheels for Linux bring it"
    version = importlib.metadata.version("triton")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not MIN_VERSION <= numbers <= MAX_VERSION:
        versions = ".".join(map(str, MIN_VERSION)) + (
            "" if MAX_VERSION == MIN_VERSION else " to " + ".".join(map(str, MAX_VERSION))
        )
        return f"Triton {version} is installed; the kernels are checked with {versions}, which torch 2.15 brings"
    if not on_cpu:
        if torch.version.hip is not None:
            return "this torch is for ROCm; the kernels are checked for CUDA"
        if not torch.cuda.is_available():
            return "torch finds no CUDA GPU"
        capability = torch.cuda.get_device_capability(index)
        if capability < CAPABILITY:
            actual, least = (".".join(map(str, numbers)) for numbers in (capability, CAPABILITY))
            return f"the GPU has compute capability {actual}; Triton kernels need {least} or higher"
    try:
        _gpu()
    except Exception as error:  # whatever Triton raises on import
        return f"Triton kernels cannot be imported: {type(error).__name__}: {error}".split("\n")[0]
    return None


def is_interpreting() -> bool:
    """Does Triton run its kernels on a CPU, in Python? For tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


# torch.compile calls these while it traces, and takes their answers as they are: the mark that
# torch.compiler.assume_constant_result sets, which would import the compiler now.
why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_interpreting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _gpu() -> ModuleType:
    from gtp_vit.kernels import gpu

    return gpu


def takes_tokens(inputs: GTPReduceInputs | GTPPlusMergeInputs | GTPPlusMergeByProbeInputs) -> bool:
    """May these go into a Triton kernel? Raises where they are on several devices."""
    integers = (2, 3, 5) if isinstance(inputs, GTPReduceInputs) else ()  # scores, cells, neighbours
    check_dtypes_and_devices("triton", inputs, integers)
    return inputs.x.dtype in DTYPES and inputs.branch.dtype in DTYPES and inputs.removed > 0 and inputs.x.numel() > 0


def takes_attention(inputs: AttentionInputs) -> bool:
    """The same; without statistics, or with a threshold, there is nothing for them to do."""
    check_dtypes_and_devices("triton", inputs, ())
    q, k = inputs.q, inputs.k
    asked = any(inputs.statistic_mask) and inputs.removed == 0
    return asked and q.dtype in DTYPES and k.shape[3] <= MAX_HEAD and k.numel() > 0 and q.numel() > 0


def attention(inputs: AttentionInputs) -> AttentionResult:
    """Torch's fused attention, and the statistics asked for without a map."""
    from gtp_vit.kernels import reference

    q, k, v, size, scale, _, queries, asked, heads, first = inputs
    out = reference.fused_attention(q[:, :, :queries], k, v, scale, size)
    size = None if size is None else size.float()
    return AttentionResult(out, _gpu().attention_statistics(q, k, size, scale, *asked, heads, first))


def gtp_reduce(inputs: GTPReduceInputs) -> GTPReduceResult:
    size = None if inputs.size is None else inputs.size.float()
    return GTPReduceResult(
        *_gpu().propagate(*inputs._replace(scores=inputs.scores.float(), size=size, root=inputs.root.float()))
    )


def gtp_plus_merge(inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
    return _merge(inputs, inputs.importance, inputs.size, None, None)


def gtp_plus_merge_by_probe(
    inputs: GTPPlusMergeByProbeInputs, weight_floor: float, weight_power: float
) -> GTPPlusMergeResult:
    """Features are averaged by size times (importance + floor) to this power."""
    size, probe = inputs.size.float(), inputs.probe.float()
    protected = None if inputs.protected is None else inputs.protected.float()
    importance, weight = _gpu().importance_by_probe(
        inputs.x, inputs.branch, probe, size, protected, weight_floor, weight_power
    )
    return _merge(inputs, importance, size, weight, protected)


def _merge(
    inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs,
    importance: Tensor,
    size: Tensor | None,
    weight: Tensor | None,
    protected: Tensor | None,
) -> GTPPlusMergeResult:
    merged = _gpu().merge_by_cost(
        *(inputs.x, inputs.branch, importance.float(), None if size is None else size.float(), weight, protected),
        *(inputs.removed, inputs.importance_floor, inputs.preserve_norm, *inputs.norm),
    )
    return GTPPlusMergeResult(*merged)


def merge_similar(
    tokens: tuple[Tensor, Tensor, Tensor | None], keys: Tensor, removed: int, keep_order: bool, norm: NormParams
) -> GTPPlusMergeResult:
    """ToMe's step, from features [B, N, C], their attention branch, sizes [B, M] and keys [B, H, M, D] of the image
    tokens."""
    x, branch, size = tokens
    gpu, prefix = _gpu(), x.shape[1] - keys.shape[2]
    kept, gone, target = gpu.match_pairs(keys, prefix, removed, keep_order)
    size = None if size is None else size.float()
    x_out, normed, new_size = gpu.merge_pairs(x, branch, size, kept, gone, target, *norm)
    return GTPPlusMergeResult(x_out, normed, new_size, kept, gone, target)
