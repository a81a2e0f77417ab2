"""load_pretrained: a reduced Hugging Face model back from the folder that its save_pretrained wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtp_vit.backbones.hf_library import LOOKUP_OPTIONS, load_model, transformers_library
from gtp_vit.errors import GTPError
from gtp_vit.kernels import Kernels
from gtp_vit.patching import patch
from gtp_vit.recipes.files import RECIPE_FILENAME
from gtp_vit.recipes.recipe import read_recipe


def load_pretrained(
    name: str | Path,
    *,
    restore: bool | None = None,
    shorten_last_block: bool = True,
    kernels: Kernels = "auto",
    quiet: bool = False,
    **options: Any,
) -> Any:
    """The reduced model in a folder, in eval mode; the recipe beside the weights says how it was reduced.

    Args:
        name: a folder that `save_pretrained` of a patched model wrote, or its name on the hub.
        restore: as for `patch`; None = as it was saved.
        shorten_last_block: as for `patch`.
        kernels: as for `patch`.
        quiet: as for `patch`.
        **options: as for transformers' `from_pretrained`.

    Returns:
        The patched model, as `patch` returns it.

    Raises:
        GTPError: the folder has no recipe, or transformers cannot load the model in it.

    >>> from transformers import ViTConfig, ViTModel
    >>> import gtp_vit
    >>> config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    >>> fast = gtp_vit.patch(ViTModel(config).eval(), gtp_vit.ToMe(r=4))
    >>> folder = getfixture("tmp_path")
    >>> fast.save_pretrained(folder)
    >>> load_pretrained(folder).reduction.method
    ToMe(r=4)
    """
    library = transformers_library()
    where = {key: value for key, value in options.items() if key in LOOKUP_OPTIONS}
    recipe_file = library.utils.cached_file(
        str(name), RECIPE_FILENAME, **where, _raise_exceptions_for_missing_entries=False
    )
    if recipe_file is None:
        raise GTPError(
            f"{name} has no {RECIPE_FILENAME}: it is not reduced; load it with transformers, then gtp_vit.patch(model, "
            "method)"
        )
    recipe, model = read_recipe(recipe_file), load_model(str(name), **options)
    restore = recipe.provenance.restore if restore is None else restore
    return patch(model, recipe, restore=restore, shorten_last_block=shorten_last_block, kernels=kernels, quiet=quiet)
