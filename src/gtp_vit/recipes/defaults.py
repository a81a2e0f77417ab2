"""The settings that a name, a recipe or nothing stands for: the defaults of a model need its MACs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtp_vit.backbones.host import Host
from gtp_vit.core.reducer import Method
from gtp_vit.core.schedule import round_schedule
from gtp_vit.errors import SettingError
from gtp_vit.methods import is_method, method_class
from gtp_vit.methods.gtp_plus.method import GTPPlus
from gtp_vit.recipes.recipe import DEPLOY, Recipe, packaged_recipes, read_recipe, sizes_of_vit

DEFAULT_METHOD: type[Method] = GTPPlus
DEFAULT_FRACTION = 0.65
DEPLOY_LAYERS, DEPLOY_MULTIPLE = 3, 8


def default_method(host: Host) -> Method:
    """GTP+ at DEFAULT_FRACTION of the MACs: what `patch` uses without a method and for "gtp_plus".

    The package's own recipe for this model if there is one, else a schedule of the shape that did well on all models
    that were measured.
    """
    shipped = _packaged_recipe(host, "")
    if shipped is not None:
        return shipped.method
    costs = host.costs()
    # Of a small model the shortened last block may be enough.
    unreduced = costs.macs_with(DEFAULT_METHOD.at_strength(host.vit, 0))
    return costs.bracket(DEFAULT_METHOD, min(DEFAULT_FRACTION * costs.unreduced, unreduced))[1]


def deploy_method(host: Host) -> Method:
    """GTP+ at DEFAULT_FRACTION of the MACs for engines: few layers reduce, and numbers of tokens are multiples of
    eight.

    The package's own recipe for this model if there is one, else three layers from a third of the depth on, where the
    searches for those recipes put them.
    """
    shipped = _packaged_recipe(host, f"-{DEPLOY}")
    if shipped is not None:
        return shipped.method
    vit, costs = host.vit, host.costs()
    used = range(vit.depth // 3, min(vit.depth // 3 + DEPLOY_LAYERS, vit.depth - (not vit.head_reads_image_tokens)))
    fewest = (vit.prefix // DEPLOY_MULTIPLE + 1) * DEPLOY_MULTIPLE - vit.prefix
    if not used or vit.image_tokens < 2 * DEPLOY_MULTIPLE:
        return default_method(host)

    def aligned(left: int) -> int:
        return round((left + vit.prefix) / DEPLOY_MULTIPLE) * DEPLOY_MULTIPLE - vit.prefix

    for total in range(len(used), vit.image_tokens):  # from few to many: the first that is cheap enough
        plan = [total / len(used) if layer in used else 0.0 for layer in range(vit.depth)]
        method = GTPPlus(remove=tuple(round_schedule(plan, vit.image_tokens, fewest, aligned)))
        if costs.macs_with(method) <= DEFAULT_FRACTION * costs.unreduced:
            return method
    return default_method(host)


def _packaged_recipe(host: Host, ending: str) -> Recipe | None:
    """The package's recipe for this model at DEFAULT_FRACTION, with this ending of its name; None if there is none."""
    name = f"{host.inputs.name}{ending}" if ending else f"{host.inputs.name}-{DEFAULT_FRACTION}"
    if name not in packaged_recipes():
        return None
    recipe = read_recipe(name)
    if recipe.sizes != sizes_of_vit(host.vit):
        return None
    try:
        recipe.method.check_weights(host.block_weights)
    except SettingError:  # other weights than those it was learned on
        return None
    return recipe


def as_recipe(source: Any) -> Recipe | None:
    """The recipe that `source` is, or names; None if it is something else."""
    if isinstance(source, Recipe):
        return source
    names_one = isinstance(source, Path) or (isinstance(source, str) and source != DEPLOY and not is_method(source))
    return read_recipe(source) if names_one else None


def resolve(source: Any, host: Host) -> Any:
    """The settings that `source` names: a recipe, its file or name, or a method's name; others are returned unchanged.

    The name of a method means its defaults. Those of GTP+ depend on the model: the 8 tokens per layer of its class are
    nearly all that a ViT-L has.
    """
    name = DEFAULT_METHOD.name if source is None else source if isinstance(source, str) else ""
    if name == DEPLOY:
        return deploy_method(host)
    if name and is_method(name):
        return default_method(host) if name == DEFAULT_METHOD.name else method_class(name)()
    recipe = as_recipe(source)
    if recipe is None:
        return source
    recipe.check(host)
    return recipe.method
