"""The library of a model's name: by its prefix, as in hf:FOLDER_OR_NAME; other names are ours or timm's."""

from __future__ import annotations

from typing import Any

from torch import nn

from gtp_vit.backbones import BACKBONES, known_backbones
from gtp_vit.core.backbone import Library, Transform
from gtp_vit.models.bundled import BUNDLED


def libraries() -> list[Library]:
    """The libraries of all families, and the one model inside the package."""
    return list(dict.fromkeys([BUNDLED, *(family.library() for family in known_backbones().values())]))


def library_of(name: str) -> tuple[Library, str]:
    """The library that has a model, and the model's name there; timm for names that nobody knows."""
    prefix, colon, rest = name.partition(":")
    for library in libraries():
        if colon and prefix and prefix == library.prefix:
            return library, rest
    plain = [library for library in libraries() if not library.prefix]
    return next((library for library in plain if library.has_model(name)), BACKBONES["timm_vit"].library()), name


def transform_of(name: str, model: nn.Module) -> Transform | None:
    """The transform of a model, by its name; None: as its `inputs.preprocessing` says."""
    library, own_name = library_of(name)
    return library.transform(own_name, model)


def preprocessing_of(name: str) -> dict[str, Any] | None:
    """The same in timm's words; None: the model's `inputs.preprocessing`."""
    library, own_name = library_of(name)
    return library.preprocessing(own_name)


def public_name(name: str) -> str:
    """The name of a model without a folder of this machine, for files that others read."""
    library, own_name = library_of(name)
    return f"{library.prefix}:{library.public_name(own_name)}" if library.prefix else name
