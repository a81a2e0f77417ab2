"""Small models of the families in this package, for tests: four layers, 64 patches.

Sizes that families share stand once; what is special about each small model stands beside its name.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import timm
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import nn

Factories = dict[str, Callable[[], nn.Module]]
DEPTH = 4
SMALL: dict[str, Any] = {
    "embed_dim": 24,
    "depth": DEPTH,
    "num_heads": 3,
    "img_size": 64,
    "patch_size": 8,
    "num_classes": 10,
}

# name -> (timm model, arguments)
TIMM_VIT: dict[str, tuple[str, dict[str, Any]]] = {
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
TIMM_EVA: dict[str, tuple[str, dict[str, Any]]] = {
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
QWEN = {"pos_embed_grid_size": 6}  # resampled to the images' grid
TIMM_QWEN: dict[str, tuple[str, dict[str, Any]]] = {}
if timm.is_model("qwen3_vit_88m"):  # not in older versions
    TIMM_QWEN["qwen"] = ("qwen3_vit_88m", QWEN)
TIMM_BEIT: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", {}),
    "beit_shared": ("beitv2_base_patch16_224", {"use_shared_rel_pos_bias": True, "global_pool": "token"}),
    "beit_only_shared": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": True, "qkv_bias": False},
    ),
}


def of_timm(name: str, arguments: dict[str, Any], depth: int = DEPTH) -> nn.Module:
    return timm.create_model(name, **{**SMALL, "depth": depth, **arguments})


def mobile_clip(depth: int = DEPTH) -> nn.Module:
    """vit_base_mci_224 in small: convolutions with BatchNorm, and no projection of their output."""
    stem = ConvStem(channels=24, stride=(2, 2, 2))
    embed = functools.partial(HybridEmbed, backbone=stem, proj=False)
    sizes = {**SMALL, "patch_size": 1, "depth": depth}
    return VisionTransformer(**sizes, embed_layer=embed, no_embed_class=True)


HUGGING_FACE_SIZES = {
    "image_size": 64,
    "patch_size": 8,
    "hidden_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 3,
}


def hugging_face(name: str, config: str, **more: object) -> nn.Module:
    """A model of transformers; `name` and `config` are its classes."""
    import transformers

    sizes: dict[str, Any] = dict(HUGGING_FACE_SIZES)
    if "Dinov2" not in name:
        sizes["intermediate_size"] = 48
    if "Vision" in config and "Vision" not in name:  # a model of images and texts, or its classifier
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        text |= {
            "vocab_size": 50,
            "max_position_embeddings": 12,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }
        text |= {"hidden_size": 24, "projection_size": 24} if "Siglip" in name else {}
        vision = getattr(transformers, config)(**sizes).to_dict()
        whole = getattr(transformers, config.replace("Vision", ""))
        return getattr(transformers, name)(whole(vision_config=vision, text_config=text, **more))
    return getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **more}))


# name -> (class, class of its configuration, settings)
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_vit": ("ViTForImageClassification", "ViTConfig", {"num_labels": 10}),
    "hf_vit_base": ("ViTModel", "ViTConfig", {"qkv_bias": False}),
    "hf_deit": ("DeiTForImageClassification", "DeiTConfig", {"num_labels": 10}),
    "hf_deit_teacher": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"num_labels": 10}),
    "hf_msn": ("ViTMSNForImageClassification", "ViTMSNConfig", {"num_labels": 10}),
    "hf_msn_base": ("ViTMSNModel", "ViTMSNConfig", {}),
    "hf_ijepa": ("IJepaForImageClassification", "IJepaConfig", {"num_labels": 10}),
    "hf_clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", {}),
    "hf_clip_projection": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {"projection_dim": 16}),
    "hf_clip": ("CLIPForImageClassification", "CLIPVisionConfig", {"num_labels": 10}),
    "hf_siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "hf_siglip": ("SiglipForImageClassification", "SiglipVisionConfig", {"num_labels": 10}),
    "hf_dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {"num_labels": 10, "mlp_ratio": 2}),
    "hf_dinov2_base": ("Dinov2Model", "Dinov2Config", {"use_swiglu_ffn": True}),
    "hf_dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"mlp_ratio": 2}),
    "hf_dinov2_registers_classes": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {"num_labels": 10, "mlp_ratio": 2},
    ),
    "hf_dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_attention_heads": 2, "num_register_tokens": 4}),
    "hf_dinov3_gated": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {"num_attention_heads": 2, "use_gated_mlp": True, "image_size": (48, 80)},
    ),
}
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None  # not on Python 3.10


def from_hugging_face(family: str, depth: int = DEPTH) -> nn.Module:
    name, config, more = HUGGING_FACE[family]
    with mock.patch.dict(HUGGING_FACE_SIZES, num_hidden_layers=depth):
        return hugging_face(name, config, **more)


# An even number of heads: nn.MultiheadAttention's fast path needs it.
TORCHVISION = {"image_size": 64, "patch_size": 8, "num_heads": 4, "hidden_dim": 24, "mlp_dim": 96}


def torchvision_vit(depth: int = DEPTH, *, stem: bool = False, **arguments: object) -> nn.Module:
    from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

    strides = (2, 2, 2, 1) if stem else ()
    configs = [ConvStemConfig(out_channels=8, kernel_size=3, stride=stride) for stride in strides] or None
    sizes = {**TORCHVISION, "num_layers": depth, "num_classes": 10, "conv_stem_configs": configs}
    return VisionTransformer(**{**sizes, **arguments})


OPEN_CLIP = {
    "image_size": 64,
    "patch_size": 8,
    "width": 24,
    "heads": 4,
    "mlp_ratio": 4.0,
    "output_dim": 16,
    "attn_pooler_queries": 6,
    "attn_pooler_heads": 4,
}


def open_clip_vit(
    depth: int = DEPTH, *, quickgelu: bool = False, fp32_norm: bool = False, proj: bool = True, **sizes: object
) -> nn.Module:
    from open_clip import transformer

    kinds: dict[str, object] = {"act_layer": transformer.QuickGELU} if quickgelu else {}
    kinds |= {"norm_layer": transformer.LayerNormFp32} if fp32_norm else {}
    model = transformer.VisionTransformer(**{**OPEN_CLIP, "layers": depth, **kinds, **sizes})
    if not proj:
        model.proj = None
    return model


OPEN_CLIP_VIT: dict[str, dict[str, Any]] = {
    "open_clip": {},
    "open_clip_quickgelu": {"quickgelu": True, "ls_init_value": 0.1, "image_size": (48, 96)},
    "open_clip_avg": {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "open_clip_avg_of_normed": {"pool_type": "avg", "proj": False, "pos_embed_type": "sin_cos_2d"},
    "open_clip_all_tokens": {"pool_type": "none", "fp32_norm": True},
    "open_clip_coca": {"attentional_pool": True},
    "open_clip_parallel": {"attentional_pool": "parallel", "output_dim": 24},
    "open_clip_cascade": {"attentional_pool": "cascade", "output_dim": 24},
    "open_clip_custom": {
        "qk_norm": True,
        "scale_heads": True,
        "scale_attn_inner": True,
        "scale_attn": True,
        "scale_fc": True,
        "ls_init_value": 0.1,
    },
}


def _of_timm(models: dict[str, tuple[str, dict[str, Any]]], depth: int) -> Factories:
    return {family: functools.partial(of_timm, *arguments, depth) for family, arguments in models.items()}


def timm_vits(depth: int) -> Factories:
    return {**_of_timm(TIMM_VIT, depth), "hybrid_batch_norm": functools.partial(mobile_clip, depth)}


def timm_evas(depth: int) -> Factories:
    return _of_timm(TIMM_EVA, depth)


def timm_beits(depth: int) -> Factories:
    return _of_timm(TIMM_BEIT, depth)


def timm_qwens(depth: int) -> Factories:
    return _of_timm(TIMM_QWEN, depth)


def hf_vits(depth: int) -> Factories:
    return {family: functools.partial(from_hugging_face, family, depth) for family in HUGGING_FACE if HAS_TRANSFORMERS}


def torchvision_vits(depth: int) -> Factories:
    return {
        "torchvision": functools.partial(torchvision_vit, depth),
        "torchvision_stem": functools.partial(torchvision_vit, depth, stem=True, representation_size=12),
    }


def open_clip_vits(depth: int) -> Factories:
    return {name: functools.partial(open_clip_vit, depth, **sizes) for name, sizes in OPEN_CLIP_VIT.items()}
