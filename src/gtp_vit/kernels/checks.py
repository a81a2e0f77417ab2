"""All checks of operators' arguments (shapes, dtypes, devices), made before any pointer is taken.

For each operator `check_...` raises where its arguments contradict each other, whichever kernel runs, and `fits_...`
says whether native code can take them; the reference takes the rest. Native code only checks values of grid cells and
neighbours, which would be slow to check from here.

The checks run between matrix products, from a cold cache: keep them short, and build texts only for errors.

Shapes are those of arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gtp_vit.errors import InputError
from gtp_vit.kernels.arguments import (
    AttentionInputs,
    ClusterInputs,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPReduceInputs,
    NeighboursInputs,
)

DTYPES = (torch.float32, torch.bfloat16)  # that native code computes with


def refuse(operator: str, expected: str, **actual: object) -> NoReturn:
    parts = [f"{name} {list(value.shape) if isinstance(value, Tensor) else value}" for name, value in actual.items()]
    raise InputError(f"gtp_vit.{operator}: {expected}; found {', '.join(parts)}")


def check_dtypes_and_devices(operator: str, arguments: Sequence[object], integer_args: Sequence[int]) -> None:
    """Check dtypes and devices of arguments for the reference; `fits_...` does so for native code.

    `integer_args`: indices of the tensors that may be integers.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if len({argument.device for argument in tensors}) > 1:
        refuse(
            operator,
            "all tensors must be on one device",
            devices=sorted({str(argument.device) for argument in tensors}),
        )
    for place, argument in enumerate(arguments):
        if not isinstance(argument, Tensor) or argument.is_floating_point():
            continue
        if place not in integer_args or argument.dtype != torch.int64:
            refuse(operator, "tensors must be of floating point", argument=place, dtype=argument.dtype)
    if isinstance(arguments, AttentionInputs) and arguments.q.dtype != arguments.k.dtype:
        refuse(operator, "q and k must be of one dtype", q=arguments.q.dtype, k=arguments.k.dtype)


def check_attention(inputs: AttentionInputs) -> None:
    q, k, v, size, _, removed, queries, asked, heads, first = inputs
    of_q, of_k = q.shape, k.shape
    if len(of_k) != 4 or len(of_q) != 4 or v.shape != of_k:
        refuse("attention", "q must be [B, H, Q, D], k and v [B, H, N, D]", q=q, k=k, v=v)
    batch, num_heads, tokens, depth = of_k
    rows = of_q[2]
    if of_q != (batch, num_heads, rows, depth):
        refuse("attention", "q must have the batch, heads and head dimension of k", q=q, k=k)
    if size is not None and size.shape != (batch, tokens):
        refuse("attention", "size must have one number for each key, [B, N]", size=size, k=k)
    if len(asked) != 3 or heads not in (0, 1, 2):
        refuse(
            "attention",
            "statistic_mask must be three of True or False, and heads 0, 1 or 2",
            statistic_mask=asked,
            heads=heads,
        )
    if not (0 <= first <= tokens and 0 <= queries <= rows and 0 <= removed <= rows * tokens):
        expected = "first must be in 0 ... N, queries in 0 ... Q, removed in 0 ... Q N"
        refuse("attention", expected, q=q, k=k, first=first, queries=queries, removed=removed)
    if (rows != tokens and (removed or asked[0] or asked[1])) or (rows == 0 and asked[2]):
        expected = "a threshold, the diagonal and column sums need all queries, Q = N, and the class row needs one"
        refuse("attention", expected, q=q, k=k, removed=removed, statistic_mask=asked)


def supports_attention(inputs: AttentionInputs) -> bool:
    """May these go into native code?"""
    q, k, v, size = inputs[:4]
    return (
        q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and (q.is_cpu and k.is_cpu and v.is_cpu)
        and (size is None or (size.is_cpu and size.is_floating_point()))
        and k.numel() > 0
        and inputs.queries > 0
    )


