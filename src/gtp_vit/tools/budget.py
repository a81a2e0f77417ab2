"""budget: the setting of a method that comes closest to a given number of MACs.

Each method has one setting that says how much is removed (`Method.dial`): a number of tokens a layer, or a share that
is kept. Numbers of tokens are spread over the layers so that the target is met to a fraction of a percent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from gtp_vit.core.reducer import Method, VitInfo
from gtp_vit.core.space import Limits, Space
from gtp_vit.errors import BadSetting, GTPError, check_name
from gtp_vit.methods import METHODS
from gtp_vit.methods.ats import ATS
from gtp_vit.methods.diffrate import DiffRate
from gtp_vit.methods.gtp_plus import GTPPlus
from gtp_vit.methods.ppt import PPT
from gtp_vit.patch import host_of, unpatch
from gtp_vit.tools.macs import macs

FINEST = 1 / 512  # of the search over shares


def at_macs(model: nn.Module, name: str, target: float) -> Method:
    """The named method at `target` MACs for one image, its own work and the shortened last block counted.

    >>> import timm
    >>> at_macs(timm.create_model("deit_tiny_patch16_224"), "evit", 0.7e9).keep_rate
    0.6015625
    """
    check_name("method", name, METHODS)
    plain = unpatch(model)
    host = host_of(plain)
    vit = host.vit
    if name == GTPPlus.name:  # it has a schedule of its own shape
        return Space(host.costs(), GTPPlus.for_model(vit), Limits()).scaled(target)
    choices = _choices(name, vit)

    def cost(index: int) -> float:
        return macs(plain, choices[index], lossless=True).total

    low, high = 0, len(choices) - 1  # the first removes nothing, the last most
    cheapest, dearest = cost(high), cost(low)
    if not cheapest <= target <= dearest * 1.0001:
        raise BadSetting(
            f"{name} reaches {cheapest / 1e9:.3f} to {dearest / 1e9:.3f} GMACs on this model, not {target / 1e9:.3f}"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return choices[min((low, high), key=lambda index: abs(cost(index) - target))]


def _choices(name: str, vit: VitInfo) -> Sequence[Method]:
    """Settings from nothing removed to most removed."""
    cls: Any = METHODS[name]
    if cls is PPT:
        return [PPT(r=r) for r in range(vit.image_tokens // 2)]
    if cls is DiffRate:
        # merged and dropped ones in the proportions of the default
        most = int(16 * (vit.image_tokens - 1) / vit.depth)
        return [DiffRate(prune=f"middle:{step * 3 / 128}", merge=f"middle:{step * 5 / 128}") for step in range(most)]
    shares = [1 - step * FINEST for step in range(int(1 / FINEST))]
    if cls is ATS:
        layers = ":".join(str(layer) for layer in range(vit.depth // 4, vit.depth))
        return [ATS(budget=f"keep:{share}:{layers}") for share in shares]
    if cls.dial in ("keep_rate", "keep_ratio"):
        return [cls(**{cls.dial: share}) for share in shares]
    if cls.dial in ("propagate", "r"):
        most = (vit.image_tokens - 1) // vit.depth * vit.depth
        return [cls(**{cls.dial: spread(total, vit.depth)}) for total in range(most + 1)]
    raise GTPError(f"{name} has no setting that says how much is removed")


def starting_point(method: Method | str, vit: VitInfo) -> Method:
    """Settings to begin with, of a method that has a schedule; where none was given, half of the tokens removed."""
    cls = METHODS[check_name("method", method, METHODS)] if isinstance(method, str) else type(method)
    # PPT's r is what it removes in each of its layers, not a number for every layer.
    scheduled = [each for each in METHODS.values() if each.dial in ("propagate", "r") and each is not PPT]
    if cls not in scheduled:
        names = ", ".join(each.name for each in scheduled)
        raise BadSetting(f"{cls.name} has no schedule that could be searched; these have: {names}")
    given = cls() if isinstance(method, str) else method
    if getattr(given, cls.dial) != getattr(cls(), cls.dial):
        return given
    half: Any = GTPPlus.for_model(vit).propagate if cls is GTPPlus else spread(vit.image_tokens // 2, vit.depth)
    return dataclasses.replace(given, **{cls.dial: half})


def spread(total: int, depth: int) -> tuple[int, ...] | int:
    """So many tokens over all layers, as evenly as can be, the first layers taking what is left over.

    >>> spread(26, 12)
    (3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)
    >>> spread(24, 12)
    2
    """
    each, rest = divmod(total, depth)
    return tuple(each + (layer < rest) for layer in range(depth)) if rest else each
