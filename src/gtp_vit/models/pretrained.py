"""load_pretrained: a reduced Hugging Face model back from the folder that its save_pretrained wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gtp_vit.errors import GTPError, first_line
from gtp_vit.kernels import Kernels
from gtp_vit.patching import patch
from gtp_vit.recipes import BESIDE, read_recipe

# Where `from_pretrained` looks for files.
WHERE = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")


def transformers_library() -> Any:
    """The library, or an error that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise GTPError(
            "Hugging Face models need transformers 5.18 or newer (Python 3.11): pip install 'gtp-vit[hf]'"
        ) from error
    return transformers


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
    restore = recipe.found.get("restore") is True if restore is None else restore
    return patch(model, recipe, restore=restore, lossless=lossless, kernels=kernels, quiet=quiet)


def load_model(name: str, instead: Mapping[str, str] | None = None, **options: Any) -> Any:
    """A Hugging Face model in eval mode, of the class that its configuration names, or that stands `instead` of it.

    Weights that the checkpoint lacks would be random: refused. A pooler without weights is left out.
    """
    config, kind = configured_class(name, instead or {}, **{key: options[key] for key in WHERE if key in options})
    options = {"config": config, **options}
    try:
        with _quiet():
            model, info = kind.from_pretrained(name, **options, output_loading_info=True)
            if info["missing_keys"] and all(key.startswith("pooler.") for key in info["missing_keys"]):
                model, info = kind.from_pretrained(name, **options, add_pooling_layer=False, output_loading_info=True)
    except Exception as error:  # transformers, safetensors, the hub and the network raise errors of many classes
        raise GTPError(f"transformers cannot load {name!r}: {first_line(error)}") from error
    missing = sorted([*info["missing_keys"], *(str(key[0]) for key in info.get("mismatched_keys", ()))])
    if missing:
        raise GTPError(
            f"the weights of {name!r} lack {missing[0]} and {len(missing) - 1} others of {kind.__name__}, which would "
            "be random; give a whole checkpoint"
        )
    return model.eval()


def configured_class(name: str, instead: Mapping[str, str], **where: Any) -> tuple[Any, Any]:
    """The configuration in a folder or on the hub, and the class that it names, or that stands `instead` of that."""
    library = transformers_library()
    try:
        config = library.AutoConfig.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        raise GTPError(f"transformers cannot open {name!r}: {first_line(error)}") from error
    named = config.architectures or []
    known = [each for each in named if hasattr(library, instead.get(each, each))]
    if not known:
        listed = ", ".join(named) or "no class"
        raise GTPError(f"the configuration of {name!r} names {listed}, which transformers {library.__version__} lacks")
    if known[0] in instead:  # the image part of a model of images and texts
        width = getattr(config, "projection_dim", None)
        config = config.vision_config
        if width is not None:
            config.projection_dim = width
    return config, getattr(library, instead.get(known[0], known[0]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and its list of weights of a text model that are not needed."""
    logging = transformers_library().logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
