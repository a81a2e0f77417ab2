"""open_clip's own VisionTransformer, the image tower of CLIP and CoCa; its timm towers are timm_vit.py's.

The arithmetic of its two kinds of block is repeated here, because attention must return statistics. This file never
imports open_clip: whoever created one of its models has imported it already.

Shapes: B batch, N tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones import mha
from gtp_vit.backbones.modules import (
    call_unless_identity,
    check_images,
    class_unsupported_reason,
    module_unsupported_reason,
    plain_layer_norm,
    project_packed,
    unexpected_member,
)
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.loop import PatchedModel, run
from gtp_vit.core.restoring import restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import GTPError

# Children and tensors that the copied forward knows.
MODEL = {"conv1", "patch_dropout", "ln_pre", "transformer", "attn_pool", "attn_pool_contrastive", "ln_post"}
MODEL_TENSORS = {"class_embedding", "positional_embedding", "proj"}
BLOCK = {"ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2"}
ATTENTION = {"ln_q", "ln_k", "attn_drop", "ln_inner", "out_proj", "out_drop"}
ATTENTION_TENSORS = {"in_proj_weight", "in_proj_bias", "head_scale"}
MLP = {"c_fc", "gelu", "ln", "c_proj"}
POOLS = ("tok", "avg", "none")
CROPS = {"shortest": "center", "longest": "border", "squash": "squash"}  # open_clip's resize_mode, timm's crop_mode
NO_NORM = nn.Identity()  # where the model's last norm comes after pooling, and is part of the head


class OpenClipForwards(PatchedModel):
    """Mixed into the class of a patched model, before open_clip's. Holds no state."""

    ln_post: Any
    attn_pool: Any
    pool_type: str
    output_tokens: bool

    def forward(self, x: Tensor) -> Any:
        """The embedding, and with `output_tokens` also what open_clip calls tokens: those that remain, or pooled ones.

        The last block computes only the tokens that are read. With restore, tokens are those of all patches.
        """
        returns_tokens = self.attn_pool is None and (self.output_tokens or self.pool_type == "none")
        restore = self.reduction.restore and returns_tokens
        short = not restore and self.reduction.may_skip_image_tokens(self)
        tokens_left = run(self, x, prefix_only=short, restore=restore)
        pooled, tokens = _model_output(self, tokens_left)
        if restore:
            whole, tokens = _pooled(self, _last_norm(self)(restore_patches(tokens_left)))
            pooled = whole if pooled.ndim == 3 else pooled  # of a model that does not pool
        return (pooled, tokens) if self.output_tokens else pooled

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        stop_early: bool = False,
        normalize_intermediates: bool = False,
        intermediates_only: bool = False,
        output_fmt: str = "NCHW",
        output_extra_tokens: bool = False,
    ) -> dict[str, Any]:
        """open_clip's forward_intermediates: features after the chosen blocks, of all tokens that remain there."""
        from gtp_vit.backbones.intermediates import intermediates

        norm = self.ln_post if normalize_intermediates else None
        images, prefixes, last = intermediates(self, x, indices, norm, stop_early=stop_early, output_fmt=output_fmt)
        result: dict[str, Any] = {"image_intermediates": images}
        if output_extra_tokens:
            result["image_intermediates_prefix"] = prefixes
        if not intermediates_only:
            result["image_features"] = _model_output(self, last)[0]
        return result

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the schedule was made for all layers."""
        raise GTPError("prune_intermediate_layers does not fit the schedule; call it on the original, then patch again")


def _model_output(model: Any, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The output of a patched model for these tokens: pooled and projected, and as tokens."""
    return _pooled(model, model.reducer.finish(tokens, _last_norm(model)))


