"""The registry of model families: a new one is a file in this folder and a line here."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from gtp_vit.backbones.lvvit import LVViTBackbone
from gtp_vit.backbones.parts import quiet_copy
from gtp_vit.backbones.timm_beit import TimmBeit
from gtp_vit.backbones.timm_eva import TimmEva
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.backbone import Backbone, Inputs, Output
from gtp_vit.core.costs import Convention, Costs, measure_costs
from gtp_vit.core.reducer import VitInfo
from gtp_vit.errors import UnsupportedBackbone

BACKBONES: dict[str, Backbone] = {
    "timm_vit": TimmViT(),
    "timm_eva": TimmEva(),
    "timm_beit": TimmBeit(),
    "lvvit": LVViTBackbone(),
}
# Models around a ViT: qualified class name -> path of the ViT in the model.
ROOTS: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class Host:
    """A model that can be patched: its family, and where in the model the ViT is."""

    model: nn.Module
    path: str  # "" = the model is the ViT itself
    backbone: Backbone

    @property
    def tower(self) -> nn.Module:
        """The ViT itself."""
        return self.model.get_submodule(self.path)

    @functools.cached_property
    def vit(self) -> VitInfo:
        return self.backbone.describe(self.tower)

    @functools.cached_property
    def inputs(self) -> Inputs:
        return self.backbone.inputs(self.tower)

    @property
    def output(self) -> Output | None:
        """What the model returns; None if there is a model around the ViT, whose output is not known."""
        return self.backbone.output(self.tower) if self.path == "" else None

    def costs(self, grid: tuple[int, int] | None = None, convention: Convention = "model") -> Costs:
        """MACs of the ViT, part by part."""
        return measure_costs(self.backbone, quiet_copy(self.tower), grid, convention)


def find(model: nn.Module) -> Host:
    """The host of a supported model; raises UnsupportedBackbone with the module that is not supported."""
    path = ROOTS.get(f"{type(model).__module__}.{type(model).__qualname__}", "")
    tower = model.get_submodule(path)
    for backbone in BACKBONES.values():
        if backbone.matches(tower):
            reason = backbone.refusal(tower)
            if reason is not None:
                raise UnsupportedBackbone(f"{f'{path}: ' if path else ''}{reason}. The model was left as it is")
            names = [name for name, module in model.named_modules(remove_duplicate=False) if module is tower]
            if len(names) > 1:
                raise UnsupportedBackbone(
                    f"the ViT is at {' and at '.join(names)}, and only one would be reduced; patch model.{path} "
                    "and put it in all these places"
                )
            return Host(model, path, backbone)
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
        "VisionTransformer, VisionTransformerDistilled, Eva and Beit, and gtp_vit's LVViT. The model was left as it is"
    )


def wrapped(model: nn.Module) -> str | None:
    """Where in a wrapper a supported model is, e.g. torch.compile's _orig_mod or DataParallel's module."""
    for path, module in model.named_modules():
        if path and any(backbone.matches(module) for backbone in BACKBONES.values()):
            plain = all(part.isidentifier() for part in path.split("."))
            return f"model.{path}" if plain else f"model.get_submodule({path!r})"
    return None
