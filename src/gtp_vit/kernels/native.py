"""The native library: found, loaded and called through ctypes.

It is built by `pip install`, once for each instruction set, without torch's headers: one build serves every version of
torch. The best one that this processor can run is loaded when the package is imported. If there is none, LOAD_ERROR
says why, and the reference implementations run. Nothing is checked here: dispatch.py passes arguments that checks.py
has checked. The functions `..._results` allocate the results, which also tells torch their shapes.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from gtp_vit.kernels import sources
from gtp_vit.kernels.arguments import (
    AttentionInputs,
    AttentionResult,
    ClusterInputs,
    Clusters,
    GTPPlusMergeByProbeInputs,
    GTPPlusMergeInputs,
    GTPPlusMergeResult,
    GTPReduceInputs,
    GTPReduceResult,
    Neighbours,
    NeighboursInputs,
)

# instruction sets from best to most common, by the name torch gives to what the processor can do
BUILDS = {"AVX512": ("avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}

# Arguments of the functions in api.cpp: i int, l int64, f float, p pointer.
SIGNATURES = {
    "attention": "plll plll plll ll iiii f l pp i ppp ii i",
    "gtp_reduce": "l iiiiii pp pppp p l f pp f pppp i i",
    "gtp_plus_merge": "l iiii ppppp p fi pp f pp pppp i i",
    "graph": "l iiii ppp i",
    "cluster": "l iii pppp i",
    "kth_smallest": "p ii ll p",
    "threads": "i",
}
TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}


def load(folder: Path) -> tuple[ctypes.CDLL | None, str, str | None]:
    """The best library in `folder` for this processor: library, instruction set, and what is wrong otherwise."""
    problem = f"no native library for {platform.system()} {platform.machine()} was built when the package was installed"
    stale = [path.name for path in sources.libraries(folder)]
    if stale:
        problem = (
            f"{stale[0]} was built from different C++ sources; install gtp_vit again (pip install -e . in a checkout)"
        )
    broken = ""
    for build in BUILDS.get(torch.backends.cpu.get_cpu_capability(), ("portable",)):
        path = folder / sources.library(build)
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            _declare(library)
            return library, build + broken, None
        except (OSError, AttributeError) as error:
            problem = f"{path.name} cannot be loaded ({error})".replace("\n", " ")
            broken = f"; {problem}"
    return None, "", problem


def _declare(library: ctypes.CDLL) -> None:
    for name, letters in SIGNATURES.items():
        function = getattr(library, f"gtp_vit_{name}")
        function.argtypes = [TYPES[letter] for letter in letters.replace(" ", "")]
        function.restype = ctypes.c_float if name == "kth_smallest" else ctypes.c_int


def _raise(outcome: int) -> NoReturn:
    """Raise the error that a kernel's return value stands for, if it is not 0; see Outcome in reduce.h."""
    if outcome == 2:
        raise IndexError("gtp_vit.gtp_reduce: position or neighbours has an entry that is not a cell of the grid")
    raise MemoryError("gtp_vit: no memory for the scratch space of a native kernel")


def _no_library(*_: object) -> int:
    """Stands for every function where there is no library."""
    raise RuntimeError(f"gtp_vit: {LOAD_ERROR}")


def load_from(folder: Path) -> None:
    """Use the kernels in this folder from now on."""
    global \
        INSTRUCTION_SET, \
        LOAD_ERROR, \
        MULTITHREADED, \
        _attention, \
        _gtp_reduce, \
        _gtp_plus_merge, \
        _graph, \
        _cluster, \
        _kth_smallest
    library, INSTRUCTION_SET, LOAD_ERROR = load(folder)
    # Looked up once: between matrix products every line of Python runs from a cold cache.
    functions = [_no_library if library is None else getattr(library, f"gtp_vit_{name}") for name in SIGNATURES]
    _attention, _gtp_reduce, _gtp_plus_merge, _graph, _cluster, _kth_smallest, threads = functions
    MULTITHREADED = library is not None and threads(2) == 2


