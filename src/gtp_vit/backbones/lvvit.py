"""LV-ViT, the network of models/lvvit.py: residuals divided by skip_lam, a second head over the tokens that remain."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.images import check_images
from gtp_vit.backbones.parts import elementwise_macs, is_overridden, linear_macs, project
from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.attention import Projections
from gtp_vit.core.reducer import Elementwise, VitInfo
from gtp_vit.core.tokens import Tokens


class LVViTBackbone:
    """Backbone of our LV-ViT, which has timm's seam and hence timm's entry points."""

    forwards = TimmForwards

    def matches(self, model: nn.Module) -> bool:
        lvvit = sys.modules.get("gtp_vit.models.lvvit")
        return lvvit is not None and isinstance(model, lvvit.LVViT)

    def refusal(self, model: Any) -> str | None:
        lvvit = sys.modules["gtp_vit.models.lvvit"]
        if type(model) is not lvvit.LVViT:
            return f"{type(model).__name__} is a subclass of LVViT whose forward may be its own"
        if is_overridden(model, hooks=False):
            return "the model's forward was replaced on the instance, e.g. by a wrapper; patch first, then wrap"
        for index, block in enumerate(model.blocks):
            known = {"": lvvit.Block, "attn": lvvit.Attention, "mlp": lvvit.Mlp, "attn.qkv": nn.Linear}
            for path, kind in known.items():
                module = block.get_submodule(path)
                if type(module) is not kind and not (kind is nn.Linear and isinstance(module, nn.Linear)):
                    return f"blocks[{index}].{path} is {type(module).__name__}; supported: {kind.__name__}"
                if path in ("", "attn") and is_overridden(module, hooks=True):
                    return f"blocks[{index}].{path} has hooks or a forward of its own; remove them"
        return None

    def describe(self, model: Any) -> VitInfo:
        block, stem = model.blocks[0], model.patch_embed
        dim, head = model.embed_dim, linear_macs(model.head)
        # the three convolutions work at half the resolution
        pixels = stem.patch_size[0] * stem.patch_size[1] // 4
        convolutions = sum(conv.weight.numel() for conv in (stem.conv1, stem.conv2, stem.conv3))
        norms = elementwise_macs(stem.bn1, stem.bn2, stem.bn3)
        return VitInfo(
            depth=len(model.blocks),
            dim=dim,
            heads=block.attn.num_heads,
            head_dim=block.attn.head_dim,
            grid=stem.grid_size,
            prefix=1,
            class_token=True,
            head_reads_image_tokens=True,
            embed_macs_per_patch=pixels * convolutions + stem.proj.weight.numel(),
            embed_elementwise_macs_per_patch=pixels * norms,
            linear_macs=(linear_macs(block.attn), linear_macs(block.mlp)),
            elementwise_macs=Elementwise(keys=dim, queries=dim, output=0, mlp=dim),
            final_elementwise_macs=dim,
            head_macs=head,
            head_macs_per_token=linear_macs(model.aux_head),
            head_reads_prefix_too=False,
            head_averages_image_tokens=False,
            pooled_elementwise_macs=0,
        )

    def head_reads_image_tokens(self, model: Any) -> bool:
        return True

    def embed(self, model: Any, images: Tensor) -> Tokens:
        check_images(model, model.patch_embed.conv1, images)
        x = model.embed(images)
        cell = torch.arange(x.shape[1] - 1, device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), 1, model.patch_embed.grid_size)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def saves_memory(self, model: Any) -> bool:
        return model.grad_checkpointing

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None) -> Projections:
        q, k, v = project(block.attn, block.norm1(tokens.x), queries)
        return Projections(q, k, v, block.attn.scale)

    def output(self, block: Any, out: Tensor) -> Tensor:
        return block.attn.proj(out) / block.skip_lam

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return None if is_overridden(block.norm2, hooks=True) else block.norm2

    def mlp(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.norm2(x) if normed is None else normed) / block.skip_lam
