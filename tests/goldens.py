"""The stored outputs of the original implementations: a few beside the tests, all of them in GTP_VIT_DATA."""

import json
from pathlib import Path

from safetensors.torch import load_file

SHIPPED = Path(__file__).parent / "golden"


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
