"""load_pretrained: a reduced Hugging Face model back from the folder that its save_pretrained wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtp_vit.backbones.hf_library import WHERE, load_model, transformers_library
from gtp_vit.errors import GTPError
from gtp_vit.kernels import Kernels
from gtp_vit.patching import patch
from gtp_vit.recipes.files import BESIDE
from gtp_vit.recipes.recipe import read_recipe


def load_pretrained(
    name: str | Path,
    *,
    restore: bool | None = None,
    lossless: bool = True,
    kernels: Kernels = "auto",
    quiet: bool = False,
    **options: Any,
) -> Any:
    """The reduced model in a folder, in eval mode; the recipe beside the weights says how it was reduced.

    Args:
        name: a folder that `save_pretrained` of a patched model wrote, or its name on the hub.
        restore: as for `patch`; None = as it was saved.
        lossless: as for `patch`.
        kernels: as for `patch`.
        quiet: as for `patch`.
        **options: as for transformers' `from_pretrained`.
    """
    library = transformers_library()
    where = {key: value for key, value in options.items() if key in WHERE}
    found = library.utils.cached_file(str(name), BESIDE, **where, _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise GTPError(
            f"{name} has no {BESIDE}: it is not reduced; load it with transformers, then gtp_vit.patch(model, method)"
        )
    recipe, model = read_recipe(found), load_model(str(name), **options)
    restore = recipe.provenance.restore if restore is None else restore
    return patch(model, recipe, restore=restore, lossless=lossless, kernels=kernels, quiet=quiet)
