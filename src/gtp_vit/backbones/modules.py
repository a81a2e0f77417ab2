"""Shared by backbones: checking images and modules, copying and calling these, splitting heads.

Shapes: B batch, N tokens, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.backbone import Part
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import InputError
from gtp_vit.tensors import dequantized, is_quantized, is_wrapped

Module = TypeVar("Module", bound=nn.Module)
HAS_HOOKS = " has hooks or a forward of its own, which a reduced layer would not call; remove them"


def check_images(images: Any, first: nn.Conv2d, size: tuple[int, int] | None, patch: tuple[int, int] | None) -> None:
    """Refuse images that do not fit a model.

    Args:
        images: the caller's.
        first: the model's first layer.
        size: the only height and width that it takes; None = any.
        patch: what height and width must be multiples of; None = nothing.
    """
    if not isinstance(images, Tensor):
        raise InputError(f"images are a {type(images).__name__}; give a float tensor [batch, channels, height, width]")
    shape, channels = tuple(images.shape), first.in_channels
    if images.ndim != 4:
        raise InputError(f"images have shape {shape}; give [batch, channels, height, width], for one image x[None]")
    if not images.is_floating_point():
        raise InputError(f"images are {images.dtype}; convert them to float and normalise them as the model expects")
    if shape[1] != channels:
        raise InputError(f"images have {shape[1]} channels, but the model takes {channels}")
    weight = first.weight
    if images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type):
        raise InputError(
            f"images are {images.dtype}, but the model is {weight.dtype}; convert one of them, or use autocast"
        )
    if images.device != weight.device:
        raise InputError(f"images are on {images.device}, but the model is on {weight.device}; move one of them")
    if min(shape[2:]) == 0:
        raise InputError(f"images are {shape[2]} x {shape[3]}; they have no pixels")
    if size is not None and shape[2:] != size:
        raise InputError(
            f"images are {shape[2]} x {shape[3]}, but the model takes {size[0]} x {size[1]}; resize them, or create "
            f"the model with img_size={shape[2:]} (or, if it is one of timm's, dynamic_img_size=True)"
        )
    if patch is not None and (shape[2] % patch[0] or shape[3] % patch[1]):
        raise InputError(f"images are {shape[2]} x {shape[3]}; both must be multiples of the patch size {patch}")


def shallow_copy(module: Module) -> Module:
    """A new module with its own dictionaries of parameters, buffers and children, whose entries are shared."""
    copy = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name != "_compiled_call_impl":  # left by module.compile(); it would run the original
            copy.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    return copy


def hookless_eval_copy(module: Module) -> Module:
    """Shells of all modules in eval mode, with buffers of their own, weights in floating point and without hooks.

    For running parts of a user's model: its hooks expect real images, its buffers are not ours to change, and products
    with quantised weights are counted by nobody.
    """
    copy = shallow_copy(module)
    copy.training = False
    copy._forward_hooks.clear()
    copy._forward_pre_hooks.clear()
    copy._buffers.update({name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None})
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    copy._parameters.update(
        {name: nn.Parameter(dequantized(weight), False) for name, weight in weights.items() if is_quantized(weight)}
    )
    copy._modules.update(
        {name: hookless_eval_copy(child) for name, child in module._modules.items() if child is not None}
    )
    return copy


def call_unless_identity(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), but modules that do nothing are not called: at batch 1 such calls are a percent of the time."""
    idle = type(module) is nn.Identity or (type(module) is nn.Dropout and not module.training)
    return x if idle and not module._forward_hooks and not module._forward_pre_hooks else module(x)


def is_overridden(module: nn.Module, *, hooks: bool) -> bool:
    """Does calling this module do more than its class's forward? `hooks`: do hooks count?"""
    own = module.__dict__  # written out, as this is asked in every layer
    replaced = "forward" in own or "forward_features" in own or "forward_head" in own or "forward_intermediates" in own
    return replaced or (hooks and has_hooks(module))


def has_hooks(module: nn.Module, besides: str = "") -> bool:
    """Are there hooks that a forward pass calls, besides those that were defined in the Python module `besides`?"""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not besides or any(getattr(hook, "__module__", None) != besides for hook in hooks)


