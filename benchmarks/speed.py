"""How close is GTP to the price of slicing? Everything is timed in turns in one process; only ratios are reported.

    python benchmarks/speed.py                         # the cases of the README
    python benchmarks/speed.py --cases deit_small_patch16_224:8:8 --thetas 1 0.5 --rounds 40 --json speed.json
    python benchmarks/speed.py --cases deit_small_patch16_224:8:8 --methods tome:r=8 evit:keep_rate=0.8

A case is MODEL:BATCH:P[:IMAGE_SIZE]. The oracle is the same model, with the same shortened last block, that drops P
tokens per layer by slicing: what any method with that schedule could reach if its own work cost nothing. Other methods
are named with their settings, and each is compared with the oracle of its own schedule.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
import tyro

import harness
from gtp_vit import GTP, make_method, patch, unpatch
from gtp_vit.methods.gtp_plus.calibration import Calibration
from gtp_vit.patching import host_of
from gtp_vit.profiling.benchmark import interleave, speedups_over
from memory import in_a_child, peak_of

CASES = (
    "deit_small_patch16_224:1:8",
    "deit_small_patch16_224:1:14",
    "deit_small_patch16_224:8:8",
    "deit_small_patch16_224:8:14",
    "deit_small_patch16_224:32:8",
    "deit_small_patch16_224:32:14",
    "deit_base_patch16_224:8:8",
    "vit_base_patch8_224:4:32",
    "deit_small_patch16_224:2:42:512",
)


@dataclass(frozen=True)
class Options(harness.Options):
    """Time full model, oracle, torch reference and native kernels, interleaved."""

    cases: tuple[str, ...] = CASES
    """MODEL:BATCH:P or MODEL:BATCH:P:IMAGE_SIZE."""
    thetas: tuple[float, ...] = (1.0, 0.5)
    """Sparsification of GTP."""
    kernels: tuple[str, ...] = ("native", "torch")
    """Which kernels of GTP to time."""
    methods: tuple[str, ...] = ()
    """Other registered methods to time, with settings: tome:r=8, evit:keep_rate=0.8:fuse_token=False; also
    gtp_plus:calibration="random"."""
    memory: bool = False
    """Also measure the peak memory of one forward pass, each in a process of its own."""


@dataclass(frozen=True)
class Row:
    """One candidate of one case. Ratios are medians over rounds; `best` ones of the fastest quarter."""

    case: str
    candidate: str
    milliseconds: float
    over_oracle: float
    over_oracle_quartiles: tuple[float, float]
    over_oracle_best: float
    speedup: float
    speedup_best: float
    verdict: str  # faster or slower than the full model, where three quarters of the rounds agree


class Oracle(torch.nn.Module):
    """A timm ViT that keeps the first `left` tokens of each layer; the last block computes the class token only."""

    def __init__(self, model: Any, left: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.left = model, left

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        model = self.model
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        *blocks, last = model.blocks
        for block, left in zip(blocks, self.left, strict=False):
            branch = block.drop_path1(block.ls1(block.attn(block.norm1(x))))
            x = x[:, :left] + branch[:, :left]
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        x = x[:, :1] + last.ls1(self.class_attention(last.attn, last.norm1(x)))
        x = x + last.ls2(last.mlp(last.norm2(x)))
        return model.forward_head(model.norm(x))

    @staticmethod
    def class_attention(attn: Any, y: torch.Tensor) -> torch.Tensor:
        width = attn.qkv.out_features // 3
        weight, bias = attn.qkv.weight, attn.qkv.bias
        q = F.linear(y[:, :1], weight[:width], bias[:width])
        kv = F.linear(y, weight[width:], bias[width:])
        q, k, v = (t.unflatten(2, (attn.num_heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, dim=2)))
        out = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        return attn.proj(out.transpose(1, 2).flatten(2))


class RotaryOracle(Oracle):
    """The same of a timm Eva with blocks like DINOv3's: timm's attention, with the positions of the first tokens."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        model = self.model
        x, rope = model._pos_embed(model.patch_embed(images))
        x, prefix = model.norm_pre(x), model.num_prefix_tokens
        short = model.global_pool == "token"
        for index, (block, left) in enumerate(zip(model.blocks, self.left, strict=True)):
            rows = (rope[index] if model.rope_mixed else rope)[..., : x.shape[1] - prefix, :]
            last = short and index == len(model.blocks) - 1
            attend = self.prefix_attention if last else type(block.attn).forward
            left = prefix if last else left
            x = x[:, :left] + self.scaled(block.gamma_1, attend(block.attn, block.norm1(x), rows)[:, :left])
            x = x + self.scaled(block.gamma_2, block.mlp(block.norm2(x)))
        return model.forward_head(model.norm(x))

    @staticmethod
    def prefix_attention(attn: Any, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        width, prefix = attn.qkv.out_features // 3, attn.num_prefix_tokens
        bias = None if attn.q_bias is None else torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        first, rest = (None, None) if bias is None else (bias[:width], bias[width:])
        q = F.linear(y[:, :prefix], attn.qkv.weight[:width], first)
        kv = F.linear(y, attn.qkv.weight[width:], rest)
        q, k, v = (t.unflatten(2, (attn.num_heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, dim=2)))
        turned = timm.layers.apply_rot_embed_cat(k[:, :, prefix:], rows, half=attn.rotate_half)
        out = F.scaled_dot_product_attention(q, torch.cat([k[:, :, :prefix], turned], dim=2), v)
        return attn.proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def scaled(gamma: torch.Tensor | None, branch: torch.Tensor) -> torch.Tensor:
        return branch if gamma is None else gamma * branch


def candidates(case: str, options: Options) -> tuple[dict[str, torch.nn.Module], torch.Tensor]:
    name, batch, number, *size = case.split(":")
    model = timm.create_model(name, **({"img_size": int(size[0])} if size else {})).eval()
    found: dict[str, torch.nn.Module] = {"full": model, "oracle": oracle_of(patch(model, GTP(propagate=int(number))))}
    for theta in options.thetas:
        for kernels in options.kernels:
            method = GTP(propagate=int(number), theta=theta)
            found[f"gtp {kernels} theta={theta:g}"] = patch(model, method, kernels=kernels)  # type: ignore[arg-type]
    for other in options.methods:
        name, *settings = other.split(":")
        pairs = (setting.split("=", 1) for setting in settings)
        read = {key: ast.literal_eval(value) for key, value in pairs}
        if read.get("calibration") == "random":
            read["calibration"] = random_calibration(model)
        found[other] = patch(model, make_method(name, **read))
        found[f"oracle of {other}"] = oracle_of(found[other])
    return found, torch.randn(int(batch), 3, *model.patch_embed.img_size)


def random_calibration(model: Any) -> str:
    """A probe of random numbers, and four registers: what they are costs nothing, that they are there does."""
    vit = host_of(model).vit
    probe = torch.randn(vit.depth, vit.dim, generator=torch.Generator().manual_seed(0))
    rows, columns = vit.grid
    corners = (0, columns - 1, (rows - 1) * columns, rows * columns - 1)
    return Calibration(probe, vit.grid, corners, torch.zeros(0)).to_text()


def oracle_of(model: Any) -> Oracle:
    """Slicing with the schedule of a patched model."""
    vit = model.reduction.vit
    plain = unpatch(model)
    kind = RotaryOracle if isinstance(plain, timm.models.Eva) else Oracle
    return kind(plain, tuple(vit.prefix + step.out for step in model.reducer.steps(vit.grid)))


def measure(case: str, options: Options) -> list[Row]:
    models, images = candidates(case, options)
    with torch.inference_mode():
        calls = {name: (lambda model=model: model(images)) for name, model in models.items()}
        samples = interleave(calls, rounds=options.rounds)
    rows = []
    for full in speedups_over(samples, "full"):
        own = f"oracle of {full.name}" if f"oracle of {full.name}" in samples else "oracle"
        ratios = harness.over(harness.of(samples, full.name, own))
        verdict = {True: "faster", False: "SLOWER", None: "unclear"}[full.faster]
        rows.append(Row(case, full.name, full.milliseconds, *ratios, full.speedup, full.best_speedup, verdict))
    return rows


def peak_memory(case: str) -> dict[str, float]:
    """MB that a forward pass adds to the process, for each candidate."""
    return {name: in_a_child(__file__, case, str(index)) for index, name in enumerate(candidates(case, Options())[0])}


def child(case: str, index: int) -> None:
    """What `peak_memory` asks of another process."""
    torch.set_num_threads(2)
    models, images = candidates(case, Options())
    model = list(models.values())[index]
    with torch.inference_mode():
        models["full"](images[:1])  # torch's libraries and thread pool are not the forward pass's
        print(peak_of(lambda: model(images)))


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    memory: dict[str, dict[str, float]] = {}
    head = ("case", "candidate", "/ oracle", "middle half", "best", "speed-up", "best")
    print("{:<34}{:<24}{:>9}{:>15}{:>7}{:>10}{:>7}  than full".format(*head))
    for case in options.cases:
        for row in measure(case, options):
            low, high = row.over_oracle_quartiles
            print(
                f"{row.case:<34}{row.candidate:<24}{row.over_oracle:>9.3f}{f'{low:.3f} .. {high:.3f}':>15}"
                f"{row.over_oracle_best:>7.3f}{row.speedup:>10.2f}{row.speedup_best:>7.2f}  {row.verdict}",
                flush=True,
            )
            rows.append(row)
        if options.memory:
            memory[case] = peak_memory(case)
            print(f"{case:<34}peak MB of a forward pass: {memory[case]}", flush=True)
        harness.write_run(options, [dataclasses.asdict(row) for row in rows], peak_memory_mb=memory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options, description=__doc__))
