"""torch's nn.MultiheadAttention in parts: what torchvision's and open_clip's blocks share.

One weight holds the rows of queries, keys and values, and the module never calls its layers: it reads their weights.

Shapes: B batch, N tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.backbones.modules import module_unsupported_reason, project_packed
from gtp_vit.core.attention import QKV


def unsupported_reason(attn: Any) -> str | None:
    """None if it is self-attention as `project` and `output` repeat it, else what it has, to be read after its name."""
    if type(attn) is not nn.MultiheadAttention:
        return f" is {type(attn).__module__}.{type(attn).__name__}; supported: torch.nn.MultiheadAttention"
    if attn.in_proj_weight is None:
        return " has separate weights for queries, keys and values (kdim, vdim); supported: one in_proj_weight"
    if attn.bias_k is not None or attn.bias_v is not None or attn.add_zero_attn:
        return " adds keys of its own (add_bias_kv, add_zero_attn); supported: neither"
    if not attn.batch_first:
        return " expects tokens before the batch; supported: batch_first=True"
    if not isinstance(attn.out_proj, nn.Linear):
        return f".out_proj is {type(attn.out_proj).__name__}; supported: torch.nn.Linear"
    kinds, tensors = (nn.MultiheadAttention,), {"in_proj_weight", "in_proj_bias"}
    return module_unsupported_reason(attn, kinds, {"out_proj"}, tensors)


def project(attn: Any, y: Tensor, queries: int | None) -> QKV:
    """Queries, keys and values of the normed features y [B, N, C]; only the first queries if asked."""
    q, k, v = project_packed(attn.in_proj_weight, attn.in_proj_bias, y, attn.num_heads, queries)
    return QKV(q, k, v, attn.head_dim**-0.5, attn.dropout if attn.training else 0.0)


def output(attn: Any, out: Tensor) -> Tensor:
    """The projection of the output of attention, [B, N, C]."""
    return F.linear(out, attn.out_proj.weight, attn.out_proj.bias)
