"""Shared by backbones: calling a model's own modules, splitting heads.

Shapes: B batch, N tokens, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def through(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), but modules that do nothing are not called: at batch 1 such calls are a percent of the time."""
    idle = type(module) is nn.Identity or (type(module) is nn.Dropout and not module.training)
    return x if idle and not module._forward_hooks and not module._forward_pre_hooks else module(x)


def is_overridden(module: nn.Module, *, hooks: bool) -> bool:
    """Does calling this module do more than its class's forward? `hooks`: do hooks count?"""
    own = any(
        name in module.__dict__ for name in ("forward", "forward_features", "forward_head", "forward_intermediates")
    )
    return own or (hooks and bool(module._forward_hooks or module._forward_pre_hooks))


def is_plain_linear(layer: nn.Module) -> bool:
    """May its weight be used directly? Adapters, quantised and parametrised layers must be called."""
    return type(layer) is nn.Linear and not is_overridden(layer, hooks=True)


def project(attn: Any, y: Tensor, queries: int | None) -> tuple[Tensor, ...]:
    """Queries, keys and values of an attention with one fused layer `qkv`; only the first queries if asked."""
    if queries is None or not is_plain_linear(attn.qkv):
        q, k, v = split_heads(attn.qkv(y), 3, attn.num_heads)
        return q[:, :, :queries], k, v
    # Split the fused layer into its query rows and the rest.
    width = attn.num_heads * attn.head_dim
    weight, bias = attn.qkv.weight, attn.qkv.bias
    first, rest = (None, None) if bias is None else (bias[:width], bias[width:])
    (q,) = split_heads(F.linear(y[:, :queries], weight[:width], first), 1, attn.num_heads)
    return q, *split_heads(F.linear(y, weight[width:], rest), 2, attn.num_heads)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts H D] -> parts x [B, H, N, D]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)