def class_unsupported_reason(model: nn.Module, *kinds: type) -> str | None:
    """None if the model is of one of these classes itself (the first names the family) and runs its own forward."""
    if type(model) not in kinds:
        sharded = "; patch first, then shard" if type(model).__name__.startswith("FSDP") else ""
        return f"{type(model).__name__} is a subclass of {kinds[0].__name__} whose forward may be its own{sharded}"
    if is_overridden(model, hooks=False):
        return "the model's forward was replaced on the instance, e.g. by a wrapper; patch first, then wrap"
    return None


def module_unsupported_reason(
    module: nn.Module, kinds: Collection[type], children: Collection[str], tensors: Collection[str] = ()
) -> str | None:
    """None if the copied arithmetic does what this module does: its class, children and tensors are known, and calling
    it would do nothing else. Otherwise what it has, to be read after its path."""
    if type(module) not in kinds:
        return f" is {type(module).__name__}; supported: {', '.join(kind.__name__ for kind in kinds)}"
    unknown = unexpected_member(module, children, tensors)
    if unknown is not None:
        return f".{unknown}"
    return HAS_HOOKS if is_overridden(module, hooks=True) else None


def zero_features(vit: ViTInfo, model: nn.Module) -> Tensor:
    """Zeros in place of the features of all tokens, to see what a head makes of them."""
    weight = next(model.parameters())
    return torch.zeros(1, vit.prefix + vit.image_tokens, vit.dim, dtype=weight.dtype, device=weight.device)


def unexpected_member(module: nn.Module, children: Collection[str], tensors: Collection[str] = ()) -> str | None:
    """The first child or tensor of a module whose name is not one of these; None if all are known."""
    for name, child in module.named_children():
        if name not in children:
            return f"{name} ({type(child).__name__}) is not known"
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in tensors:
            return f"{name} (a tensor) is not known"
    return None


def plain_layer_norm(norm: nn.Module, kinds: Collection[type[nn.Module]]) -> nn.LayerNorm | None:
    """The norm itself, if it is a LayerNorm of one of these classes that a kernel may compute instead of calling it."""
    if type(norm) not in kinds or not isinstance(norm, nn.LayerNorm) or is_overridden(norm, hooks=True):
        return None
    return None if norm.weight is None or norm.bias is None else norm


def is_plain_linear(layer: nn.Module) -> bool:
    """May its weight be cut? Adapters, quantised and parametrised layers must be called as a whole."""
    return type(layer) is nn.Linear and not is_wrapped(layer.weight) and not is_overridden(layer, hooks=True)


def project(attn: Any, y: Tensor, queries: int | None, part: Part = "all") -> tuple[Tensor, ...]:
    """Queries, keys and values of an attention with one fused layer `qkv`; only the first queries if asked.

    `part`: only queries and keys, or values; what is not computed is one of those that are.
    """
    layer, heads = attn.qkv, attn.num_heads
    if part == "all" and queries is not None and is_plain_linear(layer):
        return project_packed(layer.weight, layer.bias, y, heads, queries)
    if part == "all" or not is_plain_linear(layer):
        q, k, v = split_heads(layer(y), 3, heads)
        return q[:, :, :queries], k, v
    two_thirds = layer.weight.shape[0] // 3 * 2
    rows = slice(two_thirds) if part == "map" else slice(two_thirds, None)
    weight, bias = layer.weight[rows], None if layer.bias is None else layer.bias[rows]
    parts = split_heads(F.linear(y, weight, bias), 2 if part == "map" else 1, heads)
    return parts[0], parts[-1], parts[-1]


def project_packed(
    weight: Tensor, bias: Tensor | None, y: Tensor, heads: int, queries: int | None
) -> tuple[Tensor, ...]:
    """Queries, keys and values by one weight with the rows of all three; only the first queries if asked."""
    if queries is None or is_wrapped(weight):
        q, k, v = split_heads(F.linear(y, weight, bias), 3, heads)
        return q[:, :, :queries], k, v
    width = weight.shape[0] // 3
    first, rest = (None, None) if bias is None else (bias[:width], bias[width:])
    (q,) = split_heads(F.linear(y[:, :queries], weight[:width], first), 1, heads)
    return q, *split_heads(F.linear(y, weight[width:], rest), 2, heads)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts H D] -> parts x [B, H, N, D]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)