INSTRUCTION_SET: str
LOAD_ERROR: str | None
MULTITHREADED: bool  # did the library find the OpenMP runtime that torch has loaded? Else it runs on one thread.
_attention: Callable[..., int]
_gtp_reduce: Callable[..., int]
_gtp_plus_merge: Callable[..., int]
_graph: Callable[..., int]
_cluster: Callable[..., int]
_kth_smallest: Callable[..., float]
load_from(Path(__file__).parent)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention_results(inputs: AttentionInputs) -> AttentionResult:
    v, first = inputs.v, inputs.first
    batch, num_heads, tokens, depth = inputs.k.shape
    shape = (batch, tokens - first) if inputs.heads else (batch, num_heads, tokens - first)
    statistics = v.new_empty(sum(inputs.statistic_mask), *shape, dtype=torch.float32)
    return AttentionResult(v.new_empty(batch, inputs.queries, num_heads * depth), statistics)


def attention(inputs: AttentionInputs) -> AttentionResult:
    q, k, v, size, scale, removed, queries, asked, heads, first = inputs
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, num_heads, tokens, depth = k.shape
    results = attention_results(inputs)
    out, statistics = results
    step, address = math.prod(statistics.shape[1:]) * 4, statistics.data_ptr()
    addresses = []
    for is_needed in asked:
        addresses.append(address if is_needed else None)
        address += step if is_needed else 0
    if size is not None:
        size = size.float().contiguous()
    outcome = _attention(
        q.data_ptr(),
        *q.stride()[:3],
        k.data_ptr(),
        *k.stride()[:3],
        v.data_ptr(),
        *v.stride()[:3],
        *(batch, num_heads, q.shape[2], tokens, depth, queries, scale, removed),
        *(_address(size), out.data_ptr(), first, *addresses, heads, q.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    if outcome:
        _raise(outcome)
    return results


def gtp_reduce_results(inputs: GTPReduceInputs) -> GTPReduceResult:
    x, position, removed = inputs.x, inputs.position, inputs.removed
    batch, tokens, channels = x.shape
    left = tokens - removed
    return GTPReduceResult(
        x=x.new_empty(batch, left, channels),
        normed=x.new_empty((0,) if inputs.norm_weight is None else (batch, left, channels)),
        size=x.new_empty((batch, left) if inputs.with_size else (0,), dtype=torch.float32),
        cell=position.new_empty(batch, position.shape[1] - removed),
    )


def gtp_reduce(inputs: GTPReduceInputs) -> GTPReduceResult:
    x, branch, scores, position, size, neighbours, root, removed, alpha, with_size = inputs[:10]
    norm_weight, norm_bias, epsilon = inputs[10:]
    x, branch, position = x.contiguous(), branch.to(x.dtype).contiguous(), position.contiguous()
    scores, neighbours, root = scores.float().contiguous(), neighbours.contiguous(), root.contiguous()
    if size is not None:
        size = size.contiguous()
    batch, tokens, channels = x.shape
    results = gtp_reduce_results(inputs)
    x_out, normed_out, size_out, position_out = results
    if norm_weight is not None and norm_bias is not None:
        norm_weight, norm_bias = norm_weight.contiguous(), norm_bias.to(x.dtype).contiguous()
    outcome = _gtp_reduce(
        *(batch, tokens, tokens - position.shape[1], channels, removed, neighbours.shape[1], neighbours.shape[2]),
        *(x.data_ptr(), branch.data_ptr(), scores.data_ptr(), position.data_ptr(), _address(size)),
        *(neighbours.data_ptr(), root.data_ptr(), neighbours.shape[0] > 1, alpha),
        *(_address(norm_weight), _address(norm_bias), epsilon),
        *(x_out.data_ptr(), normed_out.data_ptr() if norm_weight is not None else None, position_out.data_ptr()),
        *(size_out.data_ptr() if with_size else None, x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    if outcome:
        _raise(outcome)
    return results


def gtp_plus_merge_results(inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    x, removed = inputs.x, inputs.removed
    batch, tokens, channels = x.shape
    image = inputs.importance if isinstance(inputs, GTPPlusMergeInputs) else inputs.size
    left, stay = tokens - removed, image.shape[1] - removed
    keep, drop, target = (x.new_empty(batch, count, dtype=torch.int64) for count in (stay, removed, removed))
    normed = x.new_empty((0,) if inputs.norm_weight is None else (batch, left, channels))
    size = x.new_empty(batch, stay, dtype=torch.float32)
    return GTPPlusMergeResult(x.new_empty(batch, left, channels), normed, size, keep, drop, target)


def gtp_plus_merge(inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
    importance, size = inputs.importance.float().contiguous(), inputs.size
    size = torch.ones_like(importance) if size is None else size.contiguous()
    return _gtp_plus_merge_by(inputs, size, importance=importance)


def gtp_plus_merge_by_probe(inputs: GTPPlusMergeByProbeInputs) -> GTPPlusMergeResult:
    protected = None if inputs.protected is None else inputs.protected.float().contiguous()
    return _gtp_plus_merge_by(inputs, inputs.size.contiguous(), probe=inputs.probe.contiguous(), protected=protected)


def _gtp_plus_merge_by(
    inputs: GTPPlusMergeInputs | GTPPlusMergeByProbeInputs,
    size: Tensor,
    *,
    importance: Tensor | None = None,
    probe: Tensor | None = None,
    protected: Tensor | None = None,
) -> GTPPlusMergeResult:
    x, branch = inputs.x.contiguous(), inputs.branch.to(inputs.x.dtype).contiguous()
    batch, tokens, channels = x.shape
    results = gtp_plus_merge_results(inputs)
    norm_weight, norm_bias, epsilon = inputs.norm
    if norm_weight is not None and norm_bias is not None:
        norm_weight, norm_bias = norm_weight.contiguous(), norm_bias.to(x.dtype).contiguous()
    normed = results.normed.data_ptr() if norm_weight is not None else None
    outcome = _gtp_plus_merge(
        *(batch, tokens, tokens - size.shape[1], channels, inputs.removed, x.data_ptr(), branch.data_ptr()),
        *(
            _address(importance),
            _address(probe),
            _address(protected),
            size.data_ptr(),
            inputs.importance_floor,
            inputs.preserve_norm,
        ),
        *(_address(norm_weight), _address(norm_bias), epsilon),
        *(results.x.data_ptr(), normed, results.size.data_ptr()),
        *(results.keep.data_ptr(), results.drop.data_ptr(), results.target.data_ptr()),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    if outcome:
        _raise(outcome)
    return results


def neighbours_results(inputs: NeighboursInputs) -> Neighbours:
    similarity, rows, columns, spatial, semantic = inputs
    batch, patches = similarity.shape[0], rows * columns
    return Neighbours(
        lists=similarity.new_empty(batch, patches, spatial + semantic, dtype=torch.int64),
        root=similarity.new_empty(batch, patches, dtype=torch.float32),
    )


def neighbours(inputs: NeighboursInputs) -> Neighbours:
    similarity, rows, columns, spatial, semantic = inputs
    similarity = similarity.float().contiguous()
    results = neighbours_results(inputs)
    outcome = _graph(
        *(similarity.shape[0], rows, columns, spatial, semantic),
        *(similarity.data_ptr(), results.lists.data_ptr(), results.root.data_ptr(), torch.get_num_threads()),
    )
    if outcome:
        _raise(outcome)
    return results


def cluster_results(inputs: ClusterInputs) -> Clusters:
    distance, removed = inputs.distance, inputs.removed
    batch, count, _ = distance.shape
    keep, drop, target = (distance.new_empty(batch, n, dtype=torch.int64) for n in (count - removed, removed, removed))
    return Clusters(keep, drop, target)


def cluster(inputs: ClusterInputs) -> Clusters:
    distance = inputs.distance.contiguous()
    results = cluster_results(inputs)
    outcome = _cluster(
        *(distance.shape[0], distance.shape[1], inputs.removed, inputs.linkage, distance.data_ptr()),
        *(results.keep.data_ptr(), results.drop.data_ptr(), results.target.data_ptr(), torch.get_num_threads()),
    )
    if outcome:
        _raise(outcome)
    return results


def kth_smallest(values: Tensor, k: int) -> float:
    """The k-th smallest entry of a matrix of non-negative floats, found as the attention kernel does it; for tests."""
    values = values.float().contiguous()
    rows, columns = values.shape
    scratch = torch.empty(values.numel() + 64, dtype=torch.int32)
    return float(_kth_smallest(values.data_ptr(), rows, columns, columns, k, scratch.data_ptr()))
