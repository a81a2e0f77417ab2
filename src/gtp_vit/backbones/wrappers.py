"""Models around a ViT: where the ViT is in them, and what they read of it.

They keep their class and their own forward; only the ViT inside is reduced. This file imports none of their libraries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import UnsupportedModelError


@dataclass(frozen=True)
class Wrapper:
    """A class of models around a ViT, and what it does with the ViT's output."""

    path: str  # of the ViT, or of a root further inside
    # Which tokens it reads, where the ViT alone would not know; mean: the plain mean of the image tokens.
    reads_image_tokens: Literal["as the ViT", "prefix", "all", "mean"] = "as the ViT"
    # (model, the ViT's features, what its own head makes of them) -> output; None: there is nothing behind the ViT
    head: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    kind: Literal["classes", "embedding", "as the ViT"] | None = None  # of its output; None: it takes more than images
    layers: Callable[[Any, int], int] | None = None  # (model, depth) -> how many layers of the ViT it uses; None: all
    # Why no patch may be missing, so that it can be patched with restore only; of a model, if that depends on it.
    needs_all_patches: str | Callable[[Any], str | None] | None = None

    def why_all_patches(self, model: Any) -> str | None:
        return self.needs_all_patches(model) if callable(self.needs_all_patches) else self.needs_all_patches

    def remove_classifier(self, model: nn.Module) -> None:
        """Let the model return what its classifier reads."""
        for name in _classifiers(model):
            setattr(model, name, nn.Identity())

    def describe(self, model: nn.Module, vit: ViTInfo) -> ViTInfo:
        """The sizes of the ViT as this model, right around it, uses it."""
        depth = vit.depth if self.layers is None else self.layers(model, vit.depth)
        if self.reads_image_tokens == "as the ViT":
            return dataclasses.replace(vit, depth=depth)
        return dataclasses.replace(
            vit,
            depth=depth,
            head_reads_image_tokens=self.reads_image_tokens != "prefix",
            head_averages_image_tokens=self.reads_image_tokens == "mean",
        )


