"""LV-ViT (lvvit_network.py): residuals divided by skip_lam, a second head over the remaining tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones import lvvit_network
from gtp_vit.backbones.modules import check_images, class_refusal, is_overridden, project, project_some
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.attention import Projections
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.tokens import Tokens

# Path in a block -> its class
PARTS: dict[str, type[nn.Module]] = {
    "": lvvit_network.Block,
    "attn": lvvit_network.Attention,
    "mlp": lvvit_network.Mlp,
    "attn.qkv": nn.Linear,
}


class LVViTBackbone(TimmViT):
    """Backbone of our LV-ViT, whose attributes and entry points are named as in timm."""

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, lvvit_network.LVViT)

    def refusal(self, model: Any) -> str | None:
        reason = class_refusal(model, lvvit_network.LVViT)
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

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None) -> Projections:
        q, k, v = project(block.attn, block.norm1(tokens.x), queries)
        return Projections(q, k, v, block.attn.scale)

    def looks(self, block: Any, layer: int, tokens: Tokens) -> Projections:
        q, k = project_some(block.attn, block.norm1(tokens.x), 0, 2)
        return Projections(q, k, k, block.attn.scale)

    def values(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return project_some(block.attn, block.norm1(tokens.x), 2, 3)[0]

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return block.attn.proj(out) / block.skip_lam

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return None if is_overridden(block.norm2, hooks=True) else block.norm2

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.norm2(x) if normed is None else normed) / block.skip_lam

    remove_classifier = Backbone.remove_classifier  # both of its heads are read

    def drop_paths(self, model: Any, rate: float) -> bool:
        return False

    def undecayed(self, model: Any) -> set[str]:
        return set()

    def token_classifier(self, model: Any) -> nn.Module | None:
        return model.aux_head
