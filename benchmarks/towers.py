"""Vision towers of VLMs whose patches go back on a grid: what do reducing inside and restoring cost over slicing?

    python benchmarks/towers.py --json docs/results/towers-speed.json

A tower alone, as its VLM runs it, with random weights and GTP+ at its default. All are timed in turns in one process;
only ratios are reported. Slicing drops as many tokens and gives none back: what a method could reach whose own work and
restoring cost nothing. The error is that of a restored patch against the unreduced tower's, on random weights:
it says that the grid is in order, not how a trained tower behaves.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import tyro

import harness
from gtp_vit import Identity, patch
from gtp_vit.patching import tower_of
from gtp_vit.profiling.benchmark import interleave
from gtp_vit.profiling.slicing import slicing_like
from libraries import hugging_face

# name -> the tower, and how many images
TOWERS: dict[str, tuple[Callable[[], Any], int]] = {
    "CLIP-L/14 at 336 (LLaVA-NeXT)": (
        functools.partial(
            hugging_face,
            "CLIPVisionModel",
            "CLIPVisionConfig",
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            image_size=336,
            patch_size=14,
        ),
        1,
    ),
    "SigLIP-B/16 at 512 (SmolVLM)": (
        functools.partial(
            hugging_face,
            "SiglipVisionModel",
            "SiglipVisionConfig",
            image_size=512,
            patch_size=16,
            vision_use_head=False,
        ),
        1,
    ),
    "timm qwen3_vit_88m_enc": (functools.partial(timm.create_model, "qwen3_vit_88m_enc"), 1),
}


@dataclass(frozen=True)
class Options(harness.Options):
    """Time towers, interleaved."""

    rounds: int = 15
    """How often each is timed."""
    only: tuple[str, ...] = ()
    """Names of the towers; none = all."""


def measure(name: str, options: Options) -> dict[str, Any]:
    make, batch = TOWERS[name]
    torch.manual_seed(0)
    model = make().eval()
    restored = patch(model, restore=True)
    tower: Any = tower_of(restored)
    size = model.config.image_size if hasattr(model, "config") else model.patch_embed.img_size[0]
    images = torch.randn(batch, 3, size, size)
    models = {"full": model, "restored": restored, "slicing": sliced(model, restored)}
    with torch.inference_mode():
        whole, zero, found = (
            tokens(each(images)) for each in (model, patch(model, Identity(), restore=True), restored)
        )
        samples = interleave(
            {kind: functools.partial(each, images) for kind, each in models.items()}, rounds=options.rounds
        )
    prefix = tower.reduction.vit.prefix
    error = ((found - whole)[:, prefix:].norm(dim=2) / whole[:, prefix:].norm(dim=2)).mean()
    return {
        "tower": name,
        "batch": batch,
        "patches": whole.shape[1] - prefix,
        "same shape": found.shape == whole.shape,
        "largest_difference_at_zero_reduction": float((zero - whole).abs().max()),
        **harness.over_slicing(samples, "restored", "slicing"),
        "speedup": round(harness.of(samples, "restored", "full").speedup, 3),
        "error_of_a_patch": round(float(error), 4),
        "method": str(tower.reduction.method),
    }


def sliced(model: Any, restored: Any) -> Any:
    """Slicing with the schedule of a patched tower; it gives back what is left."""
    method = slicing_like(tower_of(restored).reducer)
    assert method is not None
    found: Any = patch(model, method, quiet=True, restore=True)
    tower_of(found).reduction = dataclasses.replace(tower_of(found).reduction, restore=False)
    return found


def tokens(output: Any) -> torch.Tensor:
    """All tokens, [B, N, C], of a tower that gives these or a map."""
    found = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    return found.flatten(1, 2) if found.ndim == 4 else found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.only or TOWERS:
        rows.append(measure(name, options))
        print(json.dumps(rows[-1]), flush=True)
        harness.write_run(options, rows)


if __name__ == "__main__":
    main()
