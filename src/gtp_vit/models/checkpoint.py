"""checkpoint: weights that timm loads, with the recipe of their reduction in the metadata."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from torch import nn

from gtp_vit.patching import host_of, unpatch
from gtp_vit.recipes.files import METADATA
from gtp_vit.recipes.recipe import Recipe, Sizes, sizes_of_vit
from gtp_vit.runs.files import write_atomically


def sizes_of_model(model: nn.Module) -> Sizes:
    """The sizes that a recipe stores for this model."""
    return sizes_of_vit(host_of(model).vit)


def save_checkpoint(model: nn.Module, path: str | Path, recipe: Recipe) -> None:
    """Save the unpatched model's weights, which timm can load, with the recipe in the metadata.

    Args:
        model: patched or not; its original's weights are written.
        path: a safetensors file.
        recipe: goes into the file's metadata, where `read_recipe` finds it.

    Raises:
        OSError: the file cannot be written.

    >>> import torch, gtp_vit
    >>> model, images = gtp_vit.create_model("test_vit"), torch.rand(40, 3, 160, 160)
    >>> recipe = gtp_vit.calibrate(model, images)
    >>> path = getfixture("tmp_path") / "model.safetensors"
    >>> save_checkpoint(gtp_vit.patch(model, recipe), path, recipe)
    >>> gtp_vit.read_recipe(path) == recipe
    True
    """
    from safetensors.torch import save

    host = host_of(model)
    recipe.check(host)
    recipe = dataclasses.replace(recipe, method=recipe.method.with_fingerprint_of(host.block_weights))
    weights = {key: value.contiguous() for key, value in unpatch(model).state_dict().items()}
    write_atomically(Path(path), save(weights, {METADATA: json.dumps(recipe.to_dict())}))
