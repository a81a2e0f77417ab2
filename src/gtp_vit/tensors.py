"""Small tensor operations used all over the library.

Decisions about tokens are made in float32: half precision would give ties, and edges to the wrong tokens.

Shapes: B batch, N tokens, M scored tokens, K kept, P removed, D anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context that switches autocast off on the tensor's device."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision converted to float32, in which the native kernels compute; other dtypes unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] for x [B, N, D] and index [B, K].

    One index_select on the flattened batch is twice as fast as a gather on a CPU.
    """
    batch, length = x.shape[:2]
    start = torch.arange(batch, device=index.device).unsqueeze(1) * length
    rows = x.reshape(batch * length, *x.shape[2:]).index_select(0, (index + start).flatten())
    return rows.unflatten(0, (batch, index.shape[1]))


def split(scores: Tensor, removed: int) -> tuple[Tensor, Tensor]:
    """Which tokens stay, those with the largest scores, and which `removed` tokens go; scores [B, M].

    Returns the indices of both, [B, K] and [B, P], each in ascending order. Of equal scores the earlier token stays,
    whatever the batch: a stable sort depends on nothing but the row. NaN counts as large.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    kept = scores.shape[-1] - removed
    return order[:, :kept].sort(dim=-1).values, order[:, kept:].sort(dim=-1).values
