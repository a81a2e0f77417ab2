"""launches: what a forward pass would do on a device that is not here, without data: kernels, copies, maps.

Torch's fake tensors have a device, a shape and a dtype, and no data. They refuse operands on two devices, as devices
do. So what is launched can be counted without a GPU, and what would wait for it can be found. How long a kernel takes,
and what it computes, cannot.

Launches are counted, not measured: one for each call of an operator that writes memory, more where ATen splits a call
(`SEVERAL`, known from its sources). Attention is one launch, as a fused kernel is.
"""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.patching import tower_of

# Calls that ATen splits: a copy and then the work, or several kernels.
SEVERAL = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "masked_fill", "constant_pad_nd", "baddbmm"), 2),
    **dict.fromkeys(("topk", "kthvalue", "eye", "frexp"), 2),
    "sort": 3,
    # our own Triton kernels, at most, up to 256 patches
    "merge_by_cost": 3,
    "match_pairs": 3,
    "attention_statistics": 2,
    "importance_by_probe": 2,
    "propagate": 2,
}
NONE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# They give a tensor whose shape depends on data, or a number: the host waits for the device.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "item"}
ATTENTION = {
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    name: str
    launches: int
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it writes
    problem: str | None = None  # why the host would wait, or what is on a wrong device

    def __str__(self) -> str:
        return f"{self.name} {', '.join(str(list(shape)) for shape in self.shapes)}"


@dataclass
class Launches:
    """The calls of a forward pass, layer by layer."""

    embed: list[Call] = field(default_factory=list)
    layers: list[list[Call]] = field(default_factory=list)
    maps_of: int = 0  # heads times images: how many attention maps a layer has
    fewest_keys: int = 0  # of a layer, prefix tokens included

    @property
    def calls(self) -> list[Call]:
        return [*self.embed, *itertools.chain.from_iterable(self.layers)]

    @property
    def total(self) -> int:
        """Launches of all layers and of what is before them; without the head."""
        return _sum(self.calls)

    @property
    def per_layer(self) -> int:
        """Launches of the layer that has most; the last one aside, which may be shortened."""
        return max(map(_sum, self.layers[:-1]))

    @property
    def problems(self) -> list[str]:
        """The reason that the host would wait, or fail."""
        return [f"{call}: {call.problem}" for call in self.calls if call.problem is not None]

    @property
    def maps(self) -> list[str]:
        """Arrays of the size of an attention map that are written, by layer."""
        return [
            f"layer {number}: {call}"
            for number, layer in enumerate(self.layers)
            for call in layer
            if any(self._is_map(shape) for shape in call.shapes) and call.launches
        ]

    def _is_map(self, shape: tuple[int, ...]) -> bool:
        rows, columns = shape[-2:] if len(shape) > 2 else (0, 1)
        return rows == columns >= self.fewest_keys and math.prod(shape[:-2]) == self.maps_of


def _sum(calls: list[Call]) -> int:
    return sum(call.launches for call in calls)


def count_launches(
    model: nn.Module, *, batch: int = 2, dtype: torch.dtype = torch.float16, device: str = "cuda"
) -> Launches:
    """The calls of a forward pass of a patched model on a device that need not be here.

    Args:
        model: a patched model on a CPU, which is not changed; without gradients, in eval mode.
        batch: images.
        dtype: of weights and images.
        device: cuda, or meta as a stand-in for devices that this build of torch has no fake tensors for.
    """
    tower: Any = tower_of(copy.deepcopy(model).eval().to(dtype))
    reduction = tower.reduction
    vit, inputs = reduction.vit, reduction.backbone.inputs(tower)
    size = tuple(cells * pixels for cells, pixels in zip(vit.grid, inputs.patch, strict=True))
    counted = Launches(maps_of=batch * vit.heads)
    recorder, num_seen = _Recorder(device), 0
    counts: list[int] = []

    def layer_ended(tokens: Tokens) -> None:
        nonlocal num_seen
        calls, num_seen = recorder.calls[num_seen:], len(recorder.calls)
        if counts:
            counted.layers.append(calls)
        else:
            counted.embed = calls
        counts.append(tokens.x.shape[1])

    with nullcontext() if device == "meta" else FakeTensorMode(), torch.no_grad():
        _without_data(tower, device)
        images = torch.empty(batch, inputs.channels, *size, dtype=dtype, device=device)
        with recorder, _OneAttention(recorder):
            try:
                run(tower, images, prefix_only=reduction.may_skip_image_tokens(tower), observe=layer_ended)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise WaitsError(f"{error.func}: the host would wait for the device") from error
    counted.fewest_keys = min(counts[:-1])
    return counted


class WaitsError(Exception):
    """The number of tokens depends on the images, so that the host waits for the device, and nothing can be counted."""


def _without_data(model: nn.Module, device: str) -> None:
    """Replace all parameters and buffers by fake ones."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


class _Recorder(TorchDispatchMode):
    """Keeps every call of an operator."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.calls = device, list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        problem = "the host would wait for the device" if self._waits(name, args) else None
        result = func(*args, **(kwargs or {}))
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        written = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        for tensor in (*inputs, *written):
            if tensor.device.type != self.device and tensor.numel() > 1:
                problem = f"a tensor {list(tensor.shape)} on {tensor.device.type}"
        if name in ("_to_copy", "copy_") and len({tensor.device for tensor in (*inputs, *written)}) > 1:
            problem = "a copy between devices"
        launches = 0 if not written or _is_view(func, name) else SEVERAL.get(name.removesuffix("_"), 1)
        if name.endswith("_"):  # in place, nothing is copied first
            launches = min(launches, 1)
        self.add(name, launches, written, problem)
        return result

    def add(self, name: str, launches: int, written: list[Tensor], problem: str | None = None) -> None:
        self.calls.append(Call(name, launches, tuple(tuple(tensor.shape) for tensor in written), problem))

    @staticmethod
    def _waits(name: str, args: Any) -> bool:
        if name not in ("index", "index_put", "index_put_"):
            return name in WAITS
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _is_view(func: Any, name: str) -> bool:
    """Does a call launch nothing?"""
    aliases = [alias.alias_info for alias in func._schema.returns]
    return name in NONE or any(alias is not None and not alias.is_write for alias in aliases)


class _OneAttention(TorchFunctionMode):
    """Counts torch's attention as one launch; without the device torch would take the path that writes the map."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, _, v = args[:3]
        batch, heads, rows, _ = q.shape
        out = torch.empty(batch, rows, heads, v.shape[3], dtype=v.dtype, device=v.device).transpose(1, 2)
        masked = (kwargs or {}).get("attn_mask") is not None
        self.recorder.add("attention, masked" if masked else "attention", 1, [out])
        return out
