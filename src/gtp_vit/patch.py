"""patch(model, method): a new model that shares the weights and reduces tokens; the original stays as it is."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gtp_vit import backbones, recipes
from gtp_vit.core.loop import Reduction
from gtp_vit.core.reducer import Method, VitInfo
from gtp_vit.errors import BadSetting, shown
from gtp_vit.kernels import Kernels, obstacle, status
from gtp_vit.kernels import check as check_kernels
from gtp_vit.methods import METHODS
from gtp_vit.recipes import Recipe

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    method: Method | Recipe | str | Path | None = None,
    *,
    lossless: bool = True,
    kernels: Kernels = "auto",
) -> Model:
    """A model of the same class with the same weights that reduces tokens by `method`.

    Nothing is copied and `model` is not changed: both share their blocks. Therefore `.train()`, `.half()`, `.to()` or
    `load_state_dict(..., assign=True)` on one reaches the blocks of the other; deep-copy first where that is not
    wanted. Patching a patched model starts again from the original. Hooks on a block or its attention do not fire in
    layers that are reduced; a model that has such hooks already is refused.

    Args:
        model: a supported ViT; anything else is refused with the module that is in the way.
        method: e.g. `GTP(propagate=8)`; the name of a method, for its defaults; or a recipe that `tune` found, its
            file, or the name of one in the package. Without it, and for "gtp_plus", GTP+ with what is known to be
            good for this model, at 65 % of its MACs.
        lossless: where the head reads prefix tokens only, let the last block compute nothing else. Exact.
        kernels: "auto" uses the native kernels where they can run (on a CPU, in float32 or bfloat16, under
            torch.no_grad or inference_mode), except in exported programs; "native" there as well; "torch" never.

    >>> import timm, torch
    >>> model = timm.create_model("test_vit").eval()
    >>> fast = patch(model, METHODS["gtp"](propagate=8))
    >>> fast(torch.zeros(1, 3, 160, 160)).shape
    torch.Size([1, 1000])
    """
    if not isinstance(model, nn.Module):
        raise BadSetting(f"model is a {type(model).__name__}; give the model itself, e.g. timm.create_model(...)")
    check_kernels(kernels)
    shell: Any = unpatch(model) if is_patched(model) else _shell(model)
    backbone = backbones.find(shell)
    vit = backbone.describe(shell)
    method = _settings(recipes.resolve(method, shell, vit))
    reducer = method.build(vit).train(shell.training)
    caution = method.caution()
    if caution is not None:
        warnings.warn(caution, stacklevel=2)
    weight = next(shell.parameters())
    original: Any = type(shell)
    shell.__class__ = _patched_class(original, backbone.forwards)
    shell.reduction = Reduction(backbone, method, vit, lossless, kernels)
    shell.reducer = reducer.to(weight.device, weight.dtype if weight.is_floating_point() else None)
    return shell


def _settings(method: Any) -> Method:
    if isinstance(method, type) and issubclass(method, Method):
        raise BadSetting(f"method is the class {method.__name__}; give settings, e.g. {method.__name__}()")
    if not isinstance(method, Method):
        names = ", ".join(cls.__name__ for cls in METHODS.values())
        raise BadSetting(f"method is {shown(method)}; give one of {names} with its settings")
    return method


def unpatch(model: Model) -> Model:
    """The original of a patched model again, sharing the weights; other models are returned as they are."""
    if not is_patched(model):
        return model
    shell: Any = _shell(model)
    del shell.reduction, shell.reducer
    shell.__class__ = type(model).original  # type: ignore[attr-defined]
    return shell


def describe(model: nn.Module) -> VitInfo:
    """Sizes of a patched or plain model; raises GTPError if it is not supported."""
    plain = unpatch(model)
    return backbones.find(plain).describe(plain)


def is_patched(model: nn.Module) -> bool:
    """Was this model made by `patch`?"""
    return isinstance(model, Patched)


class Patched:
    """Marks the classes that `patch` makes, and lets their instances be pickled and copied."""

    original: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so a pickle names what it is made of instead.
        model: Any = self
        return _restore, (self.original, model.reduction.backbone.forwards), model.__getstate__()

    @property
    def kernels(self) -> str:
        """Which kernels a forward pass would use now, and if not the native ones, why."""
        model: Any = self
        reason = obstacle(model.reduction.kernels, next(model.parameters()))
        return status() if reason is None else f"torch operators: {reason}"

    def extra_repr(self) -> str:
        return f"reduction={self.reduction.method}"  # type: ignore[attr-defined]


@functools.cache
def _patched_class(original: Any, forwards: Any) -> Any:
    name = f"Reduced{original.__name__}"
    return type(name, (Patched, forwards, original), {"original": original, "__module__": original.__module__})


def _restore(original: type, forwards: type) -> Any:
    cls = _patched_class(original, forwards)
    return cls.__new__(cls)


def _shell(model: Model) -> Model:
    """The same module tree under a new root: own tables of parameters, buffers and children, all of them shared."""
    shell = type(model).__new__(type(model))
    for name, value in vars(model).items():
        if name != "_compiled_call_impl":  # model.compile() left it there; it would run the original
            shell.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    return shell
