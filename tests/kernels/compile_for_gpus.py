"""Compile every Triton kernel for GPUs that are not here, and print what each would use of them, as JSON.

    python tests/kernels/compile_for_gpus.py 80 89 90

A program of its own, as tests run in a process where Triton interprets.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # pytest imports this file, too, when it looks for doctests
    os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gtp_vit.kernels.gpu import gtp, gtp_plus, map_statistics, parts, tome

FLOATS = {"floor", "epsilon", "scale", "weight_floor", "weight_power", "alpha"}
POINTERS = (
    dict.fromkeys(
        ("importance", "size", "protected", "cost", "length", "weight", "size_out", "probe", "predicted"), "*fp32"
    )
    | dict.fromkeys(("lse", "out", "diagonal", "sums", "row", "values", "root"), "*fp32")
    | dict.fromkeys(("kept", "gone", "target", "position", "neighbours", "cell_out"), "*i64")
    | dict.fromkeys(("slots", "best", "partner"), "*i32")
)
FEATURES = ("x", "branch", "norm_weight", "norm_bias", "x_out", "normed_out", "q", "k", "keys", "unit")
NORM = {"HAS_NORM": True, "HAS_BIAS": True}
MERGE = {"HAS_SIZE": True, "HAS_WEIGHT": True, "KEEP_NORM": True, "GONE": 256, **NORM}
HALF = {"HALF": True, "PRECISION": "tf32x3", "HAS_SIZE": True, "HAS_PROTECTED": True}
FULL = {**HALF, "HALF": False}
LOGSUMEXP = {"HAS_SIZE": True, "PRECISION": "tf32x3", "WIDEN": False, **map_statistics.LOGSUMEXP}
THREE = {"DIAGONAL": True, "SUMS": True, "ROW": True, "HEADS": 2}
STATISTICS = {half: {**LOGSUMEXP, **THREE, **blocks} for half, blocks in map_statistics.STATISTICS.items()}
PROPAGATE = {**NORM, "HAS_SIZE": True, "WITH_SIZE": True, "LISTS": 32, "GONE": 32}
CLASS_ROW = {"HAS_SIZE": True, "HEADS": 2, "ALL": 256, "DEPTH": 16, "num_warps": 8}
COST, RECEIVER = gtp_plus.COST, gtp_plus.RECEIVER
SELECT = {half: {**blocks, "ALL": 256} for half, blocks in gtp_plus.SELECT.items()}
PARTNER = {"PRECISION": "tf32x3", "ROWS": 32, "COLUMNS": 64, "DEPTH": 32}
# kernel, dtype of features, constants and options: those that the functions choose for 256 and for 4,096 image tokens
CASES = {
    "cost, half": (gtp_plus.cost_kernel, "fp16", {**HALF, **COST[True]}),
    "cost, bfloat16": (gtp_plus.cost_kernel, "bf16", {**HALF, **COST[True]}),
    "cost, float32": (gtp_plus.cost_kernel, "fp32", {**FULL, **COST[False]}),
    "select, half": (gtp_plus.select_kernel, "fp16", {**HALF, **SELECT[True]}),
    "select, float32": (gtp_plus.select_kernel, "fp32", {**FULL, **SELECT[False]}),
    "receiver, half": (gtp_plus.receiver_kernel, "fp16", {**HALF, **RECEIVER[True]}),
    "receiver, float32": (gtp_plus.receiver_kernel, "fp32", {**FULL, **RECEIVER[False]}),
    "predict": (gtp_plus.predict_kernel, "fp16", {"ROWS": 32, "CHANNELS": 64, "num_warps": 4}),
    "importance, 256": (gtp_plus.importance_kernel, "fp16", {"HAS_PROTECTED": True, "ALL": 256, "num_warps": 4}),
    "importance, 4096": (gtp_plus.importance_kernel, "fp16", {"HAS_PROTECTED": True, "ALL": 4096, "num_warps": 8}),
    "merge, 1024 channels": (parts.merge_kernel, "fp16", {**MERGE, "CHANNELS": 1024, "num_warps": 4}),
    "merge, 2048 channels": (parts.merge_kernel, "fp32", {**MERGE, "CHANNELS": 2048, "num_warps": 8}),
    "merge, 4096 channels": (parts.merge_kernel, "fp32", {**MERGE, "CHANNELS": 4096, "num_warps": 16}),
    "split, 256": (parts.split_kernel, "fp32", {"ALL": 256, "SOME": 16, "num_warps": 8}),
    "split, 4096": (parts.split_kernel, "fp32", {"ALL": 4096, "SOME": 4, "num_warps": 8}),
    "propagate, 1024 channels": (gtp.propagate_kernel, "fp16", {**PROPAGATE, "CHANNELS": 1024, "num_warps": 4}),
    "propagate, 4096 channels": (gtp.propagate_kernel, "fp32", {**PROPAGATE, "CHANNELS": 4096, "num_warps": 16}),
    "unit_keys": (tome.unit_keys_kernel, "fp16", {"ROWS": 16, "DEPTH": 256, "num_warps": 4}),
    "partner, half": (tome.partner_kernel, "fp16", {**PARTNER, "num_warps": 4}),
    "partner, float32": (tome.partner_kernel, "fp32", {**PARTNER, "num_warps": 4}),
    "pairs, 128": (tome.pairs_kernel, "fp16", {"KEEP_ORDER": True, "ALL": 128, "SOME": 16, "num_warps": 8}),
    "pairs, 2048": (tome.pairs_kernel, "fp16", {"KEEP_ORDER": True, "ALL": 2048, "SOME": 4, "num_warps": 8}),
    "class_row": (map_statistics.class_row_kernel, "fp16", CLASS_ROW),
    "logsumexp, half": (map_statistics.logsumexp_kernel, "fp16", LOGSUMEXP),
    "logsumexp, float32": (map_statistics.logsumexp_kernel, "fp32", LOGSUMEXP),
    "statistics, half": (map_statistics.statistics_kernel, "fp16", STATISTICS[True]),
    "statistics, bfloat16": (map_statistics.statistics_kernel, "bf16", STATISTICS[True]),
    "statistics, float32": (map_statistics.statistics_kernel, "fp32", STATISTICS[False]),
}  # fmt: skip
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_one(capability: int, kernel, dtype: str, constants: dict) -> dict:
    signature, constexprs = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{dtype}" if name in FEATURES else POINTERS.get(name, "i32")
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        said = subprocess.run([DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", said).groups())
    tensor_cores = bool(re.search(r"mma\.sync|wgmma", done.asm["ptx"]))
    return {
        "registers": registers,
        "spilled": stack + local,
        "shared": done.metadata.shared,
        "tensor_cores": tensor_cores,
    }


if __name__ == "__main__":
    found = {}
    for capability in map(int, sys.argv[1:]):
        for name, (kernel, *rest) in CASES.items():
            found[f"sm_{capability} {name}"] = used = compile_one(capability, kernel, *rest)
            print(f"sm_{capability} {name:28s}", used, file=sys.stderr, flush=True)
    print(json.dumps(found))
