"""The native library: found, loaded and called through ctypes.

It is built by `pip install`, once for each instruction set, without torch's headers: one build serves every version of
torch. The best one that this processor can run is loaded when the package is imported. If there is none, PROBLEM says
why, and the twins run.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = 1  # of the interface; api.cpp has the same
# instruction sets from best to most common, by the name torch gives to what the processor can do
BUILDS = {"AVX512": ("avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}

Pointer = ctypes.c_void_p


class Operand(ctypes.Structure):
    """A tensor [batch, heads, tokens, channels] whose channels are contiguous."""

    _fields_ = [("data", Pointer), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64)]

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        return cls(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A C structure from 'type name' pairs, in the order of the header."""
    types = {"int64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float, "ptr": Pointer, "operand": Operand}
    pairs = [field.split() for field in fields.replace("\n", " ").split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": [(field, types[kind]) for kind, field in pairs]})


AttentionTask = _structure(
    "AttentionTask",
    "operand q, operand k, operand v, int64 batch, int64 heads, int query_tokens, int tokens, int depth, "
    "int output_rows, float scale, int64 removed, ptr bias, ptr out, ptr diagonal, ptr column_sums, ptr class_row",
)
ReduceTask = _structure(
    "ReduceTask",
    "int64 batch, int tokens, int prefix, int channels, int removed, int patches, int degree, ptr x, ptr branch, "
    "ptr scores, ptr position, ptr size, ptr neighbours, ptr root, int64 graph_stride, float alpha, "
    "ptr norm_weight, ptr norm_bias, float epsilon, ptr x_out, ptr normed_out, ptr position_out, ptr size_out",
)
GraphTask = _structure(
    "GraphTask",
    "int64 batch, int rows, int columns, int spatial, int semantic, ptr similarity, ptr neighbours, ptr root",
)


def load(folder: Path) -> tuple[ctypes.CDLL | None, str, str | None]:
    """The best library in `folder` for this processor: library, instruction set, and what is wrong otherwise."""
    problem = f"no native library for {platform.system()} {platform.machine()} was built when the package was installed"
    for build in BUILDS.get(torch.backends.cpu.get_cpu_capability(), ("portable",)):
        for path in sorted(folder.glob(f"_{build}.*")):
            try:
                library = ctypes.CDLL(str(path))
                if library.gtp_vit_version() == VERSION:
                    library.gtp_vit_kth_smallest.restype = ctypes.c_float
                    return library, build, None
                problem = f"{path.name} was built for another version of gtp_vit; install it again"
            except (OSError, AttributeError) as error:
                problem = f"{path.name} cannot be loaded ({error})".replace("\n", " ")
    return None, "", problem


LIBRARY, INSTRUCTION_SET, PROBLEM = load(Path(__file__).parent)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _run(function: str, task: ctypes.Structure, *rest: int) -> None:
    if getattr(LIBRARY, function)(ctypes.byref(task), *rest, torch.get_num_threads()) != 0:
        raise MemoryError(f"{function}: no memory for its scratch space")


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, removed: int, queries: int, asked: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (_rows_contiguous(tensor) for tensor in (q, k, v))
    batch, heads, tokens, depth = k.shape
    out = q.new_empty(batch, queries, heads * depth)
    statistics = [q.new_empty((batch, heads, tokens) if wanted else (0,), dtype=torch.float32) for wanted in asked]
    bias = None if bias is None else bias.float().contiguous()
    task = AttentionTask(
        *(Operand.of(tensor) for tensor in (q, k, v)),
        *(batch, heads, q.shape[2], tokens, depth, queries, scale, removed),
        *(_address(tensor) for tensor in (bias, out, *statistics)),
    )
    _run("gtp_vit_attention", task, int(q.dtype == torch.bfloat16))
    return out, statistics[0], statistics[1], statistics[2]


def reduce(
    x: Tensor,
    branch: Tensor,
    scores: Tensor,
    position: Tensor,
    size: Tensor | None,
    neighbours: Tensor,
    root: Tensor,
    removed: int,
    alpha: float,
    with_size: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, branch, position = x.contiguous(), branch.to(x.dtype).contiguous(), position.contiguous()
    scores, neighbours, root = scores.float().contiguous(), neighbours.contiguous(), root.contiguous()
    size = None if size is None else size.contiguous()
    batch, tokens, channels = x.shape
    count, left = position.shape[1], tokens - removed
    x_out = x.new_empty(batch, left, channels)
    normed_out = torch.empty_like(x_out) if norm_weight is not None else x.new_empty(0)
    size_out = x.new_empty((batch, left) if with_size else (0,), dtype=torch.float32)
    position_out = position.new_empty(batch, count - removed)
    weights = [None if weight is None else weight.to(x.dtype).contiguous() for weight in (norm_weight, norm_bias)]
    task = ReduceTask(
        *(batch, tokens, tokens - count, channels, removed, neighbours.shape[1], neighbours.shape[2]),
        *(_address(tensor) for tensor in (x, branch, scores, position, size, neighbours, root)),
        *(int(neighbours.shape[0] > 1), alpha),
        *(_address(weight) for weight in weights),
        *(epsilon, _address(x_out), _address(normed_out), _address(position_out), _address(size_out)),
    )
    _run("gtp_vit_reduce", task, int(x.dtype == torch.bfloat16))
    return x_out, normed_out, size_out, position_out


def neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> tuple[Tensor, Tensor]:
    similarity = similarity.float().contiguous()
    batch, patches = similarity.shape[0], rows * columns
    found = similarity.new_empty(batch, patches, spatial + semantic, dtype=torch.int64)
    root = similarity.new_empty(batch, patches, dtype=torch.float32)
    task = GraphTask(batch, rows, columns, spatial, semantic, *(_address(t) for t in (similarity, found, root)))
    _run("gtp_vit_graph", task)
    return found, root


def kth_smallest(values: Tensor, k: int) -> float:
    """The k-th smallest entry of a matrix of non-negative floats; what sparsification uses, by itself."""
    values = values.float().contiguous()
    rows, columns = values.shape
    scratch = torch.empty(values.numel() + 64, dtype=torch.int32)
    library: Any = LIBRARY
    return float(
        library.gtp_vit_kth_smallest(
            Pointer(values.data_ptr()),
            *(rows, columns, ctypes.c_int64(columns), ctypes.c_int64(k)),
            Pointer(scratch.data_ptr()),
        )
    )