def _check_tokens(
    operator: str, inputs: GTPReduceInputs | GTPPlusMergeInputs | GTPPlusMergeByProbeInputs, image: Tensor
) -> tuple[int, int, int]:
    """B, N and M, checked; `image` is any tensor with an entry for each image token, [B, M]."""
    x, branch, norm_weight, norm_bias = inputs.x, inputs.branch, inputs.norm_weight, inputs.norm_bias
    shape, of_image = x.shape, image.shape
    if len(shape) != 3 or branch.shape != shape:
        refuse(operator, "x and branch must both be [B, N, C]", x=x, branch=branch)
    batch, tokens, channels = shape
    if len(of_image) != 2 or of_image[0] != batch or of_image[1] > tokens:
        refuse(operator, "tensors of image tokens must be [B, M], M <= N", x=x, image_tokens=image)
    if norm_weight is not None and norm_weight.shape != (channels,):
        refuse(operator, "the weight of the LayerNorm must be [C]", x=x, norm_weight=norm_weight)
    if norm_bias is not None and (norm_weight is None or norm_bias.shape != (channels,)):
        refuse(operator, "the bias of the LayerNorm must be [C], together with a weight", x=x, norm_bias=norm_bias)
    return batch, tokens, of_image[1]


def _supports_tokens(inputs: GTPReduceInputs | GTPPlusMergeInputs | GTPPlusMergeByProbeInputs) -> bool:
    x, branch, norm_weight, norm_bias = inputs.x, inputs.branch, inputs.norm_weight, inputs.norm_bias
    return (
        x.dtype in DTYPES
        and (branch.dtype == x.dtype or (x.dtype == torch.float32 and branch.dtype in DTYPES))
        and (x.is_cpu and branch.is_cpu and x.numel() > 0)
        and (norm_weight is None) == (norm_bias is None)
        and (norm_weight is None or (norm_weight.dtype == x.dtype and norm_weight.is_cpu))
        and (norm_bias is None or (norm_bias.is_cpu and norm_bias.is_floating_point()))
    )


def check_gtp_reduce(inputs: GTPReduceInputs) -> None:
    x, _, scores, position, size, neighbours, root, removed, alpha = inputs[:9]
    batch, tokens, count = _check_tokens("gtp_reduce", inputs, position)
    if scores.shape != (batch, count):
        refuse("gtp_reduce", "scores and position must both be [B, M]", scores=scores, position=position)
    if size is not None and size.shape != (batch, tokens):
        refuse("gtp_reduce", "size must have one number for each token, [B, N]", size=size, x=x)
    lists = neighbours.shape
    if len(lists) != 3 or root.shape != (lists[0], lists[1]):
        refuse("gtp_reduce", "neighbours must be [B or 1, M0, W], root [B or 1, M0]", neighbours=neighbours, root=root)
    if lists[0] != batch and lists[0] != 1:
        refuse("gtp_reduce", "the graph must be one for each image, or one for all", neighbours=neighbours, x=x)
    if not -math.inf < alpha < math.inf:
        refuse("gtp_reduce", "alpha must be a finite number", alpha=alpha)
    if not 0 < removed < count:
        refuse("gtp_reduce", "removed must be in 1 ... M - 1: one must stay", removed=removed, position=position)
    if position.dtype != torch.int64 or neighbours.dtype != torch.int64:
        dtypes = {"position": position.dtype, "neighbours": neighbours.dtype}
        refuse("gtp_reduce", "position and neighbours must be int64", **dtypes)


def supports_gtp_reduce(inputs: GTPReduceInputs) -> bool:
    """May these go into native code?"""
    scores, position, size, neighbours, root = inputs[2:7]
    return (
        _supports_tokens(inputs)
        and root.dtype == torch.float32
        and (scores.is_cpu and position.is_cpu and neighbours.is_cpu and root.is_cpu)
        and (scores.is_floating_point() or scores.dtype == torch.int64)
        and (size is None or (size.dtype == torch.float32 and size.is_cpu))
    )


