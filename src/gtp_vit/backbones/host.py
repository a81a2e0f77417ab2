"""Finding the ViT in a model, its family, and what the model around it does: `find`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit import backbones
from gtp_vit.backbones.modules import hookless_eval_copy, zero_features
from gtp_vit.backbones.wrappers import WRAPPERS, Wrapper, has_classes, labels, unsupported_reason
from gtp_vit.core.backbone import Backbone, Inputs, Output
from gtp_vit.core.costs import TORCH_CONVENTION, Convention, Costs, measure_costs
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Host:
    """A model that can be patched: its family, and where in the model the ViT is."""

    model: nn.Module
    path: str  # "" = the model is the ViT itself
    backbone: Backbone
    parent: nn.Module  # the module right around the ViT; the ViT itself if there is none
    wrapper: Wrapper | None = None  # what that module does with the ViT
    needs_all_patches: str | None = None  # why no patch may be missing, as a sentence; None if some may

    @property
    def tower(self) -> nn.Module:
        """The ViT itself."""
        return self.model.get_submodule(self.path)

    @functools.cached_property
    def vit(self) -> ViTInfo:
        vit = self.backbone.vit_info(self.tower)
        return vit if self.wrapper is None else self.wrapper.describe(self.parent, vit)

    @functools.cached_property
    def inputs(self) -> Inputs:
        inputs, output = self.backbone.inputs(self.tower), self.output
        stored = getattr(self.parent, "pretrained_cfg", None)
        # timm stores pretrained_cfg on the outer model.
        if self.wrapper is not None and not inputs.preprocessing and isinstance(stored, dict):
            name, tag = str(stored.get("architecture") or inputs.name), str(stored.get("tag") or "")
            inputs = dataclasses.replace(inputs, name=name, weights=tag, preprocessing=stored)
        if self.wrapper is None or output is None or output.kind != "classes":
            return inputs
        return dataclasses.replace(inputs, classes=output.width, labels=labels(self.model))

    @functools.cached_property
    def output(self) -> Output | None:
        """The kind of output; None if there is a model around the ViT, whose output is not known."""
        wrapper = self.wrapper
        if wrapper is None:
            return self.backbone.output(self.tower)
        if self.parent is not self.model or wrapper.kind is None:
            return None
        if wrapper.kind == "as the ViT" or wrapper.head is None:
            return self.backbone.output(self.tower)
        with torch.no_grad():
            width = self._head(hookless_eval_copy(self.model), zero_features(self.vit, self.tower)).shape[1]
        # A classifier that was made for no classes hands the features on.
        return Output("features" if wrapper.kind == "classes" and not has_classes(self.model) else wrapper.kind, width)

    @property
    def block_weights(self) -> list[Tensor]:
        """The matrices of the ViT's blocks, which a calibration recognises its model by; none on meta."""
        blocks = self.backbone.blocks(self.tower)
        return _have_data([weight for block in blocks for weight in block.parameters() if weight.ndim == 2])

    @property
    def fingerprint(self) -> list[Tensor]:
        """All weights of the model, which identify a run's model; none on meta."""
        return _have_data(list(self.model.parameters()))

    def costs(self, grid: tuple[int, int] | None = None, convention: Convention = TORCH_CONVENTION) -> Costs:
        """MACs of the ViT, part by part; of a model around it only a head that is known."""
        parent: Any = hookless_eval_copy(self.parent)
        tower = parent if self.wrapper is None else parent.get_submodule(self.wrapper.path)
        head = functools.partial(self._head, parent)
        return measure_costs(self.backbone, tower, self.vit, head, grid, convention)

    def _head(self, parent: nn.Module, features: Tensor) -> Tensor:
        """The output of a copy of the model right around the ViT for these features."""
        if self.wrapper is None:
            return self.backbone.head(parent, features)
        tower = parent.get_submodule(self.wrapper.path)
        if self.vit.depth < len(self.backbone.blocks(tower)):  # it reads an earlier layer, and no head is run
            return features
        pooled = self.backbone.head(tower, features)
        return pooled if self.wrapper.head is None else self.wrapper.head(parent, features, pooled)


