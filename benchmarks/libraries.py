"""The same ViT-B/16 in four libraries, and DINOv3-S: is the reduced one as fast in each, and how close to slicing?

    python benchmarks/libraries.py --json docs/results/libraries-speed.json

All are timed in turns in one process; only ratios are reported. Slicing is the same model in the same loop that drops
the last tokens of each layer: what a method with that schedule could reach if its own work cost nothing.
A run is added to those in the file.
"""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass
from typing import Any

import timm
import torch
import tyro

import harness
from gtp_vit import GTPPlus, create_model, patch
from gtp_vit.profiling.benchmark import interleave
from gtp_vit.profiling.slicing import slicing_like


@dataclass(frozen=True)
class Options(harness.Options):
    """Time reduced models of several libraries, interleaved."""

    batch: int = 8
    """Images in a batch."""
    propagate: int = 8
    """Tokens that GTP+ removes in each layer."""
    only: tuple[str, ...] = ()
    """Names of the models; none = all."""


def hugging_face(name: str, config: str, **more: Any) -> Any:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**more)).eval()


MODELS = {
    "timm ViT-B/16": functools.partial(timm.create_model, "vit_base_patch16_224"),
    "Hugging Face ViT-B/16": functools.partial(hugging_face, "ViTForImageClassification", "ViTConfig", num_labels=1000),
    "torchvision ViT-B/16": functools.partial(create_model, "torchvision:vit_b_16"),
    "open_clip ViT-B/16": functools.partial(create_model, "open_clip:ViT-B-16"),
    "Hugging Face CLIP-B/16": functools.partial(hugging_face, "CLIPVisionModel", "CLIPVisionConfig", patch_size=16),
    "timm DINOv3-S/16": functools.partial(timm.create_model, "vit_small_patch16_dinov3", img_size=224),
    "Hugging Face DINOv3-S/16": functools.partial(
        hugging_face,
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_register_tokens=4,
    ),
}
SAME = {
    "Hugging Face ViT-B/16": "timm ViT-B/16",
    "torchvision ViT-B/16": "timm ViT-B/16",
    "Hugging Face DINOv3-S/16": "timm DINOv3-S/16",
}


def measure(options: Options) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    images = torch.randn(options.batch, 3, 224, 224)
    calls: dict[str, Any] = {}
    for name in options.only or MODELS:
        model = MODELS[name]().eval()
        fast: Any = patch(model, GTPPlus(remove=options.propagate))
        sliced = slicing_like(fast.reducer)
        assert sliced is not None
        every = {"full": model, "reduced": fast, "slicing": patch(model, sliced, quiet=True)}
        calls |= {f"{name}: {kind}": functools.partial(each, images) for kind, each in every.items()}
    with torch.inference_mode():
        samples = interleave(calls, rounds=options.rounds)
    rows = []
    for name in options.only or MODELS:
        row = {
            "model": name,
            **harness.over_slicing(samples, f"{name}: reduced", f"{name}: slicing"),
            "speedup": round(harness.of(samples, f"{name}: reduced", f"{name}: full").speedup, 3),
        }
        if SAME.get(name) in (options.only or MODELS):
            median, _, best = harness.over(harness.of(samples, f"{name}: reduced", f"{SAME[name]}: reduced"))
            row |= {"over_timm": round(median, 3), "over_timm_best": round(best, 3)}
        rows.append(row)
    return rows


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    warnings.simplefilter("ignore")
    rows = measure(options)
    for row in rows:
        print(json.dumps(row))
    harness.add_run(options, rows)


if __name__ == "__main__":
    main()
