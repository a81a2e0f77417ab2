"""The native library: found, loaded and called through ctypes.

It is built by `pip install`, once for each instruction set, without torch's headers: one build serves every version of
torch. The best one that this processor can run is loaded when the package is imported. If there is none, PROBLEM says
why, and the twins run. Nothing is checked here: operators.py passes arguments that checks.py has checked. The functions
`..._results` allocate the results, which also tells torch their shapes.
"""

from __future__ import annotations

import ctypes
import math
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtp_vit.kernels import sources

# instruction sets from best to most common, by the name torch gives to what the processor can do
BUILDS = {"AVX512": ("avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}

# Arguments of the functions in api.cpp: i int, l int64, f float, p pointer.
SIGNATURES = {
    "attention": "plll plll plll ll iiii f l pp i ppp ii i",
    "reduce": "l iiiiii pp pppp p l f pp f pppp i i",
    "conserve": "l iiii ppppp p fi pp f pp pppp i i",
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
        if name not in ("kth_smallest", "threads"):
            function.errcheck = _raise


def _raise(outcome: int, *_: Any) -> None:
    """Raise the error that a kernel's return value stands for; see Outcome in reduce.h."""
    if outcome == 2:
        raise IndexError("gtp_vit.reduce: position or neighbours has an entry that is no cell of the grid")
    if outcome:
        raise MemoryError("gtp_vit: no memory for the scratch space of a native kernel")


def use(folder: Path) -> None:
    """Use the kernels in this folder from now on."""
    global INSTRUCTION_SET, PROBLEM, THREADED, _attention, _reduce, _conserve, _graph, _cluster, _kth_smallest
    library, INSTRUCTION_SET, PROBLEM = load(folder)
    # Looked up once: between matrix products every line of Python runs from a cold cache.
    functions = [getattr(library, f"gtp_vit_{name}", None) for name in SIGNATURES]
    _attention, _reduce, _conserve, _graph, _cluster, _kth_smallest, threads = functions
    THREADED = threads is not None and threads(2) == 2


INSTRUCTION_SET: str
PROBLEM: str | None
THREADED: bool  # did the library find the OpenMP runtime that torch has loaded? Else it runs on one thread.
_attention: Any
_reduce: Any
_conserve: Any
_graph: Any
_cluster: Any
_kth_smallest: Any
use(Path(__file__).parent)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention_results(
    k: Tensor, v: Tensor, queries: int, asked: list[bool], heads: int, first: int
) -> tuple[Tensor, Tensor]:
    batch, num_heads, tokens, depth = k.shape
    shape = (batch, tokens - first) if heads else (batch, num_heads, tokens - first)
    return v.new_empty(batch, queries, num_heads * depth), v.new_empty(sum(asked), *shape, dtype=torch.float32)


def attention(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, removed: int, queries: int, asked: list[bool],
    heads: int, first: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, num_heads, tokens, depth = k.shape
    out, statistics = attention_results(k, v, queries, asked, heads, first)
    step, address = math.prod(statistics.shape[1:]) * 4, statistics.data_ptr()
    addresses = []
    for wanted in asked:
        addresses.append(address if wanted else None)
        address += step if wanted else 0
    if size is not None:
        size = size.float().contiguous()
    _attention(
        q.data_ptr(),
        *q.stride()[:3],
        k.data_ptr(),
        *k.stride()[:3],
        v.data_ptr(),
        *v.stride()[:3],
        *(batch, num_heads, q.shape[2], tokens, depth, queries, scale, removed),
        *(_address(size), out.data_ptr(), first, *addresses, heads, q.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return out, statistics


def reduce_results(
    x: Tensor, position: Tensor, removed: int, with_size: bool, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    left = tokens - removed
    return (
        x.new_empty(batch, left, channels),
        x.new_empty((0,) if norm_weight is None else (batch, left, channels)),
        x.new_empty((batch, left) if with_size else (0,), dtype=torch.float32),
        position.new_empty(batch, position.shape[1] - removed),
    )


def reduce(
    x: Tensor, branch: Tensor, scores: Tensor, position: Tensor, size: Tensor | None, neighbours: Tensor, root: Tensor,
    removed: int, alpha: float, with_size: bool, norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, branch, position = x.contiguous(), branch.to(x.dtype).contiguous(), position.contiguous()
    scores, neighbours, root = scores.float().contiguous(), neighbours.contiguous(), root.contiguous()
    if size is not None:
        size = size.contiguous()
    batch, tokens, channels = x.shape
    results = reduce_results(x, position, removed, with_size, norm_weight)
    x_out, normed_out, size_out, position_out = results
    if norm_weight is not None and norm_bias is not None:
        norm_weight, norm_bias = norm_weight.contiguous(), norm_bias.to(x.dtype).contiguous()
    _reduce(
        *(batch, tokens, tokens - position.shape[1], channels, removed, neighbours.shape[1], neighbours.shape[2]),
        *(x.data_ptr(), branch.data_ptr(), scores.data_ptr(), position.data_ptr(), _address(size)),
        *(neighbours.data_ptr(), root.data_ptr(), neighbours.shape[0] > 1, alpha),
        *(_address(norm_weight), _address(norm_bias), epsilon),
        *(x_out.data_ptr(), normed_out.data_ptr() if norm_weight is not None else None, position_out.data_ptr()),
        *(size_out.data_ptr() if with_size else None, x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return results


def conserve_results(
    x: Tensor, importance: Tensor, removed: int, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    left, stay = tokens - removed, importance.shape[1] - removed
    kept, gone, target = (x.new_empty(batch, count, dtype=torch.int64) for count in (stay, removed, removed))
    normed = x.new_empty((0,) if norm_weight is None else (batch, left, channels))
    size = x.new_empty(batch, stay, dtype=torch.float32)
    return x.new_empty(batch, left, channels), normed, size, kept, gone, target


def conserve(
    x: Tensor, branch: Tensor, importance: Tensor, size: Tensor | None, removed: int, floor: float, keep_norm: bool,
    norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    importance = importance.float().contiguous()
    size = torch.ones_like(importance) if size is None else size.contiguous()
    found = (importance, None, None, size)
    return _conserved(x, branch, *found, removed, floor, keep_norm, norm_weight, norm_bias, epsilon)


def conserve_by_probe_results(
    x: Tensor, size: Tensor, removed: int, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return conserve_results(x, size, removed, norm_weight)


def conserve_by_probe(
    x: Tensor, branch: Tensor, probe: Tensor, size: Tensor, protected: Tensor | None, removed: int, floor: float,
    keep_norm: bool, norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if protected is not None:
        protected = protected.float().contiguous()
    found = (None, probe.contiguous(), protected, size.contiguous())
    return _conserved(x, branch, *found, removed, floor, keep_norm, norm_weight, norm_bias, epsilon)


def _conserved(
    x: Tensor, branch: Tensor, importance: Tensor | None, probe: Tensor | None, protected: Tensor | None, size: Tensor,
    removed: int, floor: float, keep_norm: bool, norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, branch = x.contiguous(), branch.to(x.dtype).contiguous()
    batch, tokens, channels = x.shape
    results = conserve_results(x, size, removed, norm_weight)
    x_out, normed_out, size_out, kept, gone, target = results
    if norm_weight is not None and norm_bias is not None:
        norm_weight, norm_bias = norm_weight.contiguous(), norm_bias.to(x.dtype).contiguous()
    _conserve(
        *(batch, tokens, tokens - size.shape[1], channels, removed, x.data_ptr(), branch.data_ptr()),
        *(_address(importance), _address(probe), _address(protected), size.data_ptr(), floor, keep_norm),
        *(_address(norm_weight), _address(norm_bias), epsilon),
        *(x_out.data_ptr(), normed_out.data_ptr() if norm_weight is not None else None, size_out.data_ptr()),
        *(kept.data_ptr(), gone.data_ptr(), target.data_ptr(), x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return results


def neighbours_results(
    similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int
) -> tuple[Tensor, Tensor]:
    batch, patches = similarity.shape[0], rows * columns
    return (
        similarity.new_empty(batch, patches, spatial + semantic, dtype=torch.int64),
        similarity.new_empty(batch, patches, dtype=torch.float32),
    )


def neighbours(similarity: Tensor, rows: int, columns: int, spatial: int, semantic: int) -> tuple[Tensor, Tensor]:
    similarity = similarity.float().contiguous()
    found, root = neighbours_results(similarity, rows, columns, spatial, semantic)
    _graph(
        *(similarity.shape[0], rows, columns, spatial, semantic),
        *(similarity.data_ptr(), found.data_ptr(), root.data_ptr(), torch.get_num_threads()),
    )
    return found, root


def cluster_results(distance: Tensor, removed: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, count, _ = distance.shape
    kept, gone, target = (distance.new_empty(batch, n, dtype=torch.int64) for n in (count - removed, removed, removed))
    return kept, gone, target


def cluster(distance: Tensor, removed: int, linkage: int) -> tuple[Tensor, Tensor, Tensor]:
    distance = distance.contiguous()
    kept, gone, target = cluster_results(distance, removed)
    _cluster(
        *(distance.shape[0], distance.shape[1], removed, linkage, distance.data_ptr()),
        *(kept.data_ptr(), gone.data_ptr(), target.data_ptr(), torch.get_num_threads()),
    )
    return kept, gone, target


def kth_smallest(values: Tensor, k: int) -> float:
    """The k-th smallest entry of a matrix of non-negative floats, found as the attention kernel does it; for tests."""
    values = values.float().contiguous()
    rows, columns = values.shape
    scratch = torch.empty(values.numel() + 64, dtype=torch.int32)
    return float(_kth_smallest(values.data_ptr(), rows, columns, columns, k, scratch.data_ptr()))
