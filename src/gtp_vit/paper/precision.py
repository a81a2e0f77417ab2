"""Decisions about tokens are made in float32: half precision would give ties, and edges to the wrong tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Section 3.2.2, not in the paper: a context in which products on the tensor's device keep its own precision."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Section 3.2.2, not in the paper: half precision as float32, as the native kernels compute; others as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
