"""Models by name, from timm."""

from __future__ import annotations

from torch import nn

from gtp_vit.errors import check_name


def create_model(name: str, *, pretrained: bool = False) -> nn.Module:
    """A timm model in eval mode; unknown names get close matches."""
    import timm

    base = name.split(".", 1)[0]
    if "/" not in name and not timm.is_model(base):
        known = timm.list_models(module=["vision_transformer", "deit"])
        check_name("model", base, known if len(known) < 30 else _closest(base, known))
    return timm.create_model(name, pretrained=pretrained).eval()


def _closest(name: str, known: list[str]) -> list[str]:
    """So that the error does not list hundreds of names."""
    import difflib

    return difflib.get_close_matches(name, known, n=5, cutoff=0) or known[:5]
