"""timm's VisionTransformer: ViT, DeiT (also distilled), DeiT-3, AugReg, CLIP, DINOv2, SigLIP, GAP models, EVA-L.

The arithmetic of a block exists here a second time, because attention must hand back what it saw. So nothing is
guessed: `refusal` compares every class and every child with what this copy honours, and any other is refused.

timm is never imported by this file: a model that is a timm model has imported it already.

Shapes: B batch, N tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.attention import Ask, Stats, attend
from gtp_vit.core.reducer import Elementwise, VitInfo
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import BadInput

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
            return f"{type(model).__name__} is a subclass of VisionTransformer whose forward may be its own"
        for name, child in model.named_children():
            if name not in MODEL:
                return f"the model has a module {name} ({type(child).__name__}) that is not known"
        if _is_overridden(model, hooks=False):
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
            if _is_overridden(owner, hooks=True):
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
            linear_macs=(_linear(attn), _linear(block.mlp)),
            elementwise_macs=_block_elementwise(block),
            final_elementwise_macs=_elementwise(model.norm_pre, model.norm),
            head_macs=head,
            head_macs_per_token=per_token,
            head_reads_prefix_too=not model.global_pool or getattr(model, "pool_include_prefix", False),
            pooled_elementwise_macs=_elementwise(model.fc_norm),
        )

    def head_reads_image_tokens(self, model: Any) -> bool:
        return model.global_pool not in POOLS_OF_PREFIX or model.attn_pool is not None

    def embed(self, model: Any, images: Tensor) -> Tokens:
        """Patches, position embedding and prefix tokens, by the model's own modules."""
        check_images(model, images)
        x = model.patch_embed(images)
        grid = (x.shape[1], x.shape[2]) if model.dynamic_img_size else tuple(model.patch_embed.grid_size)
        x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        position = torch.arange(grid[0] * grid[1], device=x.device)
        return Tokens(x, position.expand(x.shape[0], -1), model.num_prefix_tokens, grid)

    def attention(self, block: Any, tokens: Tokens, ask: Ask, queries: int | None) -> tuple[Tensor, Stats]:
        attn, y = block.attn, block.norm1(tokens.x)
        if queries is None or ask.edit is not None or not _is_plain_linear(attn.qkv):
            q, k, v = _heads(attn.qkv(y), 3, attn.num_heads)
        else:
            # Queries of the prefix tokens only: the fused qkv layer is cut into its query rows and the rest.
            width = attn.num_heads * attn.head_dim
            weight, qkv_bias = attn.qkv.weight, attn.qkv.bias
            first, rest = (None, None) if qkv_bias is None else (qkv_bias[:width], qkv_bias[width:])
            (q,) = _heads(F.linear(y[:, :queries], weight[:width], first), 1, attn.num_heads)
            k, v = _heads(F.linear(y, weight[width:], rest), 2, attn.num_heads)
        out, stats = attend(
            _through(attn.q_norm, q),
            _through(attn.k_norm, k),
            v,
            scale=attn.scale,
            ask=ask,
            size=tokens.size,
            dropout=attn.attn_drop.p if attn.training else 0.0,
            queries=queries,
            first=tokens.prefix,
            native=tokens.native,
        )
        if hasattr(attn, "norm"):
            out = _through(attn.norm, out)
        return _through(block.drop_path1, _through(block.ls1, _through(attn.proj_drop, attn.proj(out)))), stats

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        norm = block.norm2
        known = type(norm) is nn.LayerNorm or _is_timm_layer(norm, "LayerNorm")
        if not known or norm.weight is None or norm.bias is None or _is_overridden(norm, hooks=True):
            return None
        return norm

    def mlp(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return _through(block.drop_path2, _through(block.ls2, block.mlp(block.norm2(x) if normed is None else normed)))


def _through(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), without the call where the module does nothing: at batch 1 such calls are a percent of the time."""
    idle = type(module) is nn.Identity or (type(module) is nn.Dropout and not module.training)
    return x if idle and not module._forward_hooks and not module._forward_pre_hooks else module(x)


def _is_timm_layer(module: nn.Module, name: str) -> bool:
    return type(module) is getattr(sys.modules["timm.layers"], name, None)


def _is_overridden(module: nn.Module, *, hooks: bool) -> bool:
    """Does calling this module do something else than its class's forward? `hooks`: do hooks count?"""
    own = any(name in vars(module) for name in ("forward", "forward_features", "forward_head", "forward_intermediates"))
    return own or (hooks and bool(module._forward_hooks or module._forward_pre_hooks))


def _is_plain_linear(layer: nn.Module) -> bool:
    """May its weight be used directly? Adapters, quantised and parametrised layers must be called."""
    return type(layer) is nn.Linear and not _is_overridden(layer, hooks=True)


def check_images(model: Any, images: Any) -> None:
    """One clear error instead of one from deep inside the model."""
    if not isinstance(images, Tensor):
        raise BadInput(f"images are a {type(images).__name__}; give a float tensor [batch, channels, height, width]")
    shape, channels = tuple(images.shape), model.patch_embed.proj.in_channels
    if images.ndim != 4:
        raise BadInput(f"images have shape {shape}; give [batch, channels, height, width], for one image x[None]")
    if not images.is_floating_point():
        raise BadInput(f"images are {images.dtype}; convert them to float and normalise them as the model expects")
    if shape[1] != channels:
        raise BadInput(f"images have {shape[1]} channels, but the model takes {channels}")
    weight = model.patch_embed.proj.weight
    if images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type):
        raise BadInput(
            f"images are {images.dtype}, but the model is {weight.dtype}; convert one of them, or use autocast"
        )
    if images.device != weight.device:
        raise BadInput(f"images are on {images.device}, but the model is on {weight.device}; move one of them")
    size = tuple(model.patch_embed.img_size)
    if min(shape[2:]) == 0:
        raise BadInput(f"images are {shape[2]} x {shape[3]}; they have no pixels")
    if not model.dynamic_img_size and shape[2:] != size:
        raise BadInput(
            f"images are {shape[2]} x {shape[3]}, but the model takes {size[0]} x {size[1]}; resize them, or create "
            f"the model with img_size={shape[2:]} or dynamic_img_size=True"
        )
    patch = model.patch_embed.patch_size
    if (
        model.dynamic_img_size
        and not model.patch_embed.dynamic_img_pad
        and (shape[2] % patch[0] or shape[3] % patch[1])
    ):
        raise BadInput(f"images are {shape[2]} x {shape[3]}; both must be multiples of the patch size {patch}")
    if tuple(model.patch_embed.grid_size) != model.reduction.vit.grid:
        raise BadInput("the original model's input size was changed after patching; patch it again")


