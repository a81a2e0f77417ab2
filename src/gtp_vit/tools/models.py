"""Models by name, from timm."""

from __future__ import annotations

import difflib
from contextlib import nullcontext

import torch
from torch import nn

from gtp_vit.errors import GTPError, check_name


def create_model(name: str, *, pretrained: bool = False, meta: bool = False) -> nn.Module:
    """A timm model in eval mode; `meta` makes one without weights, for counting."""
    import timm

    base = name.split(".", 1)[0]
    if ":" not in base and not timm.is_model(base):
        known = timm.list_models(module=["vision_transformer", "deit"])
        # the few nearest, so that the error does not list hundreds of names
        check_name("model", base, difflib.get_close_matches(base, known, n=5, cutoff=0.0) or known[:5])
    try:
        with torch.device("meta") if meta else nullcontext():
            return timm.create_model(name, pretrained=pretrained).eval()
    except Exception as error:  # timm, the hub and the network raise what they like
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GTPError(f"timm cannot create {name!r}: {reason[0]}") from error
