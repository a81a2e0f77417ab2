"""The hot spots as operators, each with a native kernel and a pure-torch twin of the same signature.

`choose` is the one place that decides which of the two runs, `why_not_native` says why, `status` what this machine has.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from gtp_vit.errors import SettingError, check_name
from gtp_vit.kernels import native
from gtp_vit.kernels.arguments import AttentionInputs, NormParams
from gtp_vit.kernels.checks import DTYPES
from gtp_vit.kernels.dispatch import Checks, Operator, Ops
from gtp_vit.kernels.reference import attention
from gtp_vit.tensors import is_exporting

Kernels = Literal["auto", "native", "torch"]
KERNELS = ("auto", "native", "torch")
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
    "choose",
    "status",
]


def check(kernels: Kernels, *, quiet: bool = False) -> None:
    """Raise SettingError for kernels that are not available, and warn of slow ones; called by `patch`."""
    check_name("kernels", kernels, KERNELS)
    if kernels == "torch":
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


def select_ops(kernels: Kernels, x: Tensor) -> Ops:
    """The operators of this forward pass, whose embedded tokens are `x`."""
    if why_not_native(kernels, x) is None:
        return Ops.NATIVE
    return Ops.PORTABLE if is_exporting() else Ops.TORCH


def why_not_native(kernels: Kernels, x: Tensor) -> str | None:
    """Why the native kernels cannot run on `x` now; None = they can."""
    if kernels == "torch":
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
    """Which kernels run on this machine."""
    if native.LOAD_ERROR is not None:
        return f"torch operators: {native.LOAD_ERROR}"
    return f"native, {native.INSTRUCTION_SET}{'' if native.MULTITHREADED else f'; on {SINGLE_THREADED}'}"


def _transformed() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