def find_vit(model: nn.Module) -> Host:
    """The host of a supported model; raises UnsupportedModelError with the module that is not supported."""
    reason = unsupported_reason(model)
    if reason is not None:
        raise UnsupportedModelError(f"{reason}. The model was not changed")
    path, tower, parent, wrapper, needs_all_patches = _inside(model)
    backbone = _family_of(tower, path)
    if backbone is not None:
        names = [name for name, module in model.named_modules(remove_duplicate=False) if module is tower]
        if len(names) > 1:
            raise UnsupportedModelError(
                f"the ViT is at {' and at '.join(names)}, and only one would be reduced; patch model.{path} "
                "and put it in all these places"
            )
        if needs_all_patches is None and (wrapper is None or wrapper.reads_image_tokens != "mean"):
            needs_all_patches = _require_all_patches(tower, backbone.needs_all_patches(tower))
        return Host(model, path, backbone, parent, wrapper, needs_all_patches)
    if wrapper is not None:
        raise UnsupportedModelError(
            f"{path} of this {type(model).__name__} is a {_name(tower)}, which is not a supported ViT. The model was "
            "not changed"
        )
    inside = find_inside_wrapper(model)
    if inside is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is a wrapper; unwrap it, the model itself is {inside}: patch first, then compile "
            "or wrap. The model was not changed"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{type(model).__name__} was compiled by TorchScript, and its modules are gone; patch the model it was "
            "made of, then compile that"
        )
    supported = [f"{title}'s {', '.join(classes)}" for title, classes in supported_classes().items()]
    raise UnsupportedModelError(
        f"{_name(model)} is not a supported ViT; supported are {'; '.join(supported)}. The model was not changed"
    )


def _family_of(tower: nn.Module, path: str) -> Backbone | None:
    """The first family that takes a ViT, one of other packages at last; None if no family knows it.

    Raises UnsupportedModelError with the reason of the first that knows and refuses it.
    """
    reasons = []
    for registry in (lambda: backbones.BACKBONES, backbones.known_backbones):
        for backbone in registry().values():
            if backbone.matches(tower):
                reason = backbone.unsupported_reason(tower)
                if reason is None:
                    return backbone
                reasons.append(reason)
    if reasons:
        raise UnsupportedModelError(f"{f'{path}: ' if path else ''}{reasons[0]}. The model was not changed")
    return None


def supported_classes() -> dict[str, list[str]]:
    """Library -> the classes of its ViTs that are supported."""
    classes: dict[str, list[str]] = {}
    for family in backbones.known_backbones().values():
        classes.setdefault(family.library().title, []).extend(family.classes)
    return classes


def remove_classifier(model: nn.Module) -> None:
    """Let a model that scores classes return the pooled features that its last layer reads; others stay as they are."""
    host = find_vit(model)
    if host.output is None or host.output.kind != "classes":
        return
    if host.wrapper is not None and host.wrapper.kind == "classes":
        host.wrapper.remove_classifier(host.parent)
    else:
        host.backbone.remove_classifier(host.tower)


def _inside(model: nn.Module) -> tuple[str, nn.Module, nn.Module, Wrapper | None, str | None]:
    """The path of the innermost model that is not a wrapper, its parent, the parent's wrapper, and why any of them
    needs the full grid."""
    path: list[str] = []
    inner, parent = model, model
    wrapper: Wrapper | None = None
    needs_all_patches: str | None = None
    while _name(inner) in WRAPPERS:
        parent, wrapper = inner, WRAPPERS[_name(inner)]
        needs_all_patches = needs_all_patches or _require_all_patches(inner, wrapper.why_all_patches(inner))
        path.append(wrapper.path)
        inner = inner.get_submodule(wrapper.path)
    return ".".join(path), inner, parent, wrapper, needs_all_patches


def _have_data(tensors: list[Tensor]) -> list[Tensor]:
    return [] if any(tensor.is_meta for tensor in tensors) else tensors


def _require_all_patches(model: nn.Module, reason: str | None) -> str | None:
    return None if reason is None else f"{type(model).__name__} {reason}, so no patch may be missing"


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def find_inside_wrapper(model: nn.Module) -> str | None:
    """The attribute of a wrapper with a supported model in it, e.g. torch.compile's _orig_mod."""
    for path, module in model.named_modules():
        if path and any(backbone.matches(module) for backbone in backbones.known_backbones().values()):
            plain = all(part.isidentifier() for part in path.split("."))
            return f"model.{path}" if plain else f"model.get_submodule({path!r})"
    return None
