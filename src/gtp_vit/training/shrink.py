"""Reduction that grows during training: the same method, at a share of its strength."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gtp_vit.core.reducer import Method, VitInfo
from gtp_vit.errors import BadSetting
from gtp_vit.training.settings import Training

# Settings that say which share of the tokens, or of the attention map, is left.
SHARES = ("keep_rate", "keep_ratio", "attn_ratio")


def strength(epoch: float, settings: Training) -> float:
    """How strong the reduction is in this epoch, counted from 0: from 0 to 1 along half a cosine.

    >>> [round(strength(epoch, Training(shrink_start=1, shrink_epochs=4)), 2) for epoch in range(6)]
    [0.0, 0.0, 0.15, 0.5, 0.85, 1.0]
    """
    if epoch < settings.shrink_start:
        return 0.0
    if epoch >= settings.shrink_start + settings.shrink_epochs:
        return 1.0
    return 0.5 - 0.5 * math.cos(math.pi * (epoch - settings.shrink_start) / settings.shrink_epochs)


def weaker(method: Method, vit: VitInfo, share: float) -> Method:
    """The method at `share` of its strength: at 1 as it is, at 0 it removes nothing."""
    if share == 1:
        return method
    names = [field.name for field in dataclasses.fields(method)]
    if method.dial in SHARES:
        changes: dict[str, Any] = {name: 1 - share * (1 - getattr(method, name)) for name in SHARES if name in names}
    elif method.dial in ("propagate", "r"):
        value = getattr(method, method.dial)
        plan = value if isinstance(value, int) else method.build(vit).plan
        changes = {
            method.dial: round(share * plan) if isinstance(plan, int) else [round(share * n) for n in plan or ()]
        }
    else:
        raise BadSetting(
            f"{method.name} has no strength that could grow during training; leave out shrink_start and shrink_epochs"
        )
    return dataclasses.replace(method, **changes)
