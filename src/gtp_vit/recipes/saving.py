"""The recipe of a patched model in a file beside its weights, as its `save_pretrained` writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gtp_vit.backbones.host import Host
from gtp_vit.core.loop import PatchedModel
from gtp_vit.methods.gtp_plus.calibration import weight_fingerprint
from gtp_vit.recipes.files import RECIPE_FILENAME
from gtp_vit.recipes.provenance import Measurements, Origin, Provenance
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit


def save_recipe_beside(host: Host, tower: PatchedModel, folder: Path) -> None:
    """Write the recipe of a patched model and what its method has learned.

    Args:
        host: of the model as it was before.
        tower: its patched ViT.
        folder: where the weights are.
    """
    import safetensors.torch

    reduction = tower.reduction
    method, learned = reduction.method, tower.reducer.state_dict()
    files = {part: f"{Path(RECIPE_FILENAME).stem}-{part}.safetensors" for part in method.weight_file_fields if learned}
    for part, file in files.items():
        own = {key: value.contiguous() for key, value in learned.items() if key.startswith(f"{part}.")}
        safetensors.torch.save_file(own, folder / file)
    provenance, measured = _provenance(reduction.origin, host)
    provenance = dataclasses.replace(provenance, restore=reduction.restore)
    method = dataclasses.replace(method, **files).with_fingerprint_of(host.block_weights)
    recipe = Recipe(host.inputs.name, sizes_of_vit(host.vit), method, provenance, measured)
    (folder / RECIPE_FILENAME).write_text(recipe.to_json(), encoding="utf-8")


def _provenance(recipe_provenance: object, host: Host) -> tuple[Provenance, Measurements]:
    """The provenance and measurements of settings: nothing, once the model has other weights."""
    if not isinstance(recipe_provenance, Origin):
        return Provenance(), Measurements()
    is_same = torch.equal(recipe_provenance.weights, weight_fingerprint(host.fingerprint))
    return recipe_provenance.provenance, recipe_provenance.measured if is_same else Measurements()
