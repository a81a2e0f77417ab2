"""The recipe of a patched model in a file beside its weights, as its `save_pretrained` writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gtp_vit.backbones.host import Host
from gtp_vit.core.loop import PatchedModel
from gtp_vit.methods.gtp_plus.calibration import fingerprint
from gtp_vit.recipes.files import BESIDE
from gtp_vit.recipes.provenance import Measurements, Origin, Provenance
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit


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
    provenance, measured = _history(reduction.origin, host)
    provenance = dataclasses.replace(provenance, restore=reduction.restore)
    method = dataclasses.replace(method, **files).learned_on(host.matrices)
    recipe = Recipe(host.inputs.name, sizes_of_vit(host.vit), method, provenance, measured)
    (folder / BESIDE).write_text(recipe.to_json(), encoding="utf-8")


def _history(origin: object, host: Host) -> tuple[Provenance, Measurements]:
    """Where settings are from, and what was measured with them: nothing, once the model has other weights."""
    if not isinstance(origin, Origin):
        return Provenance(), Measurements()
    is_same = torch.equal(origin.weights, fingerprint(host.weights))
    return origin.provenance, origin.measured if is_same else Measurements()
