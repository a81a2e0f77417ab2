"""The hot spots as operators: each has native kernels, Triton kernels, and a reference implementation in torch.

`select_ops` is the one place that decides which of them runs, `why_not_native` and `why_not_triton` say why, `status`
what this machine has.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from gtp_vit.errors import InputError, SettingError, check_name
from gtp_vit.kernels import native, triton_set
from gtp_vit.kernels.arguments import AttentionInputs, NormParams
from gtp_vit.kernels.checks import DTYPES
from gtp_vit.kernels.dispatch import Checks, Operator, Ops
from gtp_vit.kernels.reference import attention
from gtp_vit.tensors import counts_launches, is_exporting

Kernels = Literal["auto", "native", "triton", "torch"]
KERNELS = ("auto", "native", "triton", "torch")
SINGLE_THREADED = (
    "one thread only: torch has loaded no OpenMP runtime with GOMP_parallel, whose threads they would share; "
    "kernels='torch' may be faster here"
)

__all__ = [
    "AttentionInputs",
    "Checks",
    "Kernels",
    "NormParams",
    "Operator",
    "Ops",
    "attention",
    "check",
    "describe",
    "select_ops",
    "status",
]


def check(kernels: Kernels, *, quiet: bool = False) -> None:
    """Raise SettingError for kernels that are not available, and warn of slow ones; called by `patch`."""
    check_name("kernels", kernels, KERNELS)
    if kernels == "torch":
        return
    if kernels == "triton":
        problem = triton_set.why_not_here(on_cpu=triton_set.is_interpreting())
        if problem is not None:
            raise SettingError(f"kernels='triton' is not available: {problem}; use kernels='auto'")
        return
    if native.LOAD_ERROR is None:
        if not (quiet or native.MULTITHREADED or torch.get_num_threads() == 1):
            warnings.warn(f"gtp_vit's native kernels run on {SINGLE_THREADED}", stacklevel=3)
        return
    if kernels == "native":
        raise SettingError(f"kernels='native' is not available: {native.LOAD_ERROR}; use kernels='auto'")
    if not quiet:
        warnings.warn(
            f"gtp_vit runs on torch operators, slower than its native kernels: {native.LOAD_ERROR}", stacklevel=3
        )


def select_ops(kernels: Kernels, x: Tensor, prefix: int = 0) -> Ops:
    """The operators of this forward pass, whose embedded tokens are `x` [B, N, C], `prefix` of them no patches.

    Raises InputError if kernels="triton" cannot run on them.
    """
    if why_not_triton(kernels, x, prefix) is None:
        return Ops.TRITON
    if why_not_native(kernels, x) is None:
        return Ops.NATIVE
    if is_exporting():
        return Ops.PORTABLE
    if torch.is_grad_enabled() or not counts_launches(x):
        return Ops.TORCH
    if torch.compiler.is_compiling():  # for a GPU: the set for engines moves half of the bytes of the others
        return Ops.PORTABLE
    return Ops.TORCH if _transformed() else Ops.LEAN


def why_not_triton(kernels: Kernels, x: Tensor, prefix: int = 0) -> str | None:
    """Why the Triton kernels cannot run on the tokens `x` [B, N, C] now; None = they can.

    Gradients and exported programs always use the reference operators; for anything else that stands in the way of
    kernels="triton" InputError is raised.
    """
    if kernels != "triton" and (kernels != "auto" or x.device.type != "cuda"):
        return "as the model was patched" if kernels != "auto" else "the tokens are not on CUDA"
    if torch.is_grad_enabled():
        return "gradients are on; use torch.no_grad() or torch.inference_mode()"
    if is_exporting():
        return "an exported program should run where gtp_vit is not installed"
    patches, channels = (x.shape[1] - prefix, x.shape[2]) if x.dim() == 3 else (0, 0)
    problem = triton_set.why_not(x.device, x.dtype, patches, channels)
    if problem is None and not torch.compiler.is_compiling() and _transformed():
        problem = "torch.func, torch.jit or forward-mode differentiation is active"
    if problem is not None and kernels == "triton":
        raise InputError(f"kernels='triton' cannot run: {problem}; patch with kernels='auto'")
    return problem


def why_not_native(kernels: Kernels, x: Tensor) -> str | None:
    """Why the native kernels cannot run on `x` now; None = they can."""
    if kernels in ("torch", "triton"):
        return "as the model was patched"
    if native.LOAD_ERROR is not None:
        return native.LOAD_ERROR
    if torch.is_grad_enabled():
        return "gradients are on; use torch.no_grad() or torch.inference_mode()"
    if kernels == "auto" and is_exporting():
        return "an exported program should run where gtp_vit is not installed"
    if x.device.type != "cpu" or x.dtype not in DTYPES:
        return f"{x.dtype} on {x.device.type}; native kernels are for float32 and bfloat16 on a CPU"
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in DTYPES:
        return f"autocast to {torch.get_autocast_dtype('cpu')}"
    if not torch.compiler.is_compiling() and _transformed():
        return "torch.func, torch.jit or forward-mode differentiation is active"
    return None


def status() -> str:
    """The kernels that run on this machine."""
    if native.LOAD_ERROR is not None:
        return f"torch operators: {native.LOAD_ERROR}"
    return f"native, {native.INSTRUCTION_SET}{'' if native.MULTITHREADED else f'; on {SINGLE_THREADED}'}"


def describe(kernels: Kernels, weight: Tensor) -> str:
    """The kernels a model with this weight would use now, and if torch operators, why."""
    on_gpu = kernels == "triton" or weight.device.type == "cuda"
    try:
        reason = why_not_triton(kernels, weight.flatten()) if on_gpu else why_not_native(kernels, weight)
    except InputError as error:
        return f"none: {error}"
    if reason is not None:
        return f"torch operators: {reason}"
    return "Triton" if on_gpu else status()


def _transformed() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
