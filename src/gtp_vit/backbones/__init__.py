"""The registry of model families: adding one is a file beside this one and a line here."""

from __future__ import annotations

from torch import nn

from gtp_vit.backbones.lvvit import LVViTBackbone
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.loop import Backbone
from gtp_vit.errors import UnsupportedBackbone

BACKBONES: dict[str, Backbone] = {
    "timm_vit": TimmViT(),
    "lvvit": LVViTBackbone(),
}


def find(model: nn.Module) -> Backbone:
    """The backbone that understands every module of `model`; raises UnsupportedBackbone with what is in the way."""
    for backbone in BACKBONES.values():
        if backbone.matches(model):
            reason = backbone.refusal(model)
            if reason is not None:
                raise UnsupportedBackbone(f"{reason}. The model was left as it is")
            return backbone
    raise UnsupportedBackbone(
        f"{type(model).__module__}.{type(model).__qualname__} is not a supported ViT; supported are timm's "
        "VisionTransformer and VisionTransformerDistilled, and gtp_vit's LVViT. The model was left as it is"
    )
