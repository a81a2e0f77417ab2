"""timm's VisionTransformer: ViT, DeiT (also distilled), DeiT-3, AugReg, CLIP, DINOv2, SigLIP, GAP models, EVA-L.

The arithmetic of timm's block is repeated here, because attention must return statistics. `refusal` compares every
class and child module with what this copy supports and refuses anything else.

This file never imports timm: whoever created a timm model has imported it already.

Shapes: B batch, N tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.parts import check_images, is_overridden, project, quiet_copy, through
from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.attention import Projections
from gtp_vit.core.backbone import Backbone, Inputs, Output
from gtp_vit.core.reducer import VitInfo
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
CLIP = ("clip", "_mci_", "_pe_core_")  # in timm's names of models whose output is compared with texts
FINETUNED = "_ft_in"  # in timm's names of weights that were trained on classes afterwards
POOLS_OF_IMAGE = {"", "avg", "avgmax", "max", "map"}


class TimmViT(Backbone):
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
        attn = model.blocks[0].attn
        return VitInfo(
            depth=len(model.blocks),
            dim=model.embed_dim,
            heads=attn.num_heads,
            head_dim=attn.head_dim,
            grid=self.grid(model),
            prefix=model.num_prefix_tokens,
            class_token=model.has_class_token,
            head_reads_image_tokens=self.head_reads_image_tokens(model),
            head_averages_image_tokens=self.head_averages_image_tokens(model),
        )

    def inputs(self, model: Any) -> Inputs:
        config = getattr(model, "pretrained_cfg", None) or {}
        known = dict(config if isinstance(config, dict) else vars(config))
        embed, any_size = model.patch_embed, bool(model.dynamic_img_size)
        stored = known.get("input_size") if any_size else None  # else the model's own size counts
        return Inputs(
            name=str(known.get("architecture") or type(model).__name__),
            size=tuple(stored[1:]) if stored else tuple(embed.img_size),
            any_size=any_size,
            patch=tuple(embed.patch_size),
            channels=self.first_layer(model).in_channels,
            classes=model.num_classes,
            weights=str(known.get("tag") or ""),
            preparation=known,
        )

    def output(self, model: Any) -> Output:
        vit, weight = self.describe(model), next(model.parameters())
        tokens = torch.zeros(1, vit.prefix + vit.image_tokens, vit.dim, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            shape = self.head(quiet_copy(model), tokens).shape
        if len(shape) == 3:
            return Output("tokens", shape[2])
        if isinstance(model.head, nn.Identity) or shape[1] == 0:
            return Output("features", vit.dim)
        return Output("embedding" if self._is_projection(model, shape[1]) else "classes", shape[1])

    def _is_projection(self, model: Any, outputs: int) -> bool:
        """Is the head CLIP's projection, which timm stores in place of a classifier? It is linear, without bias."""
        inputs, bias = self.inputs(model), getattr(model.head, "bias", None)
        name = f"{inputs.name}.{inputs.weights}"
        return (
            any(part in name for part in CLIP)
            and FINETUNED not in name
            and outputs == (inputs.preparation or {}).get("num_classes")
            and (bias is None or bias.is_meta or not bool(bias.any()))
        )

    def grid(self, model: Any) -> tuple[int, int]:
        rows, columns = model.patch_embed.grid_size
        return rows, columns

    def first_layer(self, model: Any) -> nn.Conv2d:
        """The first convolution of the model."""
        return model.patch_embed.proj

    def head_averages_image_tokens(self, model: Any) -> bool:
        """Is the pooled feature their plain mean?"""
        return model.global_pool == "avg" and not getattr(model, "pool_include_prefix", False)

    def head_reads_image_tokens(self, model: Any) -> bool:
        return model.global_pool not in POOLS_OF_PREFIX or model.attn_pool is not None

    def embed(self, model: Any, images: Tensor) -> Tokens:
        """Patches, position embedding and prefix tokens, by the model's own modules."""
        embed, any_size = model.patch_embed, model.dynamic_img_size
        patch = embed.patch_size if any_size and not embed.dynamic_img_pad else None
        check_images(images, self.first_layer(model), None if any_size else tuple(embed.img_size), patch)
        x = embed(images)
        grid = (x.shape[1], x.shape[2]) if any_size else self.grid(model)
        x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        cell = torch.arange(grid[0] * grid[1], device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), model.num_prefix_tokens, grid)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None) -> Projections:
        attn = block.attn
        q, k, v = project(attn, block.norm1(tokens.x), queries)
        dropout = attn.attn_drop.p if attn.training else 0.0
        return Projections(through(attn.q_norm, q), through(attn.k_norm, k), v, attn.scale, dropout)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
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

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return through(block.drop_path2, through(block.ls2, block.mlp(block.norm2(x) if normed is None else normed)))

    def norm(self, model: Any) -> nn.Module:
        return model.norm

    def head(self, model: Any, features: Tensor) -> Tensor:
        return model.forward_head(features)

    def saves_memory(self, model: Any) -> bool:
        return model.grad_checkpointing

    def save_memory(self, model: Any, on: bool) -> None:
        model.set_grad_checkpointing(on)

    def drop_paths(self, model: Any, rate: float) -> bool:
        drop_path = sys.modules["timm.layers"].DropPath
        for index, block in enumerate(model.blocks):
            own = rate * index / max(len(model.blocks) - 1, 1)
            block.drop_path1, block.drop_path2 = (drop_path(own) if own else nn.Identity() for _ in range(2))
        return True

    def undecayed(self, model: Any) -> set[str]:
        return set(model.no_weight_decay())

    def embedding_parameters(self, model: Any) -> set[str]:
        return {"cls_token", "pos_embed"}

    def classifier(self, model: Any) -> nn.Module:
        return model.head


def _is_timm_layer(module: nn.Module, name: str) -> bool:
    return type(module) is getattr(sys.modules["timm.layers"], name, None)
