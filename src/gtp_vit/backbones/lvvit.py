"""LV-ViT (lvvit_network.py): residuals divided by skip_lam, a second head over the remaining tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.modules import check_images, class_refusal, is_overridden, project
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.attention import Projections
from gtp_vit.core.backbone import Part
from gtp_vit.core.tokens import Tokens


class LVViTBackbone(TimmViT):
    """Backbone of our LV-ViT, whose attributes and entry points are named as in timm."""

    def matches(self, model: nn.Module) -> bool:
        lvvit = sys.modules.get("gtp_vit.backbones.lvvit_network")
        return lvvit is not None and isinstance(model, lvvit.LVViT)

    def refusal(self, model: Any) -> str | None:
        lvvit = sys.modules["gtp_vit.backbones.lvvit_network"]
        reason = class_refusal(model, lvvit.LVViT)
        if reason is not None:
            return reason
        for index, block in enumerate(model.blocks):
            known = {"": lvvit.Block, "attn": lvvit.Attention, "mlp": lvvit.Mlp, "attn.qkv": nn.Linear}
            for path, kind in known.items():
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

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> Projections:
        q, k, v = project(block.attn, block.norm1(tokens.x), queries, part)
        return Projections(q, k, v, block.attn.scale)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return block.attn.proj(out) / block.skip_lam

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return None if is_overridden(block.norm2, hooks=True) else block.norm2

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.norm2(x) if normed is None else normed) / block.skip_lam

    def drop_paths(self, model: Any, rate: float) -> bool:
        return False

    def undecayed(self, model: Any) -> set[str]:
        return set()

    def token_classifier(self, model: Any) -> nn.Module | None:
        return model.aux_head
