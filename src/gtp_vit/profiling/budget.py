"""budget: the settings of a method that come closest to a given number of MACs."""

from __future__ import annotations

import dataclasses

from torch import nn

from gtp_vit.core.costs import Costs
from gtp_vit.core.reducer import Method, VitInfo
from gtp_vit.errors import BadSetting
from gtp_vit.methods import known_methods, method_class
from gtp_vit.patching import host_of


def at_macs(model: nn.Module, name: str, target: float) -> Method:
    """The named method at `target` MACs for one image, its own work and the shortened last block counted.

    >>> import timm
    >>> at_macs(timm.create_model("deit_tiny_patch16_224"), "evit", 0.7e9).keep_rate
    0.6015625
    """
    return at_cost(host_of(model).costs(), name, target)


def at_cost(costs: Costs, name: str, target: float) -> Method:
    """The named method at the cost nearest to `target` MACs, of a model whose parts have these costs."""
    around = costs.around(method_class(name), target)
    return min(around, key=lambda method: abs(costs.with_method(method) - target))


def starting_point(method: Method | str, vit: VitInfo) -> Method:
    """Initial settings of a method that has a schedule; at half of its strength if none was given."""
    cls = method_class(method) if isinstance(method, str) else type(method)
    if cls.schedule is None:
        names = ", ".join(each.name for each in known_methods().values() if each.schedule)
        raise BadSetting(f"{cls.name} has no schedule that could be searched; these have: {names}")
    given = cls() if isinstance(method, str) else method
    if getattr(given, cls.schedule) != getattr(cls(), cls.schedule):
        return given
    return dataclasses.replace(given, **{cls.schedule: getattr(cls.at(vit, 0.5), cls.schedule)})
