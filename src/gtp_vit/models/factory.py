"""Models by name: timm's, our own networks that timm does not have, and those of other libraries with a prefix."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gtp_vit.backbones import lvvit_network
from gtp_vit.backbones.host import find
from gtp_vit.errors import BadSetting, GTPError, UnknownName, UnsupportedBackbone, check_range, first_line, shown
from gtp_vit.models import bundled, sources
from gtp_vit.weights import load_weights

LARGEST_SIDE = 8192  # height and width of images: a quarter of a million patches of 16 x 16


def _own() -> list[str]:
    return [bundled.NAME, *lvvit_network.SIZES]


def names(pattern: str) -> list[str]:
    """Names of models that can perhaps be patched, of all libraries, that match a pattern with * and ?."""
    return fnmatch.filter([*_of_timm_and_own(), *sources.listed()], pattern)


def _of_timm_and_own() -> list[str]:
    import timm

    modules = ["vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid"]
    return [*_own(), *timm.list_models(module=modules)]


@functools.cache
def refusal(name: str) -> str | None:
    """Why `patch` refuses this model, None if it takes it: the model is built without weights and checked.

    One block is enough, as timm makes all blocks of such a model alike; that is about 15 times as fast.
    """
    import timm

    if name in _own():
        return None
    found = sources.library_of(name)
    try:
        if found is not None:
            _create_in(found, name, meta=True)
            return None
        with torch.device("meta"):
            try:
                model = timm.create_model(name, depth=1)
            except (TypeError, AssertionError):  # an entry point that sets its depth itself, or one for each block
                model = timm.create_model(name)
        find(model)
    except Exception as error:  # timm raises errors of many classes
        return first_line(error)
    return None


def check_model_name(name: str) -> None:
    """Raise UnknownName with the nearest names if no model has this name."""
    found = sources.library_of(name)
    if found is not None:
        found[0].check_name(found[1])
        return
    base = name.split(".", 1)[0]
    if name in _own() or ":" in base:  # timm's prefixes: hf-hub:, local-dir:
        return
    import timm

    if name.startswith("lvvit") or not timm.is_model(base):
        near = ", ".join(nearest(base, 5, cutoff=0.0))
        raise UnknownName(f"unknown model {shown(base)}; the nearest are {near}; gtp-vit models lists all")


def nearest(name: str, count: int, cutoff: float = 0.6) -> list[str]:
    """The most similar names of models that `patch` takes."""
    near = difflib.get_close_matches(name[:100], _of_timm_and_own(), n=3 * count, cutoff=cutoff)
    return list(itertools.islice((each for each in near if refusal(each) is None), count))


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    img_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
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
        meta: without weights, for counting.

    >>> sum(p.numel() for p in create_model("lvvit_s", meta=True).parameters())
    26151824
    """
    if meta and (pretrained or checkpoint is not None):
        raise GTPError("a model on the meta device has no weights; leave out pretrained and checkpoint")
    check_model_name(name)
    for side in () if img_size is None else img_size if isinstance(img_size, tuple) else (img_size,):
        check_range("img_size", side, 1, LARGEST_SIDE, whole=True, why="(pixels, height and width)")
    if num_classes is not None:
        check_range("num_classes", num_classes, 0, 10**6, whole=True)
    wanted = {"img_size": img_size, "num_classes": num_classes}
    sizes = {key: value for key, value in wanted.items() if value is not None}
    library = sources.library_of(name)
    if library is not None:
        return _create_in(library, name, pretrained, None if checkpoint is None else Path(checkpoint), meta, sizes)
    if name == bundled.NAME:
        if sizes:
            raise GTPError(f"{name} has its own size and classes; leave out {' and '.join(sizes)}")
        model = bundled.create(pretrained=checkpoint is None, meta=meta)
        if checkpoint is not None:
            load_weights(model, Path(checkpoint), name)
        return model
    if name.startswith("lvvit"):
        if pretrained:
            raise GTPError(f"pre-trained weights of {name} are not in timm; download them and give their file")
        if num_classes == 0:
            raise GTPError(f"{name} needs classes, as both of its heads are read; leave out num_classes=0")
        with torch.device("meta") if meta else nullcontext():
            return lvvit_network.create(name, checkpoint_path=checkpoint, **sizes)
    import timm

    try:
        with torch.device("meta") if meta else nullcontext():
            model = timm.create_model(name, pretrained=pretrained and checkpoint is None, **sizes).eval()
    except Exception as error:  # timm, the hub and the network raise errors of many classes
        raise GTPError(f"timm cannot create {name!r}: {first_line(error)}") from error
    _check_patches(model, name, img_size)
    if checkpoint is not None:
        load_weights(model, Path(checkpoint), name)
    return model


def _create_in(
    found: tuple[Any, str],
    name: str,
    pretrained: bool = False,
    checkpoint: Path | None = None,
    meta: bool = False,
    sizes: dict[str, Any] | None = None,
) -> nn.Module:
    """A model of another library, of which the image part was asked for."""
    library, rest = found
    if not rest:
        raise UnknownName(f"{shown(name)} names no model; give one behind the colon")
    model = library.create(rest, pretrained=pretrained, checkpoint=checkpoint, meta=meta, sizes=sizes or {})
    host = find(model)
    if host.output is None:
        raise UnsupportedBackbone(f"{name} takes more than images; patch it in Python: gtp_vit.patch(model)")
    return model


def has_own_weights(name: str) -> bool:
    """Does a name mean weights as well?"""
    found = sources.library_of(name)
    return name == bundled.NAME or (found is not None and found[0].has_weights)


def _check_patches(model: nn.Module, name: str, img_size: int | tuple[int, int] | None) -> None:
    """A size that was asked for must be a whole number of patches: timm would silently leave out the rest."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if img_size is None or (config is not None and img_size == config.input_size[-1]):
        return
    try:
        patches = find(model).inputs.patch
    except UnsupportedBackbone:  # patch says why
        return
    sides = img_size if isinstance(img_size, tuple) else (img_size, img_size)
    for side, width in zip(sides, patches, strict=True):
        if side % width:
            whole = dict.fromkeys(str(max(count, 1) * width) for count in (side // width, side // width + 1))
            raise BadSetting(
                f"img_size is {side}, and the patches of {name} are {width} wide; give a multiple, e.g. "
                f"{' or '.join(whole)}"
            )
