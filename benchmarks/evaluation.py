"""What does `evaluate` cost beyond the forward passes? Interleaved, images in memory.

    python benchmarks/evaluation.py

The bare forward passes of a model against `evaluate` of the same model over the same images: ranks, agreement, KL, the
journal in memory and the intervals are all in the second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from gtp_vit import GTP, create_model, patch
from gtp_vit.data.dataset import InMemory
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.profiling.benchmark import against, interleave


@dataclass(frozen=True)
class Options:
    """Measure the overhead of evaluation."""

    model: str = "deit_tiny_patch16_224"
    """Name of a model; random weights will do."""
    images: int = 512
    """Images in memory."""
    batch_size: int = 64
    """Images at a time."""
    rounds: int = 9
    """How often each is timed."""
    json: Path | None = None
    """Write the figures here as well."""


def main(options: Options) -> None:
    model = create_model(options.model)
    models = {UNREDUCED: model, "gtp": patch(model, GTP(propagate=8))}
    size = model.patch_embed.img_size[0]
    images = torch.randn(options.images, 3, size, size)
    dataset = InMemory(images, torch.zeros(options.images, dtype=torch.long))

    def bare() -> None:
        with torch.inference_mode():
            for part in images.split(options.batch_size):
                for each in models.values():
                    each(part)

    def evaluated() -> None:
        evaluate(models, dataset, batch_size=options.batch_size)

    samples = interleave({"evaluate": evaluated, "bare forward passes": bare}, rounds=options.rounds, warmup=1)
    timing = against(samples, "evaluate")[1]
    low, high = timing.speedup_quartiles
    print(
        f"{options.model}, {options.images} images, batch {options.batch_size}, {torch.get_num_threads()} threads: "
        f"evaluate takes {timing.speedup:.3f} times as long as the bare forward passes (middle half of the rounds "
        f"{low:.3f} .. {high:.3f})"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"ratio": timing.speedup, "quartiles": [low, high]}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
