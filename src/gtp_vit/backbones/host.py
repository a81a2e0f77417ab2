"""Which part of a model is a ViT, of which family, and what the model around it does: `find`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit import backbones
from gtp_vit.backbones.modules import no_features, quiet_copy
from gtp_vit.backbones.wrappers import ROOTS, Root, has_classes, labels, refused
from gtp_vit.core.backbone import Backbone, Inputs, Output
from gtp_vit.core.costs import Convention, Costs, measure_costs
from gtp_vit.core.reducer import VitInfo
from gtp_vit.errors import UnsupportedBackbone


@dataclass(frozen=True, eq=False)
class Host:
    """A model that can be patched: its family, and where in the model the ViT is."""

    model: nn.Module
    path: str  # "" = the model is the ViT itself
    backbone: Backbone
    around: nn.Module  # the module right around the ViT; the ViT itself if there is none
    root: Root | None = None  # what that module does with the ViT
    needs_grid: str | None = None  # why no patch may be missing, as a sentence; None if some may

    @property
    def tower(self) -> nn.Module:
        """The ViT itself."""
        return self.model.get_submodule(self.path)

    @functools.cached_property
    def vit(self) -> VitInfo:
        own = self.backbone.describe(self.tower)
        return own if self.root is None else self.root.describe(self.around, own)

    @functools.cached_property
    def inputs(self) -> Inputs:
        own, output = self.backbone.inputs(self.tower), self.output
        stored = getattr(self.around, "pretrained_cfg", None)
        if self.root is not None and not own.preparation and isinstance(stored, dict):  # timm gave it to the outer one
            name, tag = str(stored.get("architecture") or own.name), str(stored.get("tag") or "")
            own = dataclasses.replace(own, name=name, weights=tag, preparation=stored)
        if self.root is None or output is None or output.kind != "classes":
            return own
        return dataclasses.replace(own, classes=output.width, labels=labels(self.model))

    @functools.cached_property
    def output(self) -> Output | None:
        """What the model returns; None if there is a model around the ViT, whose output is not known."""
        root = self.root
        if root is None:
            return self.backbone.output(self.tower)
        if self.around is not self.model or root.kind is None:
            return None
        if root.kind == "as the ViT" or root.head is None:
            return self.backbone.output(self.tower)
        with torch.no_grad():
            width = self._head(quiet_copy(self.model), no_features(self.vit, self.tower)).shape[1]
        # A classifier that was made for no classes hands the features on.
        return Output("features" if root.kind == "classes" and not has_classes(self.model) else root.kind, width)

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices of the ViT's blocks, by which settings that were learned know their model; none on meta."""
        blocks = self.backbone.blocks(self.tower)
        return _with_data([each for block in blocks for each in block.parameters() if each.ndim == 2])

    @property
    def weights(self) -> list[Tensor]:
        """All weights of the model, by which figures know what they were measured on; none on meta."""
        return _with_data(list(self.model.parameters()))

    def costs(self, grid: tuple[int, int] | None = None, convention: Convention = "model") -> Costs:
        """MACs of the ViT, part by part; of a model around it only a head that is known."""
        around: Any = quiet_copy(self.around)
        tower = around if self.root is None else around.get_submodule(self.root.path)
        head = functools.partial(self._head, around)
        return measure_costs(self.backbone, tower, self.vit, head, grid, convention)

    def _head(self, around: nn.Module, features: Tensor) -> Tensor:
        """What a copy of the model right around the ViT makes of its features."""
        if self.root is None:
            return self.backbone.head(around, features)
        tower = around.get_submodule(self.root.path)
        if self.vit.depth < len(self.backbone.blocks(tower)):  # it reads an earlier layer, and no head is run
            return features
        pooled = self.backbone.head(tower, features)
        return pooled if self.root.head is None else self.root.head(around, features, pooled)


