"""The recipe of a patched model in a file beside its weights, as its `save_pretrained` writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from gtp_vit.backbones.host import Host
from gtp_vit.core.loop import Origin, PatchedModel
from gtp_vit.methods.gtp_plus.calibration import fingerprint
from gtp_vit.recipes import BESIDE, Recipe, sizes_of_vit


def write_beside(host: Host, tower: PatchedModel, folder: Path) -> None:
    """Write the recipe of a patched model and what its method has learned.

    Args:
        host: of the model as it was before.
        tower: its patched ViT.
        folder: where the weights are.
    """
    import safetensors.torch

    reduction = tower.reduction
    method, learned = reduction.method, tower.reducer.state_dict()
    files = {part: f"{Path(BESIDE).stem}-{part}.safetensors" for part in method.files if learned}
    for part, file in files.items():
        own = {key: value.contiguous() for key, value in learned.items() if key.startswith(f"{part}.")}
        safetensors.torch.save_file(own, folder / file)
    found, measured = _history(reduction.origin, host)
    found = {**found, "restore": True} if reduction.restore else found
    method = dataclasses.replace(method, **files).learned_on(host.matrices)
    recipe = Recipe(host.inputs.name, sizes_of_vit(host.vit), method, found, measured)
    (folder / BESIDE).write_text(recipe.to_json(), encoding="utf-8")


def _history(origin: Origin | None, host: Host) -> tuple[dict[str, Any], dict[str, Any]]:
    """How settings were found, and what was measured with them: nothing, once the model has other weights."""
    if origin is None:
        return {}, {}
    found = {key: value for key, value in origin.found.items() if key != "restore"}
    is_same = torch.equal(origin.weights, fingerprint(host.weights))
    return found, dict(origin.measured) if is_same else {}
