"""timm's VisionTransformer: ViT, DeiT (also distilled), DeiT-3, AugReg, CLIP, DINOv2, SigLIP, GAP models, EVA-L.

The arithmetic of a block exists here a second time, because attention must hand back what it saw. So nothing is
guessed: `refusal` compares every class and every child with what this copy honours, and any other is refused.

timm is never imported by this file: a model that is a timm model has imported it already.

Shapes: B batch, N tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.images import check_images
from gtp_vit.backbones.parts import elementwise_macs, is_overridden, linear_macs, project, through
from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.attention import Projections
from gtp_vit.core.reducer import Elementwise, VitInfo
from gtp_vit.core.tokens import Tokens

# Children that the copied forward calls. `norm` of attention appeared during timm 1.0.
BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
ATTENTION = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}
MODEL = {
    *("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks", "norm", "attn_pool", "fc_norm"),
    *("head_drop", "head", "head_dist"),
}
# Token-wise MLPs; GlobalResponseNormMlp, for one, mixes tokens.
MLPS = ("Mlp", "GluMlp", "SwiGLU", "SwiGLUPacked")
POOLS_OF_PREFIX = {"token"}
POOLS_OF_IMAGE = {"", "avg", "avgmax", "max", "map"}


class TimmViT:
    """Backbone of timm's plain vision transformers."""

    forwards = TimmForwards

    def matches(self, model: nn.Module) -> bool:
        timm_vit = sys.modules.get("timm.models.vision_transformer")
        return timm_vit is not None and isinstance(model, timm_vit.VisionTransformer)

    def refusal(self, model: Any) -> str | None:
        models, vit = sys.modules["timm.models"], sys.modules["timm.models.vision_transformer"]
        if type(model) not in (vit.VisionTransformer, models.VisionTransformerDistilled):
            sharded = "; patch first, then shard" if type(model).__name__.startswith("FSDP") else ""
            return f"{type(model).__name__} is a subclass of VisionTransformer whose forward may be its own{sharded}"
        for name, child in model.named_children():
            if name not in MODEL:
                return f"the model has a module {name} ({type(child).__name__}) that is not known"
        if is_overridden(model, hooks=False):
            return "the model's forward was replaced on the instance, e.g. by a wrapper; patch first, then wrap"
        if not _is_timm_layer(model.patch_embed, "PatchEmbed"):
            return f"patch_embed is {type(model.patch_embed).__name__}; supported: PatchEmbed"
        if not isinstance(model.patch_drop, nn.Identity):
            return "patch_drop removes patches at random; create the model with patch_drop_rate=0"
        if model.global_pool not in POOLS_OF_PREFIX | POOLS_OF_IMAGE:
            return f"global_pool is {model.global_pool!r}; supported: {sorted(POOLS_OF_PREFIX | POOLS_OF_IMAGE)}"
        if model.attn_pool is not None and not _is_timm_layer(model.attn_pool, "AttentionPoolLatent"):
            return f"attn_pool is {type(model.attn_pool).__name__}; supported: AttentionPoolLatent"
        for index, block in enumerate(model.blocks):
            reason = self._block_refusal(block, vit)
            if reason is not None:
                return f"blocks[{index}]{reason}"
        return None

    def _block_refusal(self, block: Any, vit: Any) -> str | None:
        if type(block) is not vit.Block:
            return f" is {type(block).__name__}; supported: Block"
        if type(block.attn) is not vit.Attention:
            return f".attn is {type(block.attn).__name__}; supported: Attention"
        if not any(_is_timm_layer(block.mlp, name) for name in MLPS):
            return f".mlp is {type(block.mlp).__name__}; supported: {', '.join(MLPS)}"
        for known, owner, path in ((BLOCK, block, ""), (ATTENTION, block.attn, ".attn")):
            for name, child in owner.named_children():
                if name not in known:
                    return f"{path}.{name} ({type(child).__name__}) is not known"
            for name in [*owner._parameters, *owner._buffers]:
                return f"{path}.{name} (a tensor) is not known"
            if is_overridden(owner, hooks=True):
                return f"{path} has hooks or a forward of its own, which a reduced layer would not call; remove them"
        for name in ("qkv", "proj"):
            layer = getattr(block.attn, name)
            if not isinstance(layer, nn.Linear):
                return f".attn.{name} is {type(layer).__module__}.{type(layer).__name__}; supported: torch.nn.Linear"
        return None

    def describe(self, model: Any) -> VitInfo:
        block, prefix = model.blocks[0], model.num_prefix_tokens
        attn, dim = block.attn, model.embed_dim
        head, per_token = _head_macs(model)
        return VitInfo(
            depth=len(model.blocks),
            dim=dim,
            heads=attn.num_heads,
            head_dim=attn.head_dim,
            grid=tuple(model.patch_embed.grid_size),
            prefix=prefix,
            class_token=model.has_class_token,
            head_reads_image_tokens=self.head_reads_image_tokens(model),
            embed_macs_per_patch=model.patch_embed.proj.weight.numel(),
            embed_elementwise_macs_per_patch=0,
            linear_macs=(linear_macs(attn), linear_macs(block.mlp)),
            elementwise_macs=_block_elementwise(block),
            final_elementwise_macs=elementwise_macs(model.norm_pre, model.norm),
            head_macs=head,
            head_macs_per_token=per_token,
            head_reads_prefix_too=not model.global_pool or getattr(model, "pool_include_prefix", False),
            head_averages_image_tokens=model.global_pool == "avg" and not getattr(model, "pool_include_prefix", False),
            pooled_elementwise_macs=elementwise_macs(model.fc_norm),
        )

    def head_reads_image_tokens(self, model: Any) -> bool:
        return model.global_pool not in POOLS_OF_PREFIX or model.attn_pool is not None

    def embed(self, model: Any, images: Tensor) -> Tokens:
        """Patches, position embedding and prefix tokens, by the model's own modules."""
        check_images(model, model.patch_embed.proj, images)
        x = model.patch_embed(images)
        grid = (x.shape[1], x.shape[2]) if model.dynamic_img_size else tuple(model.patch_embed.grid_size)
        x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        cell = torch.arange(grid[0] * grid[1], device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), model.num_prefix_tokens, grid)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def saves_memory(self, model: Any) -> bool:
        return model.grad_checkpointing

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None) -> Projections:
        attn = block.attn
        q, k, v = project(attn, block.norm1(tokens.x), queries)
        dropout = attn.attn_drop.p if attn.training else 0.0
        return Projections(through(attn.q_norm, q), through(attn.k_norm, k), v, attn.scale, dropout)

    def output(self, block: Any, out: Tensor) -> Tensor:
        attn = block.attn
        if hasattr(attn, "norm"):
            out = through(attn.norm, out)
        return through(block.drop_path1, through(block.ls1, through(attn.proj_drop, attn.proj(out))))

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        norm = block.norm2
        known = type(norm) is nn.LayerNorm or _is_timm_layer(norm, "LayerNorm")
        if not known or norm.weight is None or norm.bias is None or is_overridden(norm, hooks=True):
            return None
        return norm

    def mlp(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return through(block.drop_path2, through(block.ls2, block.mlp(block.norm2(x) if normed is None else normed)))


def _is_timm_layer(module: nn.Module, name: str) -> bool:
    return type(module) is getattr(sys.modules["timm.layers"], name, None)


def _block_elementwise(block: Any) -> Elementwise:
    attn = block.attn
    return Elementwise(
        keys=elementwise_macs(block.norm1) + attn.num_heads * elementwise_macs(attn.k_norm),
        # q is scaled before the product with k
        queries=attn.num_heads * (attn.head_dim + elementwise_macs(attn.q_norm)),
        output=elementwise_macs(getattr(attn, "norm", None), block.ls1),
        mlp=elementwise_macs(block.norm2, getattr(block.mlp, "norm", None), block.ls2),
    )


def _head_macs(model: Any) -> tuple[int, int]:
    """MACs of pooling and classifier: once, and for each token that pooling reads."""
    head = linear_macs(model.head) + (linear_macs(model.head_dist) if hasattr(model, "head_dist") else 0)
    pool = model.attn_pool
    if not model.global_pool:  # no pooling: the classifier reads every token
        return 0, head
    if pool is None:
        return head, 0
    latents = pool.latent_len
    once = latents * (linear_macs(pool.q) + linear_macs(pool.proj) + linear_macs(pool.mlp))
    width = pool.kv.out_features // 2
    return head + once, linear_macs(pool.kv) + 2 * latents * width
