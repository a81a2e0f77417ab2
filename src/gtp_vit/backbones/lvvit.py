"""LV-ViT: a ViT with a convolutional stem, residuals divided by skip_lam, and a second head over the image tokens.

Network and backbone. Modules are named as in the official checkpoints. Training with MixToken and token labels is not
here: in training mode the network returns the same logits as in evaluation.

Shapes: B batch, N tokens, M image tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_vit.backbones.modules import check_images, class_unsupported_reason, is_overridden, project
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Library, Part
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import GTPError, SettingError, check_name

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}
# name -> sizes; skip_lam divides both branches of a block, crop is the share of the image that is evaluated
SIZES: dict[str, dict[str, Any]] = {
    "lvvit_t": {"embed_dim": 240, "depth": 12, "num_heads": 4, "skip_lam": 1.0, "crop": 0.9},
    "lvvit_s": {"embed_dim": 384, "depth": 16, "num_heads": 6, "skip_lam": 2.0, "crop": 0.9},
    "lvvit_m": {"embed_dim": 512, "depth": 20, "num_heads": 8, "skip_lam": 2.0, "crop": 1.0},
    "lvvit_l": {"embed_dim": 768, "depth": 24, "num_heads": 12, "skip_lam": 3.0, "crop": 1.0, "stem_width": 128},
}


class Stem(nn.Module):
    """Three convolutions at half the resolution, then patches."""

    def __init__(self, img_size: int | tuple[int, int], patch_size: int, in_chans: int, width: int, dim: int) -> None:
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.patch_size = (patch_size, patch_size)
        if self.img_size[0] % patch_size or self.img_size[1] % patch_size or patch_size % 2:
            raise SettingError(
                f"img_size is {self.img_size} and patch_size {patch_size}; patch_size must be even, and img_size a "
                "multiple of it"
            )
        self.grid_size = (self.img_size[0] // patch_size, self.img_size[1] // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.conv1 = nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.proj = nn.Conv2d(width, dim, patch_size // 2, stride=patch_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width] -> [B, M, C]."""
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = F.relu(norm(conv(x)))
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Plain attention, without bias for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each divided by skip_lam before it is added."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, skip_lam: float) -> None:
        super().__init__()
        self.skip_lam = skip_lam
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) / self.skip_lam
        return x + self.mlp(self.norm2(x)) / self.skip_lam


