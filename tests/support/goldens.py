"""The stored outputs of the original implementations: a few beside the tests, all of them in GTP_VIT_DATA."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import load_file
from torch import Tensor

from gtp_vit import GTP

# Two images on both kernels in `make test`; all of them once, as users have it.
PARTS = pytest.mark.parametrize(
    ("part", "kernels"),
    [("two images", "native"), ("two images", "torch"), pytest.param("all images", "native", marks=pytest.mark.slow)],
    indirect=["part"],
)
SHIPPED = Path(__file__).parents[1] / "golden"
SELECTIONS = {
    "MixedAttn": "mixed",
    "DiagAttn": "diagonal",
    "IMGAttn": "broad",
    "CLSAttn": "class",
    "CosSim": "cosine_attention",
}


def read(folder: Path, *methods: str) -> dict[str, dict]:
    """Entry -> what is stored of it; its tensors are under "data"."""
    entries = {}
    for method in methods:
        tensors = load_file(folder / f"{method}.safetensors")
        for entry in json.loads((folder / f"{method}.json").read_text())["entries"]:
            name = entry["name"]
            entry["data"] = {key.split("/", 1)[1]: t for key, t in tensors.items() if key.startswith(name + "/")}
            entries[name] = entry
    return entries


def deit_tiny(data: Path) -> Any:
    """The model that the outputs were recorded with."""
    model = timm.create_model("deit_tiny_patch16_224").eval()
    weights = data / "assets" / "weights" / "deit_tiny_patch16_224.rounded-layernorm.safetensors"
    model.load_state_dict(load_file(weights))
    return model


def inputs(data: Path) -> Tensor:
    """The images that the outputs were recorded with."""
    return load_file(data / "golden" / "inputs.safetensors")["images"]


def part_of(name: str) -> Callable[[dict, Tensor], tuple[dict, Tensor]]:
    """part(entry, images): what is compared of an entry."""
    return of_two_images if name == "two images" else lambda *whole: whole


def of_two_images(entry: dict, images: Tensor) -> tuple[dict, Tensor]:
    """An entry with what is stored of the first two images that can be compared, and these images."""
    chosen = entry["comparison"]["compare_images"][:2]
    tensors = {key: t[chosen] if len(t) == len(images) else t for key, t in entry["data"].items()}
    comparison = {**entry["comparison"], "compare_images": list(range(len(chosen)))}
    entry = {key: value for key, value in entry.items() if not key.startswith("fraction_of_removed")}  # a mean of all
    return {**entry, "comparison": comparison, "data": tensors}, images[chosen]


def gtp_of(settings: dict) -> GTP:
    """The original's flags in our words."""
    name, heads = _split(settings["selection"])
    number = settings["num_prop"]
    return GTP(
        propagate=number if isinstance(number, int) else tuple(number),
        select=SELECTIONS[name],
        heads=heads,
        graph=settings["graph_type"].lower(),
        neighbours=settings["num_neighbours"],
        theta=settings["sparsity"],
        alpha=settings["alpha"],
        proportional_attention=settings["token_scale"],
        official_offbyone=True,
    )


def _split(selection: str) -> tuple[str, str]:
    heads = "max" if selection.endswith("Max") else "mean"
    return selection.removesuffix("Max").removesuffix("Mean"), heads
