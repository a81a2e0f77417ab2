"""Hugging Face's families of ViTs: the names of the parts of a pre-norm block, and parts that other families lack.

Names are those of transformers 5.18 and newer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ArchitectureSpec:
    """A family's names for its parts, and the parts it has that others lack."""

    model: str  # transformers.models.THIS
    name: str  # with which the names of its classes begin
    tower: str  # name of the ViT's class
    block: str  # name of the class of its blocks
    attention: str  # ... of their attention
    mlps: tuple[str, ...]  # ... of their MLP
    blocks: str  # path of the list of blocks
    norms: tuple[str, str]  # in front of attention and MLP
    projections: str = "attention"
    out: str = "o_proj"
    dropout: str | None = None  # behind both branches
    layer_scales: tuple[str, str] | None = None  # LayerScale of both branches
    pre_norm: str | None = None  # behind the embedding
    last_norm: str | None = "layernorm"  # over all tokens; None: last_hidden_state is not normed
    prefix: int = 1  # class and distillation tokens
    interpolates: bool = True  # takes interpolate_pos_encoding; else images of any size as they are
    rotary: bool = False
    masks_patches: bool = False  # its embedding wants to know which patches are no padding
    other_children: tuple[str, ...] = ()  # more children of the ViT, used by its own forward where that is called

    @property
    def children(self) -> set[str]:
        """Names of the ViT's own children."""
        known = {"embeddings", self.blocks.split(".")[0], self.pre_norm, self.last_norm, *self.other_children}
        return {name for name in known if name is not None}

    @property
    def block_children(self) -> set[str]:
        return {
            *self.norms,
            self.projections,
            "mlp",
            *(self.layer_scales or ()),
            *((self.dropout,) if self.dropout else ()),
        }


def _vit(model: str, name: str, tower: str, **more: Any) -> ArchitectureSpec:
    return ArchitectureSpec(
        *(model, name, tower, f"{name}Layer", f"{name}Attention", (f"{name}MLP",), "layers"),
        norms=("layernorm_before", "layernorm_after"),
        dropout="dropout",
        **more,
    )


def _clip(model: str, name: str, tower: str, **more: Any) -> ArchitectureSpec:
    return ArchitectureSpec(
        *(model, name, tower, f"{name}EncoderLayer", f"{name}Attention", (f"{name}MLP",), "encoder.layers"),
        norms=("layer_norm1", "layer_norm2"),
        projections="self_attn",
        out="out_proj",
        **more,
    )


def _idefics(model: str, name: str) -> ArchitectureSpec:
    """SigLIP for images of any size."""
    siglip = _clip(model, name, f"{name}VisionTransformer", last_norm="post_layernorm", prefix=0)
    names = {"attention": f"{name}VisionAttention", "mlps": (f"{name}VisionMLP",)}
    return dataclasses.replace(siglip, **names, interpolates=False, masks_patches=True)  # type: ignore[arg-type]


def _dino(model: str, name: str, has_gated_mlp: str, blocks: str, **more: Any) -> ArchitectureSpec:
    return ArchitectureSpec(
        *(
            model,
            name,
            f"{name}Model",
            f"{name}Layer",
            f"{name}Attention",
            (f"{name}MLP", f"{name}{has_gated_mlp}"),
            blocks,
        ),
        norms=("norm1", "norm2"),
        layer_scales=("layer_scale1", "layer_scale2"),
        dropout="drop_path",
        interpolates=False,
        **more,
    )


FAMILIES = (
    _vit("vit", "ViT", "ViTModel", other_children=("pooler",)),
    _vit("deit", "DeiT", "DeiTModel", prefix=2, other_children=("pooler",)),
    _vit("vit_msn", "ViTMSN", "ViTMSNModel"),
    _vit("ijepa", "IJepa", "IJepaModel", prefix=0, other_children=("pooler",)),
    _vit("vit_mae", "ViTMAE", "ViTMAEModel"),
    _clip(
        "clip", "CLIP", "CLIPVisionModel", pre_norm="pre_layrnorm", last_norm=None, other_children=("post_layernorm",)
    ),
    _clip("siglip", "Siglip", "SiglipVisionModel", last_norm="post_layernorm", prefix=0, other_children=("head",)),
    _idefics("idefics2", "Idefics2"),
    _idefics("idefics3", "Idefics3"),
    _idefics("smolvlm", "SmolVLM"),
    _dino("dinov2", "Dinov2", "SwiGLUFFN", "encoder.layer"),
    _dino("dinov2_with_registers", "Dinov2WithRegisters", "SwiGLUFFN", "encoder.layer"),
    _dino(
        "dinov3_vit",
        "DINOv3ViT",
        "GatedMLP",
        "model.layer",
        last_norm="norm",
        rotary=True,
        other_children=("rope_embeddings",),
    ),
)
# Qualified names of the classes of a ViT and of its blocks -> how they name their parts
TOWERS = {f"transformers.models.{spec.model}.modeling_{spec.model}.{spec.tower}": spec for spec in FAMILIES}
BLOCKS = {f"transformers.models.{spec.model}.modeling_{spec.model}.{spec.block}": spec for spec in FAMILIES}


def is_tower(model: nn.Module) -> bool:
    """Is it a ViT of these families? A patched one is, as it keeps the name of its class."""
    return _qualified_name(model) in TOWERS


def spec_of(tower: nn.Module) -> ArchitectureSpec:
    """The spelling of a ViT of these families."""
    return TOWERS[_qualified_name(tower)]


def spec_of_block(block: nn.Module) -> ArchitectureSpec:
    """The spelling of the ViT that such a block is from."""
    return BLOCKS[_qualified_name(block)]


def _qualified_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def set_image_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Let a ViT that takes any size be described at this one: DINOv2's configuration has that of its pre-training."""
    module: Any
    for module in model.modules():
        if is_tower(module) and not spec_of(module).interpolates:
            module.described_size = size  # not in the configuration: that is saved with the weights, and must fit them
