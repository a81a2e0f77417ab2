"""timm's VisionTransformer: ViT, DeiT (also distilled), DeiT-3, AugReg, CLIP, DINOv2, SigLIP, GAP models, EVA-L, and
hybrids, whose patches are the features of a ResNet or of MobileCLIP's convolutions.

We repeat the arithmetic of timm's block because attention must return statistics. `unsupported_reason` therefore
compares the class of every module and the names of its children with those that our copy supports.

This file never imports timm: a caller with a timm model has imported it already.

Shapes: B batch, N tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.modules import (
    call_unless_identity,
    check_images,
    class_unsupported_reason,
    hookless_eval_copy,
    plain_layer_norm,
    project,
    zero_features,
)
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
from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo

# Children of timm's modules that our copy of the forward calls. Attention got `norm` in a later release of timm 1.0.
BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
ATTENTION = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}
MODEL = {
    *("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks", "norm", "attn_pool", "fc_norm"),
    *("head_drop", "head", "head_dist"),
}
EMBEDDINGS = ("PatchEmbed", "HybridEmbed")
# Values of global_pool that read prefix tokens only, and values that read image tokens.
PREFIX_POOLS = {"token"}
IMAGE_POOLS = {"", "avg", "avgmax", "max", "map"}
# Parts of timm's model names: of models that compare images with texts, and of weights finetuned as classifiers since.
CLIP = ("clip", "_mci_", "_pe_core_")
FINETUNED_TAG = "_ft_in"


class TimmViT(Backbone):
    """Backbone of timm's plain vision transformers."""

    module = "vision_transformer"  # the module of timm.models that defines `classes`
    classes: tuple[str, ...] = ("VisionTransformer", "VisionTransformerDistilled")
    models = "ViT and AugReg, DeiT (also distilled), DeiT-3, CLIP image towers, DINOv2, SigLIP, GAP models, hybrids"
    forwards = TimmForwards

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import timm_vits

        return timm_vits(depth)

    def matches(self, model: nn.Module) -> bool:
        timm_module = sys.modules.get(f"timm.models.{self.module}")  # older releases of timm lack some modules
        return timm_module is not None and isinstance(model, getattr(timm_module, self.classes[0]))

    def library(self) -> Library:
        from gtp_vit.backbones.libraries import TIMM

        return TIMM

    def model_names(self) -> list[str]:
        from gtp_vit.backbones.libraries import TIMM

        return TIMM.names_with(self.module, self.classes[0])

    def unsupported_reason(self, model: Any) -> str | None:
        models, vit = sys.modules["timm.models"], sys.modules["timm.models.vision_transformer"]
        reason = class_unsupported_reason(model, vit.VisionTransformer, models.VisionTransformerDistilled)
        return reason or self._model_unsupported_reason(model, MODEL) or self._blocks_unsupported_reason(model)

    def _model_unsupported_reason(
        self, model: Any, known: set[str], pools: set[str] = PREFIX_POOLS | IMAGE_POOLS
    ) -> str | None:
        """Why the modules around the blocks are not supported, or None; `known`: names of supported children."""
        for name, child in model.named_children():
            if name not in known:
                return f"the model has a module {name} ({type(child).__name__}) that is not known"
        if not any(is_timm_layer(model.patch_embed, name) for name in EMBEDDINGS):
            return f"patch_embed is {type(model.patch_embed).__name__}; supported: {', '.join(EMBEDDINGS)}"
        if not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
            return "patch_drop removes patches at random; create the model with patch_drop_rate=0"
        if model.global_pool not in pools:
            return f"global_pool is {model.global_pool!r}; supported: {sorted(pools)}"
        attn_pool = getattr(model, "attn_pool", None)
        if attn_pool is not None and not is_timm_layer(attn_pool, "AttentionPoolLatent"):
            return f"attn_pool is {type(attn_pool).__name__}; supported: AttentionPoolLatent"
        return None

    def _blocks_unsupported_reason(self, model: Any) -> str | None:
        vit = sys.modules["timm.models.vision_transformer"]
        kinds = SupportedTypes((vit.Block, vit.ResPostBlock), (vit.Attention,), BLOCK, ATTENTION)
        return blocks_unsupported_reason(model.blocks, kinds)

    def vit_info(self, model: Any) -> ViTInfo:
        attn = model.blocks[0].attn
        return ViTInfo(
            depth=len(model.blocks),
            dim=model.embed_dim,
            heads=attn.num_heads,
            head_dim=attn.proj.in_features // attn.num_heads,
            grid=self.grid(model),
            prefix=model.num_prefix_tokens,
            class_token=getattr(model, "cls_token", None) is not None,
            head_reads_image_tokens=self.head_reads_image_tokens(model),
            head_averages_image_tokens=self.head_averages_image_tokens(model),
        )

    def inputs(self, model: Any) -> Inputs:
        pretrained_cfg = getattr(model, "pretrained_cfg", None) or {}
        config = dict(pretrained_cfg if isinstance(pretrained_cfg, dict) else vars(pretrained_cfg))
        return Inputs(
            name=str(config.get("architecture") or type(model).__name__),
            size=tuple(model.patch_embed.img_size),  # of this model; pretrained_cfg has the size of its weights
            any_size=self.any_size(model),
            patch=self.patch(model),
            channels=self.first_layer(model).in_channels,
            classes=model.num_classes,
            weights=str(config.get("tag") or ""),
            preprocessing=config,
        )

    def output(self, model: Any) -> Output:
        vit = self.vit_info(model)
        with torch.no_grad():
            shape = self.head(hookless_eval_copy(model), zero_features(vit, model)).shape
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
            and FINETUNED_TAG not in name
            and outputs == (inputs.preprocessing or {}).get("num_classes")
            and (bias is None or bias.is_meta or not bool(bias.any()))
        )

    def grid(self, model: Any) -> tuple[int, int]:
        rows, columns = model.patch_embed.grid_size
        return rows, columns

    def patch(self, model: Any) -> tuple[int, int]:
        """Height and width of a patch in pixels; for a hybrid, of the area that its stem makes one token from."""
        height, width = model.patch_embed.feat_ratio(as_scalar=False)
        return height, width

    def any_size(self, model: Any) -> bool:
        return bool(model.dynamic_img_size)

    def first_layer(self, model: Any) -> nn.Conv2d:
        """The first convolution of the model."""
        return next(module for module in model.patch_embed.modules() if isinstance(module, nn.Conv2d))

    def head_averages_image_tokens(self, model: Any) -> bool:
        """Is the pooled feature the plain mean of the image tokens?"""
        return model.global_pool == "avg" and not getattr(model, "pool_include_prefix", False)

    def head_reads_image_tokens(self, model: Any) -> bool:
        return model.global_pool not in PREFIX_POOLS or getattr(model, "attn_pool", None) is not None

    def embed(self, model: Any, images: Tensor) -> Tokens:
        """Embed the patches, positions and prefix tokens with the model's own modules."""
        x, grid = self.patches(model, images)
        x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        return Tokens(x, self.cells(x, grid), model.num_prefix_tokens, grid)

    def patches(self, model: Any, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The output of the patch embedding and the grid of patches; raises InputError if the images do not fit."""
        embed, any_size = model.patch_embed, self.any_size(model)
        multiple = self.patch(model) if any_size and not embed.dynamic_img_pad else None
        check_images(images, self.first_layer(model), None if any_size else tuple(embed.img_size), multiple)
        x = embed(images)
        return x, (x.shape[1], x.shape[2]) if any_size else self.grid(model)

    def cells(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The cells of all patches, [B, M0], in the order of the grid."""
        return torch.arange(grid[0] * grid[1], device=x.device).expand(x.shape[0], -1)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        attn = block.attn
        q, k, v = project(attn, attention_input(block, tokens.x), queries, part)
        if part == "values":
            return QKV(q, k, v, attn.scale)
        return QKV(
            call_unless_identity(attn.q_norm, q),
            call_unless_identity(attn.k_norm, k),
            v,
            attn.scale,
            attention_dropout(attn),
        )

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        out = attention_output(block.attn, out)
        out = block.norm1(out) if is_post_norm(block) else call_unless_identity(block.ls1, out)
        return call_unless_identity(block.drop_path1, out)

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        norm = plain_layer_norm(block.norm2, {nn.LayerNorm, sys.modules["timm.layers"].LayerNorm})
        return None if is_post_norm(block) else norm

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        out = mlp_output(block, x, normed)
        return call_unless_identity(
            block.drop_path2, out if is_post_norm(block) else call_unless_identity(block.ls2, out)
        )

    def norm(self, model: Any) -> nn.Module:
        return model.norm

    def head(self, model: Any, features: Tensor) -> Tensor:
        return model.forward_head(features)

    def remove_classifier(self, model: Any) -> None:
        model.reset_classifier(0)

    def uses_grad_checkpointing(self, model: Any) -> bool:
        return model.grad_checkpointing

    def set_grad_checkpointing(self, model: Any, enable: bool) -> None:
        model.set_grad_checkpointing(enable)

    def set_drop_path(self, model: Any, rate: float) -> bool:
        drop_path = sys.modules["timm.layers"].DropPath
        for index, block in enumerate(model.blocks):
            block_rate = rate * index / max(len(model.blocks) - 1, 1)
            block.drop_path1, block.drop_path2 = (
                drop_path(block_rate) if block_rate else nn.Identity() for _ in range(2)
            )
        return True

    def no_weight_decay(self, model: Any) -> set[str]:
        return set(model.no_weight_decay())

    def embedding_parameters(self, model: Any) -> set[str]:
        return {"cls_token", "pos_embed"}

    def classifier(self, model: Any) -> nn.Module:
        return model.head
