"""Common parts of the blocks of timm's models: the check of their modules, and some arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gtp_vit.backbones.modules import call_unless_identity, module_unsupported_reason

POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")  # x + norm(attention(x)), x + norm(mlp(x))
# Token-wise MLPs; GlobalResponseNormMlp, for one, mixes tokens.
MLPS = ("Mlp", "GluMlp", "SwiGLU", "SwiGLUPacked")
PROJECTIONS = ("qkv", "q_proj", "k_proj", "v_proj", "proj")


class SupportedTypes(NamedTuple):
    """Types of the modules that blocks may consist of."""

    blocks: tuple[type, ...]
    attentions: tuple[type, ...]
    block_children: set[str]  # children and tensors of a block
    attention_children: set[str]  # children and tensors of its attention


def blocks_unsupported_reason(blocks: Sequence[Any], kinds: SupportedTypes) -> str | None:
    """None if every block is made of known parts, else what is not known."""
    for index, block in enumerate(blocks):
        reason = _block_unsupported_reason(block, kinds)
        if reason is not None:
            return f"blocks[{index}]{reason}"
    return None


def _block_unsupported_reason(block: Any, kinds: SupportedTypes) -> str | None:
    reason = module_unsupported_reason(block, kinds.blocks, kinds.block_children, kinds.block_children)
    if reason is not None:
        return reason
    known = kinds.attention_children
    reason = module_unsupported_reason(block.attn, kinds.attentions, known, known)
    if reason is not None:
        return f".attn{reason}"
    if not any(is_timm_layer(block.mlp, name) for name in MLPS):
        return f".mlp is {type(block.mlp).__name__}; supported: {', '.join(MLPS)}"
    for name in PROJECTIONS:
        layer = getattr(block.attn, name, None)
        if layer is not None and not isinstance(layer, nn.Linear):
            return f".attn.{name} is {type(layer).__module__}.{type(layer).__name__}; supported: torch.nn.Linear"
    return None


def attention_input(block: Any, x: Tensor) -> Tensor:
    """The input of a block's attention."""
    return x if is_post_norm(block) else block.norm1(x)


def attention_output(attn: Any, out: Tensor) -> Tensor:
    """The rest of timm's attention after the product with the values."""
    if hasattr(attn, "norm"):
        out = call_unless_identity(attn.norm, out)
    return call_unless_identity(attn.proj_drop, attn.proj(out))


def attention_dropout(attn: Any) -> float:
    return attn.attn_drop.p if attn.training else 0.0


def mlp_output(block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
    """MLP and norm of a block, in its order."""
    if is_post_norm(block):
        return block.norm2(block.mlp(x))
    return block.mlp(block.norm2(x) if normed is None else normed)


def is_post_norm(block: nn.Module) -> bool:
    return type(block).__name__ in POST_NORM


def is_timm_layer(module: nn.Module, name: str) -> bool:
    return type(module) is getattr(sys.modules["timm.layers"], name, None)