class OpenClipViT(Backbone):
    """Backbone of open_clip's vision transformers."""

    classes = ("VisionTransformer",)
    models = "image towers, also those from timm"
    forwards = OpenClipForwards

    def library(self) -> Library:
        from gtp_vit.backbones.libraries import OPEN_CLIP

        return OPEN_CLIP

    def model_names(self) -> list[str]:
        from gtp_vit.backbones.libraries import OPEN_CLIP

        return OPEN_CLIP.names()

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import open_clip_vits

        return open_clip_vits(depth)

    def matches(self, model: nn.Module) -> bool:
        library = sys.modules.get("open_clip.transformer")
        return library is not None and isinstance(model, library.VisionTransformer)

    def unsupported_reason(self, model: Any) -> str | None:
        library = sys.modules["open_clip.transformer"]
        reason = class_unsupported_reason(model, library.VisionTransformer)
        if reason is not None:
            return reason
        unknown = unexpected_member(model, MODEL, MODEL_TENSORS)
        if unknown is not None:
            return f"the model's {unknown}"
        if not isinstance(model.conv1, nn.Conv2d):
            return f"conv1 is {type(model.conv1).__name__}; supported: Conv2d"
        if not isinstance(model.patch_dropout, nn.Identity) and getattr(model.patch_dropout, "prob", None) != 0:
            return "patch_dropout removes patches at random; create the model with patch_dropout=0"
        if model.pool_type not in POOLS:
            return f"pool_type is {model.pool_type!r}; supported: {', '.join(POOLS)}"
        for name in ("attn_pool", "attn_pool_contrastive"):
            pooler = getattr(model, name, None)
            if pooler is not None and type(pooler) is not library.AttentionalPooler:
                return f"{name} is {type(pooler).__name__}; supported: AttentionalPooler"
        transformer = model.transformer
        reason = module_unsupported_reason(transformer, (library.Transformer,), {"resblocks"})
        if reason is not None:
            return f"transformer{reason}"
        if not transformer.batch_first:
            return "transformer expects tokens before the batch; supported: batch_first=True"
        for index, block in enumerate(transformer.resblocks):
            reason = self._block_unsupported_reason(block, library)
            if reason is not None:
                return f"transformer.resblocks[{index}]{reason}"
        return None

    def _block_unsupported_reason(self, block: Any, library: Any) -> str | None:
        plain, custom = library.ResidualAttentionBlock, library.CustomResidualAttentionBlock
        known = BLOCK if type(block) is plain else {*BLOCK, "ln_attn"}
        reason = module_unsupported_reason(block, (plain, custom), known)
        if reason is not None:
            return reason
        if type(block.mlp) is not nn.Sequential:
            return f".mlp is {type(block.mlp).__name__}; supported: Sequential"
        unknown = unexpected_member(block.mlp, MLP)
        if unknown is not None:
            return f".mlp.{unknown}"
        reason = (
            mha.unsupported_reason(block.attn)
            if type(block) is plain
            else self._attention_unsupported_reason(block.attn, library)
        )
        return None if reason is None else f".attn{reason}"

    def _attention_unsupported_reason(self, attn: Any, library: Any) -> str | None:
        if getattr(attn, "logit_scale", None) is not None:
            return " is scaled cosine attention, which open_clip itself cannot run; supported: scaled_cosine_attn=False"
        return module_unsupported_reason(attn, (library.Attention,), ATTENTION, ATTENTION_TENSORS)

    def vit_info(self, model: Any) -> ViTInfo:
        attn = model.transformer.resblocks[0].attn
        return ViTInfo(
            depth=len(model.transformer.resblocks),
            dim=model.conv1.out_channels,
            heads=attn.num_heads,
            head_dim=attn.head_dim,
            grid=self.grid(model),
            prefix=1,
            class_token=True,
            head_reads_image_tokens=self.head_reads_image_tokens(model),
            head_averages_image_tokens=model.pool_type == "avg" and model.attn_pool is None,
        )

    def inputs(self, model: Any) -> Inputs:
        known = getattr(model, "preprocess_cfg", None) or {}  # create_model stores it, and older ones the two others
        constants = sys.modules["open_clip.constants"]
        rows, columns = model.image_size
        return Inputs(
            name=type(model).__name__,
            size=(rows, columns),
            any_size=False,
            patch=tuple(model.patch_size),
            channels=model.conv1.in_channels,
            classes=0,
            preprocessing={
                "input_size": (model.conv1.in_channels, rows, columns),
                "mean": known.get("mean") or getattr(model, "image_mean", None) or constants.OPENAI_DATASET_MEAN,
                "std": known.get("std") or getattr(model, "image_std", None) or constants.OPENAI_DATASET_STD,
                "crop_pct": 1.0,
                "crop_mode": CROPS.get(known.get("resize_mode", "shortest"), "center"),
                "interpolation": "bilinear" if known.get("interpolation") == "bilinear" else "bicubic",
            },
        )

    def output(self, model: Any) -> Output:
        width = model.conv1.out_channels if model.attn_pool is None else model.attn_pool.query.shape[1]
        width = width if model.proj is None else model.proj.shape[1]
        if model.pool_type == "none":  # and if there are two poolers
            return Output("tokens", width)
        return Output("features" if model.proj is None else "embedding", width)

    def grid(self, model: Any) -> tuple[int, int]:
        rows, columns = model.grid_size
        return rows, columns

    def head_reads_image_tokens(self, model: Any) -> bool:
        return model.pool_type != "tok" or model.attn_pool is not None or model.output_tokens

    def embed(self, model: Any, images: Tensor) -> Tokens:
        check_images(images, model.conv1, tuple(model.image_size), None)
        x = model._embeds(images)
        cell = torch.arange(x.shape[1] - 1, device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), 1, self.grid(model))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.transformer.resblocks

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        attn, y = block.attn, block.ln_1(tokens.x)
        if type(attn) is nn.MultiheadAttention:
            return mha.project(attn, y, queries)
        q, k, v = project_packed(attn.in_proj_weight, attn.in_proj_bias, y, attn.num_heads, queries)
        dropout = attn.attn_drop.p if attn.training else 0.0
        return QKV(call_unless_identity(attn.ln_q, q), call_unless_identity(attn.ln_k, k), v, attn.scale, dropout)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        attn = block.attn
        if type(attn) is nn.MultiheadAttention:
            return call_unless_identity(block.ls_1, mha.output(attn, out))
        if attn.head_scale is not None:  # [H, 1, 1], of outputs [B, H, N, D]
            out = (out.unflatten(2, (attn.num_heads, -1)) * attn.head_scale.squeeze(2)).flatten(2)
        out = call_unless_identity(attn.out_drop, attn.out_proj(call_unless_identity(attn.ln_inner, out)))
        return call_unless_identity(block.ls_1, call_unless_identity(block.ln_attn, out))

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        # Not LayerNormFp32, which computes in float32 whatever the dtype.
        return plain_layer_norm(block.ln_2, {nn.LayerNorm, sys.modules["open_clip.transformer"].LayerNorm})

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return call_unless_identity(block.ls_2, block.mlp(block.ln_2(x) if normed is None else normed))

    def norm(self, model: Any) -> nn.Module:
        return _last_norm(model)

    def head(self, model: Any, features: Tensor) -> Tensor:
        return _pooled(model, features)[0]

    def uses_grad_checkpointing(self, model: Any) -> bool:
        return model.transformer.grad_checkpointing

    def set_grad_checkpointing(self, model: Any, enable: bool) -> None:
        model.set_grad_checkpointing(enable)

    def no_weight_decay(self, model: Any) -> set[str]:
        return set(model.no_weight_decay())

    def embedding_parameters(self, model: Any) -> set[str]:
        return {"class_embedding", "positional_embedding"}

    def classifier(self, model: Any) -> nn.Module:
        raise GTPError("open_clip's VisionTransformer has no classifier: its output is compared with texts")


def _pooled(model: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """The features pooled and projected, and what open_clip calls the tokens."""
    pooled, tokens = (model._pool if _norm_after_pooling(model) else model._global_pool)(features)
    return pooled if model.proj is None else pooled @ model.proj, tokens


def _last_norm(model: Any) -> nn.Module:
    """The norm of all tokens behind the blocks."""
    return NO_NORM if _norm_after_pooling(model) else model.ln_post


def _norm_after_pooling(model: Any) -> bool:
    """Does the last norm come after pooling?"""
    return model.attn_pool is not None or model.final_ln_after_pool
