"""The registry of model families: adding one is a file beside this one and a line here."""

from __future__ import annotations

import torch
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
    inside = wrapped(model)
    if inside is not None:
        raise UnsupportedBackbone(
            f"{type(model).__name__} is a wrapper; unwrap it, the model itself is {inside}: patch first, then compile "
            "or wrap. The model was left as it is"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedBackbone(
            f"{type(model).__name__} was compiled by TorchScript, and its modules are gone; patch the model it was "
            "made of, then compile that"
        )
    raise UnsupportedBackbone(
        f"{type(model).__module__}.{type(model).__qualname__} is not a supported ViT; supported are timm's "
        "VisionTransformer and VisionTransformerDistilled, and gtp_vit's LVViT. The model was left as it is"
    )


def wrapped(model: nn.Module) -> str | None:
    """Where in a wrapper the model is that we know, e.g. torch.compile's _orig_mod or DataParallel's module."""
    for path, module in model.named_modules():
        if path and any(backbone.matches(module) for backbone in BACKBONES.values()):
            plain = all(part.isidentifier() for part in path.split("."))
            return f"model.{path}" if plain else f"model.get_submodule({path!r})"
    return None
