"""timm's Eva: EVA, EVA-02, DINOv3, Perception Encoder, RoPE-ViT and others, most of them with rotary positions.

Positions are in rotary.py; here is what else differs from timm's VisionTransformer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.modules import (
    call_unless_identity,
    class_unsupported_reason,
    project,
    project_packed,
    split_heads,
)
from gtp_vit.backbones.rotary import RotaryTable, keys_for_methods, rotate
from gtp_vit.backbones.timm_blocks import (
    SupportedTypes,
    attention_dropout,
    attention_input,
    attention_output,
    blocks_unsupported_reason,
    is_post_norm,
    is_timm_layer,
    mlp_output,
)
from gtp_vit.backbones.timm_vit import MODEL, TimmViT
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Part
from gtp_vit.core.tokens import Tokens

BLOCK = {"norm1", "attn", "gamma_1", "drop_path1", "norm2", "mlp", "gamma_2", "drop_path2"}
ATTENTION = {
    *("qkv", "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm"),
    *("attn_drop", "norm", "proj", "proj_drop"),
}
TENSORS = {"cls_token", "reg_token", "pos_embed"}  # of the model itself
ROPES = ("RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "RotaryEmbeddingMixed")


class TimmEva(TimmViT):
    """Backbone of timm's Eva."""

    module, classes = "eva", ("Eva",)
    models = "DINOv3, EVA, EVA-02, Perception Encoder, RoPE-ViT"

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import timm_evas

        return timm_evas(depth)

    def unsupported_reason(self, model: Any) -> str | None:
        eva, layers = sys.modules["timm.models.eva"], sys.modules["timm.layers"]
        kinds = SupportedTypes(
            (eva.EvaBlock, eva.EvaBlockPostNorm), (eva.EvaAttention, layers.AttentionRope), BLOCK, ATTENTION
        )
        reason = class_unsupported_reason(model, eva.Eva) or self._model_unsupported_reason(model, {*MODEL, "rope"})
        around = reason or self._tensors_unsupported_reason(model)
        return around or self._rotary_unsupported_reason(model) or blocks_unsupported_reason(model.blocks, kinds)

    def _tensors_unsupported_reason(self, model: Any) -> str | None:
        for name in [*model._parameters, *model._buffers]:
            if name not in TENSORS:
                return f"the model has a tensor {name} that is not known"
        for index, block in enumerate(model.blocks):
            if getattr(block.attn, "qkv_bias_separate", False):
                return f"blocks[{index}].attn.qkv_bias_separate is True; supported: False"
        return None

    def _rotary_unsupported_reason(self, model: Any) -> str | None:
        if model.rope is not None and not any(is_timm_layer(model.rope, name) for name in ROPES):
            return f"rope is {type(model.rope).__name__}; supported: {', '.join(ROPES)}"
        if model.global_pool == "token" and model.num_prefix_tokens == 0:
            return "global_pool is 'token', but the model has no class or register token; use 'avg'"
        for index, block in enumerate(model.blocks):
            heads = block.attn.num_heads
            keys = getattr(block.attn, "num_kv_heads", heads)
            if keys != heads:
                return (
                    f"blocks[{index}].attn has {keys} heads of keys for {heads} of queries (grouped queries); "
                    "supported: as many of each"
                )
            if getattr(block.attn, "gate", None) is not None:
                return f"blocks[{index}].attn.gate scales the output of attention; supported: attention without it"
        return None

    def embed(self, model: Any, images: Tensor) -> Tokens:
        x, grid = self.patches(model, images)
        x, rope = model._pos_embed(x)
        x, prefix = model.norm_pre(x), model.num_prefix_tokens
        cell = self.cells(x, grid)
        table = None if rope is None else RotaryTable.from_cells(rope, prefix, cell)
        return Tokens(x, cell, prefix, grid, position_table=table)

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(
            tokens.x,
            rope=None if tokens.position_table is None else tokens.position_table.for_image_tokens(layer, tokens),
        )

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        attn = block.attn
        q, k, v = queries_keys_values(attn, attention_input(block, tokens.x), queries)
        q, k = call_unless_identity(attn.q_norm, q), call_unless_identity(attn.k_norm, k)
        dropout = attention_dropout(attn)
        if tokens.position_table is None:
            return QKV(q, k, v, attn.scale, dropout)
        rows, half = tokens.position_table.for_all_tokens(layer, tokens), getattr(attn, "rotate_half", False)
        if queries is None or queries > tokens.prefix:
            q = rotate(q, rows[..., : q.shape[2], :], half)
        turned, metric = rotate(k, rows, half).to(v.dtype), keys_for_methods(k.to(v.dtype))
        return QKV(q.to(v.dtype), turned, v, attn.scale, dropout, method_keys=metric)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        out = attention_output(block.attn, out)
        return call_unless_identity(
            block.drop_path1, block.norm1(out) if is_post_norm(block) else _layer_scale(block.gamma_1, out)
        )

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        out = mlp_output(block, x, normed)
        return call_unless_identity(block.drop_path2, out if is_post_norm(block) else _layer_scale(block.gamma_2, out))


def queries_keys_values(attn: Any, y: Tensor, queries: int | None) -> tuple[Tensor, ...]:
    """As `modules.project`, of timm's attention with one fused layer or three, with biases of its own or without."""
    if attn.qkv is None:
        inputs = ((attn.q_proj, y[:, :queries]), (attn.k_proj, y), (attn.v_proj, y))
        return tuple(split_heads(layer(tensor), 1, attn.num_heads)[0] for layer, tensor in inputs)
    if getattr(attn, "q_bias", None) is None:
        return project(attn, y, queries)
    bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    return project_packed(attn.qkv.weight, bias, y, attn.num_heads, queries)


def _layer_scale(gamma: Tensor | None, out: Tensor) -> Tensor:
    """LayerScale."""
    return out if gamma is None else gamma * out
