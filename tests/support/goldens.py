"""The stored outputs of the original implementations: a few beside the tests, all of them in GTP_VIT_DATA."""

import json
from pathlib import Path

from safetensors.torch import load_file

from gtp_vit import GTP

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
