"""Small instances of every supported model family, with all parameters random so that none can hide.

A family is listed under its backbone; the conformance battery runs over all of them.
"""

from __future__ import annotations

import functools

import timm
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn

from gtp_vit.patch import host_of

SMALL = {"embed_dim": 24, "depth": 4, "num_heads": 3, "img_size": 64, "patch_size": 8, "num_classes": 10}

# name -> (timm model, arguments)
TIMM_VIT: dict[str, tuple[str, dict]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "clip": ("vit_base_patch16_clip_224", {}),
    "clip_quickgelu": ("vit_base_patch16_clip_quickgelu_224", {}),
    "dinov2": ("vit_small_patch14_dinov2", {}),
    "dinov2_registers": ("vit_small_patch14_reg4_dinov2", {}),
    "dinov2_swiglu": ("vit_giant_patch14_dinov2", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "siglip_gap": ("vit_base_patch16_siglip_gap_224", {}),
    "gap": ("vit_medium_patch16_gap_256", {}),
    "gap_registers": ("vit_medium_patch16_reg4_gap_256", {}),
    "eva_l": ("eva_large_patch14_196", {}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True, "init_values": 0.1}),
    "non_square": ("vit_tiny_patch16_224", {"img_size": (48, 96)}),
    "dynamic": ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
    "avg_with_class_token": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "all_tokens": ("vit_tiny_patch16_224", {"global_pool": ""}),
    "no_qkv_bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "res_post_norm": ("vit_base_patch16_rpn_224", {}),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"patch_size": 2}),  # a stem of stride 4
}
# One of each kind of rotary positions, attention, projections, MLP, norms, head and prefix.
TIMM_EVA: dict[str, tuple[str, dict]] = {
    "dinov3": ("vit_small_patch16_dinov3", {}),
    "dinov3_padded": ("vit_small_plus_patch16_dinov3", {"dynamic_img_pad": True}),
    "dinov3_bias": ("vit_small_plus_patch16_dinov3_qkvb", {"dynamic_img_size": False}),
    "eva": ("eva_giant_patch14_224", {"init_values": 0.1}),
    "eva02": ("eva02_base_patch14_224", {}),
    "eva02_clip": ("eva02_base_patch16_clip_224", {}),
    "eva02_post_norm": ("eva02_enormous_patch14_clip_224", {"use_rot_pos_emb": True}),
    "eva02_small": ("eva02_small_patch14_224", {"img_size": (48, 96)}),
    "pe_core": ("vit_pe_core_base_patch16_224", {}),
    "pe_lang": ("vit_pe_lang_gigantic_patch14_448", {}),
    "rope_gap": ("vit_betwixt_patch16_rope_reg4_gap_256", {}),
    "rope_mixed": ("vit_small_patch16_rope_mixed_ape_224", {}),
}
if timm.is_model("vit_base_patch16_sapiens2"):  # not in older versions; queries and keys have norms
    TIMM_EVA["sapiens2"] = ("vit_base_patch16_sapiens2", {"num_kv_heads": 3})
TIMM_BEIT: dict[str, tuple[str, dict]] = {
    "beit": ("beit_base_patch16_224", {}),
    "beit_shared": ("beitv2_base_patch16_224", {"use_shared_rel_pos_bias": True, "global_pool": "token"}),
    "beit_only_shared": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": True, "qkv_bias": False},
    ),
}


def of_timm(name: str, arguments: dict) -> nn.Module:
    return timm.create_model(name, **{**SMALL, **arguments})


def mobile_clip() -> nn.Module:
    """vit_base_mci_224 in small: convolutions with BatchNorm, and no projection of their output."""
    stem = ConvStem(channels=24, stride=(2, 2, 2))
    embed = functools.partial(HybridEmbed, backbone=stem, proj=False)
    return VisionTransformer(**{**SMALL, "patch_size": 1}, embed_layer=embed, no_embed_class=True)


def lvvit(**sizes: object) -> nn.Module:
    from gtp_vit.models.lvvit import LVViT

    return LVViT(**{**SMALL, "stem_width": 8, **sizes})


# backbone -> family -> a function that makes a small model
FAMILIES = {
    "timm_vit": {
        **{family: functools.partial(of_timm, *made) for family, made in TIMM_VIT.items()},
        "hybrid_batch_norm": mobile_clip,
    },
    "timm_eva": {family: functools.partial(of_timm, *made) for family, made in TIMM_EVA.items()},
    "timm_beit": {family: functools.partial(of_timm, *made) for family, made in TIMM_BEIT.items()},
    "lvvit": {"lvvit": lvvit, "lvvit_non_square": functools.partial(lvvit, img_size=(48, 96), skip_lam=3.0)},
}
ALL = [(backbone, family) for backbone, families in FAMILIES.items() for family in families]
NAMES = [family for _, family in ALL]
# Families whose blocks differ from another one's in details only pass the short battery: the whole one on every family
# would take an hour.
LIGHT = {"res_post_norm", "hybrid", "hybrid_batch_norm", *TIMM_EVA, *TIMM_BEIT} - {
    "dinov3",
    "rope_mixed",
    "beit_shared",
}
THOROUGH = [family for family in NAMES if family not in LIGHT]
# One of each kind of head and prefix, for the tests that take seconds each.
FEW = ["vit", "deit_distilled", "dinov2_registers", "gap"]


@functools.cache
def has_class_token(family: str) -> bool:
    return host_of(make(family)).vit.class_token


@functools.cache
def head_reads_image_tokens(family: str) -> bool:
    return host_of(make(family)).vit.head_reads_image_tokens


def make(family: str) -> nn.Module:
    """A new small model in eval mode, the same in every run."""
    factory = next(families[family] for families in FAMILIES.values() if family in families)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = factory()
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.15 * torch.randn(parameter.shape)
    return model.eval()


@functools.cache
def images(family: str, batch: int = 3) -> torch.Tensor:
    host = host_of(make(family))
    height, width = (cells * pixels for cells, pixels in zip(host.vit.grid, host.inputs.patch, strict=True))
    return torch.randn(batch, host.inputs.channels, height, width, generator=torch.Generator().manual_seed(1))
