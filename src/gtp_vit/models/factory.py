"""Models by name: timm's, our own networks that timm does not have, and those of other libraries with a prefix."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from gtp_vit.backbones import known_backbones
from gtp_vit.backbones.host import find_vit
from gtp_vit.errors import (
    GTPError,
    SettingError,
    UnknownNameError,
    UnsupportedModelError,
    check_range,
    first_line,
    short_repr,
)
from gtp_vit.models import bundled
from gtp_vit.models.sources import libraries, library_of
from gtp_vit.recipes.files import RECIPE_FILENAME

MAX_SIDE = 8192  # height and width of images: a quarter of a million patches of 16 x 16


def names(pattern: str) -> Iterator[str]:
    """Names of models that can perhaps be patched, of all libraries, that match a pattern with * and ?.

    They come one by one, as listing those of a library takes a second.
    """
    for prefix in dict.fromkeys(library.prefix for library in libraries()):
        yield from (name for name in _names(prefix) if fnmatch.fnmatch(name, pattern))


def _names(prefix: str) -> Iterator[str]:
    """Names with this prefix of models of all families."""
    listed = set() if prefix else {bundled.NAME}
    yield from listed
    for family in known_backbones().values():
        if family.library().prefix == prefix:
            # A library that is not installed has no models here.
            with contextlib.suppress(GTPError, ImportError):
                for own_name in family.model_names():
                    name = f"{prefix}:{own_name}" if prefix else own_name
                    if name not in listed:
                        listed.add(name)
                        yield name


@functools.cache
def unsupported_reason(name: str) -> str | None:
    """Why `patch` refuses this model, None if it takes it: the model is built without weights and checked."""
    library, own_name = library_of(name)
    try:
        _check_takes_images_only(library.create_without_weights(own_name), name)
    except Exception as error:  # libraries raise errors of many classes
        return first_line(error)
    return None


def require_known_model(name: str) -> None:
    """Raise UnknownNameError with the nearest names if no model has this name."""
    library, own_name = library_of(name)
    if not own_name:
        raise UnknownNameError(f"{short_repr(name)} has no model name after the colon; give one")
    if not library.has_model(own_name):
        every = f"gtp-vit models '{library.prefix}:*'" if library.prefix else "gtp-vit models"
        name = name if library.prefix else name.split(".", 1)[0]
        raise UnknownNameError(
            f"unknown model {short_repr(name)}; the nearest are {', '.join(suggest_names(name, 5, cutoff=0.0))}; "
            f"{every} lists all"
        )


def suggest_names(name: str, count: int, cutoff: float = 0.6) -> list[str]:
    """The most similar names of models of the same library that `patch` takes."""
    candidates = list(_names(library_of(name)[0].prefix))
    near = difflib.get_close_matches(name[:100], candidates, n=3 * count, cutoff=cutoff)
    return list(itertools.islice((candidate for candidate in near if unsupported_reason(candidate) is None), count))


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    img_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    resample_positions: bool = False,
    meta: bool = False,
) -> nn.Module:
    """A model in eval mode, by name.

    Args:
        name: timm's name, or one of lvvit_t, lvvit_s, lvvit_m, lvvit_l, or fashion_vit, the small one in the package;
            or hf:FOLDER_OR_NAME, open_clip:NAME/TAG (its image tower), torchvision:NAME.
        pretrained: load pre-trained weights; Hugging Face's models always have theirs.
        checkpoint: load the weights of this file, safetensors or torch's own format; no code in it is run.
        img_size: height and width of the images, if different from the model's own.
        num_classes: how many classes the model has, if different from its own number.
        resample_positions: the checkpoint is of the model's own size; resample its positions to img_size, as timm does.
        meta: without weights, for counting.

    Returns:
        The model in eval mode, on the CPU; with `meta` on the meta device.

    Raises:
        UnknownNameError: there is no model of this name; the message suggests similar ones.
        GTPError: the checkpoint does not fit the model, or its library is not installed.

    >>> sum(p.numel() for p in create_model("lvvit_s", meta=True).parameters())
    26151824
    """
    if meta and (pretrained or checkpoint is not None):
        raise GTPError("a model on the meta device has no weights; remove pretrained and checkpoint")
    require_known_model(name)
    for side in () if img_size is None else img_size if isinstance(img_size, tuple) else (img_size,):
        check_range("img_size", side, 1, MAX_SIDE, integer=True, why="(pixels, height and width)")
    if num_classes is not None:
        check_range("num_classes", num_classes, 0, 10**6, integer=True)
    asked = {"img_size": img_size, "num_classes": num_classes}
    sizes = {key: value for key, value in asked.items() if value is not None}
    library, own_name = library_of(name)
    if library.prefix and (Path(own_name) / RECIPE_FILENAME).is_file():
        warnings.warn(
            f"{RECIPE_FILENAME} in this folder is not used by itself; give --method {own_name}/{RECIPE_FILENAME}",
            stacklevel=2,
        )
    file = None if checkpoint is None else Path(checkpoint)
    new_size = img_size if resample_positions else None
    if resample_positions and (file is None or sizes.pop("img_size", None) is None):
        raise SettingError("resample_positions is for a checkpoint at another size; give checkpoint and img_size, too")
    model = library.create(own_name, pretrained=pretrained, checkpoint=file, meta=meta, sizes=sizes)
    if new_size is not None:
        library.resize(model, new_size)
    if library.prefix:
        _check_takes_images_only(model, name)
    _check_patches(model, name, img_size)
    return model


def _check_takes_images_only(model: nn.Module, name: str) -> None:
    """Refuse a model that takes more than images, which are all that commands can give it."""
    if find_vit(model).output is None:
        raise UnsupportedModelError(f"{name} takes more than images; patch it in Python: gtp_vit.patch(model)")


def has_own_weights(name: str) -> bool:
    """Does a name mean weights as well?"""
    return library_of(name)[0].has_weights


def _check_patches(model: nn.Module, name: str, img_size: int | tuple[int, int] | None) -> None:
    """A size that was asked for must be a whole number of patches: libraries would silently leave out the rest."""
    if img_size is None:
        return
    try:
        inputs = find_vit(model).inputs
    except UnsupportedModelError:  # patch says why
        return
    own_size = (inputs.preprocessing or {}).get("input_size") or (0,)
    sides = img_size if isinstance(img_size, tuple) else (img_size, img_size)
    for side, width in zip(sides, inputs.patch, strict=True):
        if side % width and img_size != own_size[-1]:
            whole = dict.fromkeys(str(max(count, 1) * width) for count in (side // width, side // width + 1))
            raise SettingError(
                f"img_size is {side}, and the patches of {name} are {width} wide; give a multiple, e.g. "
                f"{' or '.join(whole)}"
            )
