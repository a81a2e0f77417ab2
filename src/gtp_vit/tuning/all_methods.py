"""A schedule for every method that has one, searched alike, to tell a method from its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gtp_vit.core.costs import Costs
from gtp_vit.errors import SettingError
from gtp_vit.methods import known_methods, method_class
from gtp_vit.metrics.base import Measure
from gtp_vit.patching import host_of
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.tuning.settings import SearchConfig, Target, Tracking
from gtp_vit.tuning.tune import tune


def tunable_methods(methods: Sequence[str]) -> list[str]:
    """The methods among these, () = all, with a schedule that can be searched."""
    return [name for name in methods or known_methods() if method_class(name).schedule_field is not None]


def tune_all_methods(
    model: nn.Module,
    images: Tensor,
    methods: Sequence[str],
    budgets: Sequence[float],
    *,
    measure: str | Measure = "auto",
    search: SearchConfig = SearchConfig(),  # noqa: B008  it is frozen, as is the other
    tracking: Tracking = Tracking(),  # noqa: B008
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Recipe], list[str]]:
    """A recipe of each method at each budget, and which were left out and why.

    All are searched on the same images in the same order, with as many passes over them and the same seed. A search
    begins at the method's published shape and at the same hand-made ones, and keeps the best: so a tuned schedule does
    not do more damage than the published one on these images.

    Args:
        model: the unreduced model.
        images: to tune on, which must not be those that are compared.
        methods: names of methods with a schedule.
        budgets: MACs for one image.
        measure: how outputs are compared.
        search: as for `tune`.
        tracking: as for `tune`.
        progress: called with the number of recipes that are done, and of all.
    """
    costs: Costs = host_of(model).costs()
    recipes: list[Recipe] = []
    left_out: list[str] = []
    pairs = [(name, budget) for budget in budgets for name in methods]
    for number, (name, budget) in enumerate(pairs):
        if progress is not None:
            progress(number, len(pairs))
        try:
            target = Target("macs", budget / costs.unreduced, measure)
            recipe = tune(model, images, target, method=name, search=search, tracking=tracking)
        except SettingError as error:
            left_out.append(f"{name}, tuned, at {budget / 1e9:.3f} GMACs: {error}")
            continue
        if recipe.provenance.interrupted:  # its search was shorter than the others': nothing to compare
            raise KeyboardInterrupt
        recipes.append(recipe)
    if progress is not None:
        progress(len(pairs), len(pairs))
    return recipes, left_out