def check_gtp_plus_merge(inputs: GTPPlusMergeInputs) -> None:
    importance, size, removed = inputs[2:5]
    batch, _, count = _check_tokens("gtp_plus_merge", inputs, importance)
    if size is not None and size.shape != (batch, count):
        refuse("gtp_plus_merge", "importance and size must both be [B, M]", importance=importance, size=size)
    if not 0 <= removed < count:
        refuse(
            "gtp_plus_merge", "removed must be in 0 ... M - 1: one must stay", removed=removed, importance=importance
        )


def supports_gtp_plus_merge(inputs: GTPPlusMergeInputs) -> bool:
    """May these go into native code?"""
    importance, size, removed = inputs[2:5]
    return (
        _supports_tokens(inputs)
        and removed > 0
        and (size is None or (size.dtype == torch.float32 and size.is_cpu))
        and (importance.is_cpu and importance.is_floating_point())
    )


def check_gtp_plus_merge_by_probe(inputs: GTPPlusMergeByProbeInputs) -> None:
    x, _, probe, size, protected, removed = inputs[:6]
    _, _, count = _check_tokens("gtp_plus_merge_by_probe", inputs, size)
    if probe.shape != x.shape[2:]:
        refuse("gtp_plus_merge_by_probe", "the probe must be [C]", probe=probe, x=x)
    if protected is not None and protected.shape != size.shape:
        refuse("gtp_plus_merge_by_probe", "protected and size must both be [B, M]", protected=protected, size=size)
    if not 0 <= removed < count:
        refuse("gtp_plus_merge_by_probe", "removed must be in 0 ... M - 1: one must stay", removed=removed, size=size)


def supports_gtp_plus_merge_by_probe(inputs: GTPPlusMergeByProbeInputs) -> bool:
    """May these go into native code?"""
    probe, size, protected, removed = inputs[2:6]
    return (
        _supports_tokens(inputs)
        and removed > 0
        and (probe.dtype == torch.float32 and probe.is_cpu)
        and (size.dtype == torch.float32 and size.is_cpu)
        and (protected is None or (protected.is_floating_point() and protected.is_cpu))
    )


def check_neighbours(inputs: NeighboursInputs) -> None:
    similarity, rows, columns, spatial, semantic = inputs
    patches = rows * columns
    if rows < 1 or columns < 1 or similarity.dim() != 3 or similarity.shape[1:] != (patches, patches):
        grid = f"{rows} x {columns}"
        refuse("neighbours", "similarity must be [B, M0, M0], M0 = rows x columns", similarity=similarity, grid=grid)
    if spatial not in (0, 4, 8) or not 0 < semantic < patches:
        expected = "spatial must be 0, 4 or 8, and semantic in 1 ... M0 - 1"
        refuse("neighbours", expected, spatial=spatial, semantic=semantic, similarity=similarity)


def supports_neighbours(inputs: NeighboursInputs) -> bool:
    """Can native code take this?"""
    return inputs.similarity.is_cpu and inputs.similarity.is_floating_point()


def check_cluster(inputs: ClusterInputs) -> None:
    distance, removed, linkage = inputs
    shape = distance.shape
    if len(shape) != 3 or shape[1] != shape[2]:
        refuse("cluster", "distance must be [B, M, M]", distance=distance)
    if not 0 <= removed < shape[1] or linkage not in (0, 1, 2):
        expected = "removed must be in 0 ... M - 1, one must stay, and linkage 0, 1 or 2"
        refuse("cluster", expected, distance=distance, removed=removed, linkage=linkage)


def supports_cluster(inputs: ClusterInputs) -> bool:
    """Can native code take this?"""
    distance = inputs.distance
    return distance.is_cpu and distance.dtype == torch.float32 and distance.numel() > 0