def _class_token(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.classifier(x[:, 0])


def _teacher(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return (model.cls_classifier(x[:, 0]) + model.distillation_classifier(x[:, 1])) / 2


def _mean(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.classifier(x.mean(dim=1))


def _mean_behind_class_token(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.classifier(x[:, 1:].mean(dim=1))


def _class_token_and_mean(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    prefix = 1 + getattr(model.config, "num_register_tokens", 0)
    return model.classifier(torch.cat([x[:, 0], x[:, prefix:].mean(dim=1)], dim=1))


def _clip_embedding(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.visual_projection(pooled)


def _projection(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.head(pooled)


def _after_mean(model: Any, x: Tensor, pooled: Tensor) -> Tensor:
    return model.forward_head(pooled)


def _qwen(model: Any) -> str | None:
    if model.encoder_pool == "merge":
        return "joins the channels of neighbouring patches"
    return None if model.global_pool == "avg" else "has outputs for every patch"


def _layers_read(model: Any) -> list[int]:
    """LLaVA takes hidden_states[vision_feature_layer], of which the first is the embedding; several it joins."""
    config = model.config  # VipLLaVA's had another name
    layers = config.vision_feature_layers if "vision_feature_layers" in vars(config) else config.vision_feature_layer
    return [layers] if isinstance(layers, int) else list(layers)


def _last_layer_read(model: Any, depth: int) -> int:
    layers = _layers_read(model)
    used = [layer if layer >= 0 else depth + 1 + layer for layer in layers]
    if not all(0 <= layer <= depth for layer in used) or not any(used):
        raise UnsupportedModelError(
            f"config.vision_feature_layer is {model.config.vision_feature_layer}, and the ViT has {depth} layers; give "
            f"{'one' if len(layers) == 1 else 'each'} from {-depth} to -1"
        )
    return max(used)


def _concatenates_layers(model: Any) -> str | None:
    layers = _layers_read(model)
    return None if len(layers) == 1 else f"joins the channels of layers {layers} of its ViT"


def _hf(family: str, names: dict[str, Wrapper]) -> dict[str, Wrapper]:
    return {f"transformers.models.{family}.modeling_{family}.{name}": root for name, root in names.items()}


def _classifier(path: str, reads: Any, head: Any) -> Wrapper:
    return Wrapper(path, reads, head, "classes")


def _vlm(family: str, name: str, path: str = "vision_tower", **more: Any) -> dict[str, Wrapper]:
    """A model of images and language: `path` is its ViT."""
    return _hf(
        family, {f"{name}ForConditionalGeneration": Wrapper("model"), f"{name}Model": Wrapper(path, "all", **more)}
    )


NEEDS_GRID = "puts the tokens of its ViT back on a grid"
JOINS_PATCHES = "joins the channels of neighbouring patches"

# Qualified class name -> what it does. A root may contain another root.
WRAPPERS: dict[str, Wrapper] = {
    **_hf("vit", {"ViTForImageClassification": _classifier("vit", "prefix", _class_token)}),
    **_hf(
        "deit",
        {
            "DeiTForImageClassification": _classifier("deit", "prefix", _class_token),
            "DeiTForImageClassificationWithTeacher": _classifier("deit", "prefix", _teacher),
        },
    ),
    **_hf("vit_msn", {"ViTMSNForImageClassification": _classifier("vit", "prefix", _class_token)}),
    **_hf("ijepa", {"IJepaForImageClassification": _classifier("ijepa", "mean", _mean)}),
    **_hf(
        "clip",
        {
            "CLIPModel": Wrapper("vision_model", "all"),
            "CLIPVisionModelWithProjection": Wrapper("vision_model", "all", _clip_embedding, "embedding"),
            "CLIPForImageClassification": _classifier("vision_model", "mean", _mean_behind_class_token),
        },
    ),
    **_hf(
        "siglip",
        {
            "SiglipModel": Wrapper("vision_model", "all"),
            "SiglipForImageClassification": _classifier("vision_model", "mean", _mean),
        },
    ),
    **_hf("dinov2", {"Dinov2ForImageClassification": _classifier("dinov2", "all", _class_token_and_mean)}),
    **_hf(
        "dinov2_with_registers",
        {
            "Dinov2WithRegistersForImageClassification": _classifier(
                "dinov2_with_registers", "all", _class_token_and_mean
            )
        },
    ),
    **_hf(
        "timm_wrapper",
        {
            "TimmWrapperModel": Wrapper("timm_model", "all", kind="as the ViT"),
            "TimmWrapperForImageClassification": Wrapper("timm_model", kind="as the ViT"),
        },
    ),
    **_vlm("llava", "Llava", layers=_last_layer_read, needs_all_patches=_concatenates_layers),
    **_vlm("vipllava", "VipLlava", layers=_last_layer_read, needs_all_patches=_concatenates_layers),
    **_vlm("llava_next", "LlavaNext", layers=_last_layer_read, needs_all_patches=NEEDS_GRID),
    **_vlm("llava_next_video", "LlavaNextVideo", layers=_last_layer_read, needs_all_patches=NEEDS_GRID),
    **_vlm("llava_onevision", "LlavaOnevision", layers=_last_layer_read, needs_all_patches=NEEDS_GRID),
    **_vlm("aya_vision", "AyaVision", layers=_last_layer_read, needs_all_patches=NEEDS_GRID),
    **_vlm("cohere2_vision", "Cohere2Vision", needs_all_patches=NEEDS_GRID),
    **_vlm("gemma3", "Gemma3", needs_all_patches=NEEDS_GRID),
    **_vlm("paligemma", "PaliGemma"),
    **_vlm("perception_lm", "PerceptionLM", needs_all_patches=NEEDS_GRID),
    **_vlm("idefics2", "Idefics2", "vision_model", needs_all_patches="masks all patches once more behind its ViT"),
    **_vlm("idefics3", "Idefics3", "vision_model", needs_all_patches=NEEDS_GRID),
    **_vlm("smolvlm", "SmolVLM", "vision_model", needs_all_patches=NEEDS_GRID),
    **_vlm("qwen2_vl", "Qwen2VL", "visual", needs_all_patches=JOINS_PATCHES),
    **_vlm("qwen3_vl", "Qwen3VL", "visual", needs_all_patches=JOINS_PATCHES),
    **_vlm("qwen3_vl_moe", "Qwen3VLMoe", "visual", needs_all_patches=JOINS_PATCHES),
    **_vlm("qwen3_5", "Qwen3_5", "visual", needs_all_patches=JOINS_PATCHES),
    **_vlm("qwen3_5_moe", "Qwen3_5Moe", "visual", needs_all_patches=JOINS_PATCHES),
    "timm.models.qwen3_vit.Qwen3VitClassifier": Wrapper(
        "encoder", "mean", _after_mean, "classes", needs_all_patches=_qwen
    ),
    "timm.models._features.FeatureGetterNet": Wrapper("model", "all", needs_all_patches="returns feature maps"),
    "open_clip.model.CLIP": Wrapper("visual"),
    "open_clip.model.CustomTextCLIP": Wrapper("visual"),
    "open_clip.coca_model.CoCa": Wrapper("visual"),
    "open_clip.timm_model.TimmModel": Wrapper("trunk", head=_projection, kind="embedding"),
}

_PACKED = "packs the patches of all images into one sequence, which has no images to remove as many tokens from each of"
# Families of models whose ViT cannot be reduced inside them, even if it is put back, and why.
REFUSED: dict[str, str] = {
    "qwen2_5_vl": "attends within windows in most layers of its ViT, which would differ in length once tokens leave",
    **dict.fromkeys(("mistral3", "lighton_ocr", "pixtral"), _PACKED),
    "lfm2_vl": "pads images of different sizes to one length and masks what was added in the attention of its ViT",
    "granite4_vision": "gives other layers of its ViT to other layers of the language model",
    "internvl": "has a ViT of its own, InternVLVisionModel, which is not supported",
}


def unsupported_reason(model: nn.Module) -> str | None:
    """Why this model around a ViT is refused as a whole; None if nothing is known against it."""
    parts = type(model).__module__.split(".")
    reason = REFUSED.get(parts[2]) if parts[:2] == ["transformers", "models"] and len(parts) > 2 else None
    return None if reason is None else f"{type(model).__name__} {reason}; reduce the language model's tokens instead"


def has_classes(model: nn.Module) -> bool:
    """Has a classifier around a ViT a layer for its classes?"""
    return not any(isinstance(layer, nn.Identity) for layer in _classifiers(model).values())


def _classifiers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers for classes of a classifier around a ViT; DeiT's with a teacher has two."""
    return {name: layer for name, layer in model.named_children() if "classifier" in name or name == "head"}


def labels(model: Any) -> tuple[str, ...] | None:
    """Names of the classes of a Hugging Face classifier; None if it was never told any."""
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    names = tuple(str(named[index]) for index in sorted(named))
    return None if not names or all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names
