"""The registry of model families: a new one is a file in this folder and a line here, or an entry point."""

from gtp_vit.backbones.hf_packed import HuggingFacePackedViT
from gtp_vit.backbones.hf_vit import HuggingFaceViT
from gtp_vit.backbones.lvvit import LVViTBackbone
from gtp_vit.backbones.open_clip_vit import OpenClipViT
from gtp_vit.backbones.timm_beit import TimmBeit
from gtp_vit.backbones.timm_eva import TimmEva
from gtp_vit.backbones.timm_qwen import TimmQwen
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.backbones.torchvision_vit import TorchvisionViT
from gtp_vit.core.backbone import Backbone

BACKBONES: dict[str, Backbone] = {
    "timm_vit": TimmViT(),
    "timm_eva": TimmEva(),
    "timm_beit": TimmBeit(),
    "timm_qwen": TimmQwen(),
    "lvvit": LVViTBackbone(),
    "hf_vit": HuggingFaceViT(),
    "hf_packed": HuggingFacePackedViT(),
    "torchvision_vit": TorchvisionViT(),
    "open_clip_vit": OpenClipViT(),
}


def known_backbones() -> dict[str, Backbone]:
    """BACKBONES, after those of other packages (entry points in the group gtp_vit.backbones) were added to it."""
    from gtp_vit.plugins import plugins

    kinds: dict[str, type] = {name: type(family) for name, family in BACKBONES.items()}
    for name, kind in plugins("gtp_vit.backbones", Backbone, kinds).items():
        BACKBONES.setdefault(name, kind())
    return BACKBONES