def find(model: nn.Module) -> Host:
    """The host of a supported model; raises UnsupportedBackbone with the module that is not supported."""
    reason = refused(model)
    if reason is not None:
        raise UnsupportedBackbone(f"{reason}. The model was left as it is")
    path, tower, around, root, needs_grid = _inside(model)
    backbone = _family_of(tower, path)
    if backbone is not None:
        names = [name for name, module in model.named_modules(remove_duplicate=False) if module is tower]
        if len(names) > 1:
            raise UnsupportedBackbone(
                f"the ViT is at {' and at '.join(names)}, and only one would be reduced; patch model.{path} "
                "and put it in all these places"
            )
        if needs_grid is None and (root is None or root.reads != "mean"):
            needs_grid = _no_patch_missing(tower, backbone.needs_grid(tower))
        return Host(model, path, backbone, around, root, needs_grid)
    if root is not None:
        raise UnsupportedBackbone(
            f"{path} of this {type(model).__name__} is a {_name(tower)}, which is not a supported ViT. The model was "
            "left as it is"
        )
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
    supported = [f"{title}'s {', '.join(classes)}" for title, classes in supported_classes().items()]
    raise UnsupportedBackbone(
        f"{_name(model)} is not a supported ViT; supported are {'; '.join(supported)}. The model was left as it is"
    )


def _family_of(tower: nn.Module, path: str) -> Backbone | None:
    """The first family that takes a ViT, one of other packages at last; None if no family knows it.

    Raises UnsupportedBackbone with the reason of the first that knows and refuses it.
    """
    reasons = []
    for registry in (lambda: backbones.BACKBONES, backbones.known_backbones):
        for backbone in registry().values():
            if backbone.matches(tower):
                reason = backbone.refusal(tower)
                if reason is None:
                    return backbone
                reasons.append(reason)
    if reasons:
        raise UnsupportedBackbone(f"{f'{path}: ' if path else ''}{reasons[0]}. The model was left as it is")
    return None


def supported_classes() -> dict[str, list[str]]:
    """Library -> the classes of its ViTs that are supported."""
    found: dict[str, list[str]] = {}
    for family in backbones.known_backbones().values():
        found.setdefault(family.library().title, []).extend(family.classes)
    return found


def remove_classifier(model: nn.Module) -> None:
    """Let a model that scores classes return the pooled features that its last layer reads; others stay as they are."""
    host = find(model)
    if host.output is None or host.output.kind != "classes":
        return
    if host.root is not None and host.root.kind == "classes":
        host.root.remove_classifier(host.around)
    else:
        host.backbone.remove_classifier(host.tower)


def _inside(model: nn.Module) -> tuple[str, nn.Module, nn.Module, Root | None, str | None]:
    """The path of the innermost model that is no root, that model, the one right around it, what that one does, and why
    any of them needs the full grid."""
    path: list[str] = []
    here, around = model, model
    root: Root | None = None
    needs_grid: str | None = None
    while _name(here) in ROOTS:
        around, root = here, ROOTS[_name(here)]
        needs_grid = needs_grid or _no_patch_missing(here, root.why_grid(here))
        path.append(root.path)
        here = here.get_submodule(root.path)
    return ".".join(path), here, around, root, needs_grid


def _with_data(tensors: list[Tensor]) -> list[Tensor]:
    return [] if any(each.is_meta for each in tensors) else tensors


def _no_patch_missing(model: nn.Module, reason: str | None) -> str | None:
    return None if reason is None else f"{type(model).__name__} {reason}, so no patch may be missing"


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def wrapped(model: nn.Module) -> str | None:
    """Where in a wrapper a supported model is, e.g. torch.compile's _orig_mod or DataParallel's module."""
    for path, module in model.named_modules():
        if path and any(backbone.matches(module) for backbone in backbones.known_backbones().values()):
            plain = all(part.isidentifier() for part in path.split("."))
            return f"model.{path}" if plain else f"model.get_submodule({path!r})"
    return None
