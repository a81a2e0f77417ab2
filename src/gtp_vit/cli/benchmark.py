"""gtp-vit benchmark: is the model faster with the method, here and now?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro

from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_with_method
from gtp_vit.cli.macs import layer_rows
from gtp_vit.core.reducer import Method
from gtp_vit.errors import check_range
from gtp_vit.patch import patch
from gtp_vit.tools.benchmark import Timing, benchmark_models
from gtp_vit.tools.macs import macs
from gtp_vit.tools.models import create_model


@dataclass(frozen=True)
class Benchmark:
    """Time a model with and without token reduction, interleaved in one process.

    Weights are random unless --pretrained: they do not change the time.
    """

    model: tyro.conf.Positional[str] = "deit_small_patch16_224"
    """Name of a timm model."""
    method: str = "gtp"
    """Name of a method; its settings are flags too."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 8
    """Images in a batch."""
    rounds: int = 20
    """How often each model is timed."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    img_size: int | None = None
    """Height and width of the images, if not the model's own."""
    pretrained: bool = False
    """Load the pre-trained weights."""
    json: bool = False
    """Print JSON instead of tables."""


def main(words: Sequence[str]) -> None:
    flags, method = parse_with_method(Benchmark, words)
    check_range("--batch-size", flags.batch_size, 1, 65536, whole=True)
    check_range("--rounds", flags.rounds, 3, 1_000_000, whole=True)
    check_range("--threads", flags.threads, 0, 4096, whole=True)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    model = create_model(flags.model, pretrained=flags.pretrained, img_size=flags.img_size)
    fast = patch(model, method)
    embed: Any = fast.patch_embed
    channels = next(p.shape[1] for p in embed.parameters() if p.ndim == 4)  # of the first convolution
    images = torch.randn(flags.batch_size, channels, *embed.img_size)
    with render.progress("timing") as progress:
        timings = benchmark_models(
            {"unreduced": model, method.name: fast}, images, rounds=flags.rounds, progress=progress
        )
    if flags.json:
        render.as_json(_result(flags, method, model, fast, images, timings))
        return
    render.table(f"{flags.model}, {method.name}: cost of each layer", *layer_rows(model, fast, images=images))
    rows = [
        [
            timing.name,
            f"{timing.milliseconds:.1f}",
            f"{timing.quartiles[0]:.1f} .. {timing.quartiles[1]:.1f}",
            f"{timing.speedup:.2f}",
            f"{timing.speedup_quartiles[0]:.2f} .. {timing.speedup_quartiles[1]:.2f}",
        ]
        for timing in timings
    ]
    title = f"batch {flags.batch_size}, {torch.get_num_threads()} threads, {flags.rounds} interleaved rounds"
    render.table(title, ["model", "ms", "middle half", "speed-up", "middle half"], rows)
    print(verdict(timings[1]))


def verdict(timing: Timing) -> str:
    """What the figures mean, in one sentence."""
    if timing.faster is None:
        return "No clear difference: the noise of this machine is larger than the gain."
    if timing.faster:
        return f"{timing.name} is {timing.speedup:.2f} times as fast as the unreduced model here."
    return f"No gain here: {timing.name} is slower than the unreduced model ({timing.speedup:.2f})."


def _result(
    flags: Benchmark, method: Method, model: Any, fast: Any, images: torch.Tensor, timings: list[Timing]
) -> dict[str, Any]:
    return {
        "flags": flags,
        "settings": method.to_dict(),
        "threads": torch.get_num_threads(),
        "macs": {"unreduced": int(macs(model)), method.name: int(macs(fast, images=images))},
        "timings": timings,
        "faster": timings[1].faster,
    }
