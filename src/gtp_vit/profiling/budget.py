"""budget: the settings of a method that come closest to a given number of MACs."""

from __future__ import annotations

import dataclasses

from torch import nn

from gtp_vit.core.costs import Costs
from gtp_vit.core.reducer import Method
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import SettingError
from gtp_vit.methods import known_methods, method_class
from gtp_vit.patching import host_of


def method_at_macs(model: nn.Module, name: str, target: float) -> Method:
    """The named method at `target` MACs for one image, its own work and the shortened last block counted.

    >>> import timm
    >>> method_at_macs(timm.create_model("deit_tiny_patch16_224"), "evit", 0.7e9).keep_rate
    0.6015625
    """
    return method_at_cost(host_of(model).costs(), name, target)


def method_at_cost(costs: Costs, name: str, target: float) -> Method:
    """The named method at the cost nearest to `target` MACs, of a model whose parts have these costs."""
    around = costs.bracket(method_class(name), target)
    return min(around, key=lambda method: abs(costs.macs_with(method) - target))


def starting_point(method: Method | str, vit: ViTInfo) -> Method:
    """Initial settings of a method that has a schedule; at half of its strength if none was given."""
    cls = method_class(method) if isinstance(method, str) else type(method)
    if cls.schedule_field is None:
        names = ", ".join(method_type.name for method_type in known_methods().values() if method_type.schedule_field)
        raise SettingError(f"{cls.name} has no schedule that could be searched; these have: {names}")
    settings = cls() if isinstance(method, str) else method
    if getattr(settings, cls.schedule_field) != getattr(cls(), cls.schedule_field):
        return settings
    return dataclasses.replace(settings, **{cls.schedule_field: getattr(cls.at_strength(vit, 0.5), cls.schedule_field)})