class LVViT(nn.Module):
    """The network. Logits are those of the class token plus half the largest of each class over the image tokens."""

    num_prefix_tokens = 1
    has_class_token = True
    dynamic_img_size = False

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        skip_lam: float = 2.0,
        stem_width: int = 64,
        crop: float = 0.9,
    ) -> None:
        super().__init__()
        self.embed_dim = self.num_features = embed_dim
        self.num_classes, self.grad_checkpointing = num_classes, False
        self.patch_embed = Stem(img_size, patch_size, in_chans, stem_width, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.patch_embed.num_patches, embed_dim))
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads, mlp_ratio, skip_lam) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)
        self.aux_head = nn.Linear(embed_dim, num_classes)
        # timm.data.resolve_model_data_config reads it
        size = (in_chans, *self.patch_embed.img_size)
        self.pretrained_cfg = {**IMAGENET, "input_size": size, "crop_pct": crop, "num_classes": num_classes}
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def embed(self, images: Tensor) -> Tensor:
        """Class token and patches with their positions, [B, 1 + M, C]."""
        x = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed

    def forward_features(self, images: Tensor) -> Tensor:
        """Features of all tokens after the last norm, [B, 1 + M, C]."""
        x = self.embed(images)
        for block in self.blocks:
            use = self.grad_checkpointing and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if use else block(x)
        return self.norm(x)

    def forward_head(self, x: Tensor) -> Tensor:
        """Logits from features after the last norm; the second head reads the image tokens that are there."""
        return self.head(x[:, 0]) + 0.5 * self.aux_head(x[:, 1:]).amax(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def create(name: str, *, checkpoint_path: str | Path | None = None, **sizes: Any) -> LVViT:
    """An LV-ViT in evaluation mode, by name, with the weights of a file: official ones or of a finetuned model."""
    model = LVViT(**{**SIZES[check_name("model", name, SIZES)], **sizes}).eval()
    if checkpoint_path is not None:
        from gtp_vit.weights import load_weights  # not needed to patch a model

        load_weights(model, Path(checkpoint_path), name)
    return model


class LVViTLibrary(Library):
    """The networks of this file."""

    title = "gtp_vit"

    def has_model(self, name: str) -> bool:
        return name in SIZES

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        if pretrained and checkpoint is None:
            raise GTPError(f"pre-trained weights of {name} are not in timm; download them and give their file")
        if sizes.get("num_classes") == 0:
            raise GTPError(f"{name} needs classes, as both of its heads are read; remove num_classes=0")
        with torch.device("meta") if meta else nullcontext():
            return create(name, checkpoint_path=checkpoint, **sizes)


LVVITS = LVViTLibrary()
# Path in a block -> its class
PARTS: dict[str, type[nn.Module]] = {
    "": Block,
    "attn": Attention,
    "mlp": Mlp,
    "attn.qkv": nn.Linear,
}


class LVViTBackbone(TimmViT):
    """Backbone of our LV-ViT, whose attributes and entry points are named as in timm."""

    classes = ("LVViT",)
    models = "LV-ViT, from a file of weights"

    def library(self) -> Library:
        return LVVITS

    def model_names(self) -> list[str]:
        return list(SIZES)

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        sizes = {"embed_dim": 24, "num_heads": 3, "img_size": 64, "patch_size": 8, "num_classes": 10, "stem_width": 8}
        small: Callable[..., nn.Module] = functools.partial(LVViT, depth=depth, **sizes)
        return {"lvvit": small, "lvvit_non_square": functools.partial(small, img_size=(48, 96), skip_lam=3.0)}

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, LVViT)

    def unsupported_reason(self, model: Any) -> str | None:
        reason = class_unsupported_reason(model, LVViT)
        if reason is not None:
            return reason
        for index, block in enumerate(model.blocks):
            for path, kind in PARTS.items():
                module = block.get_submodule(path)
                if type(module) is not kind and not (kind is nn.Linear and isinstance(module, nn.Linear)):
                    return f"blocks[{index}].{path} is {type(module).__name__}; supported: {kind.__name__}"
                if path in ("", "attn") and is_overridden(module, hooks=True):
                    return f"blocks[{index}].{path} has hooks or a forward of its own; remove them"
        return None

    def patch(self, model: Any) -> tuple[int, int]:
        return model.patch_embed.patch_size

    def first_layer(self, model: Any) -> nn.Conv2d:
        return model.patch_embed.conv1

    def head_averages_image_tokens(self, model: Any) -> bool:
        return False

    def head_reads_image_tokens(self, model: Any) -> bool:
        return True

    def embed(self, model: Any, images: Tensor) -> Tokens:
        check_images(images, self.first_layer(model), model.patch_embed.img_size, None)
        x = model.embed(images)
        cell = torch.arange(x.shape[1] - 1, device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), 1, self.grid(model))

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        q, k, v = project(block.attn, block.norm1(tokens.x), queries, part)
        return QKV(q, k, v, block.attn.scale)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return block.attn.proj(out) / block.skip_lam

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return None if is_overridden(block.norm2, hooks=True) else block.norm2

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.norm2(x) if normed is None else normed) / block.skip_lam

    remove_classifier = Backbone.remove_classifier  # both of its heads are read

    def set_drop_path(self, model: Any, rate: float) -> bool:
        return False

    def no_weight_decay(self, model: Any) -> set[str]:
        return set()

    def token_classifier(self, model: Any) -> nn.Module | None:
        return model.aux_head