def _heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts H D] -> parts x [B, H, N, D]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def _linear(module: nn.Module) -> int:
    """MACs of one token in all linear layers of a module."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def _elementwise(*modules: nn.Module | None) -> int:
    """MACs of one token in norms or LayerScales, counted as torchprofile does: one an element if it has weights."""
    weights = [p for m in modules if m is not None for n, p in m.named_parameters() if n in ("weight", "gamma")]
    return sum(weight.numel() for weight in weights)


def _block_elementwise(block: Any) -> Elementwise:
    attn = block.attn
    return Elementwise(
        keys=_elementwise(block.norm1) + attn.num_heads * _elementwise(attn.k_norm),
        # q is scaled before the product with k
        queries=attn.num_heads * (attn.head_dim + _elementwise(attn.q_norm)),
        output=_elementwise(getattr(attn, "norm", None), block.ls1),
        mlp=_elementwise(block.norm2, getattr(block.mlp, "norm", None), block.ls2),
    )


def _head_macs(model: Any) -> tuple[int, int]:
    """MACs of pooling and classifier: once, and for each token that pooling reads."""
    head = _linear(model.head) + (_linear(model.head_dist) if hasattr(model, "head_dist") else 0)
    pool = model.attn_pool
    if not model.global_pool:  # no pooling: the classifier reads every token
        return 0, head
    if pool is None:
        return head, 0
    latents = pool.latent_len
    once = latents * (_linear(pool.q) + _linear(pool.proj) + _linear(pool.mlp))
    width = pool.kv.out_features // 2
    return head + once, _linear(pool.kv) + 2 * latents * width
