"""The registry of methods: a new one is a file in this folder and a line here, or an entry point of another package."""

from __future__ import annotations

import dataclasses
from typing import Any

from gtp_vit.core.reducer import Method
from gtp_vit.errors import SettingError, check_name, short_repr
from gtp_vit.methods.atc import ATC
from gtp_vit.methods.ats import ATS
from gtp_vit.methods.diffrate import DiffRate
from gtp_vit.methods.dynamicvit import DynamicViT
from gtp_vit.methods.evit import EViT
from gtp_vit.methods.evovit import EvoViT
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.gtp_plus.method import GTPPlus
from gtp_vit.methods.identity import Identity
from gtp_vit.methods.mctf import MCTF
from gtp_vit.methods.pitome import PiToMe
from gtp_vit.methods.ppt import PPT
from gtp_vit.methods.tofu import ToFu
from gtp_vit.methods.tome import ToMe
from gtp_vit.methods.trilevel import TriLevel

METHODS: dict[str, type[Method]] = {
    GTP.name: GTP,
    GTPPlus.name: GTPPlus,
    ToMe.name: ToMe,
    EViT.name: EViT,
    DynamicViT.name: DynamicViT,
    EvoViT.name: EvoViT,
    ATS.name: ATS,
    TriLevel.name: TriLevel,
    PPT.name: PPT,
    DiffRate.name: DiffRate,
    MCTF.name: MCTF,
    PiToMe.name: PiToMe,
    ToFu.name: ToFu,
    ATC.name: ATC,
    Identity.name: Identity,
}


def known_methods() -> dict[str, type[Method]]:
    """METHODS, after those of other packages (entry points in the group gtp_vit.methods) were added to it."""
    from gtp_vit.plugins import plugins

    METHODS.update(plugins("gtp_vit.methods", Method, METHODS))
    return METHODS


def is_method(name: str) -> bool:
    """Is there a method of this name, here or in another package?"""
    return name in METHODS or name in known_methods()


def method_class(name: str) -> type[Method]:
    """The class of a method, by its registry name."""
    return METHODS[name if is_method(name) else check_name("method", name, METHODS)]


def make_method(name: str, **settings: Any) -> Method:
    """A method by its registry name.

    Args:
        name: of a method, such as "gtp_plus"; `gtp-vit methods` lists them.
        **settings: of the method; the others have their defaults.

    Returns:
        The settings.

    Raises:
        UnknownNameError: there is no method of this name.
        SettingError: a setting is unknown, or its value is not allowed.

    >>> make_method("gtp", propagate=4).propagate
    4
    """
    method = method_class(name)
    fields = [field.name for field in dataclasses.fields(method)]
    for setting in settings:
        check_name(f"setting of {name}", setting, fields)
    return method(**settings)


def method_from_dict(stored: object) -> Method:
    """The inverse of `Method.to_dict`, for settings read back from a results file.

    Args:
        stored: the dictionary, with the method's name under "method".

    Returns:
        The settings.

    Raises:
        SettingError: it is not a dictionary, or a setting is unknown or not allowed.
        UnknownNameError: there is no method of this name.

    >>> from gtp_vit import ToMe
    >>> method_from_dict(ToMe(r=4).to_dict())
    ToMe(r=4)
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("method"), str):
        raise SettingError(f"a method is stored as {short_repr(stored)}; it must be a dictionary that names its method")
    settings = {str(key): value for key, value in stored.items()}
    return make_method(settings.pop("method"), **settings)
