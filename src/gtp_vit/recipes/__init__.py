"""Recipes: settings for one model as JSON, with how they were found and what they measured.

A recipe is a file of its own, or metadata of a safetensors checkpoint. Some ship with the package, in this folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.backbones.host import Host
from gtp_vit.core.reducer import Method
from gtp_vit.core.schedule import whole_tokens
from gtp_vit.core.settings import checked
from gtp_vit.core.vit import VitInfo
from gtp_vit.errors import BadSetting, GTPError, check_name, shown
from gtp_vit.methods import is_method, known_methods, method_class, method_from_dict
from gtp_vit.methods.gtp_plus.method import GTPPlus
from gtp_vit.recipes.files import BESIDE as BESIDE
from gtp_vit.recipes.files import METADATA as METADATA
from gtp_vit.recipes.files import is_file, is_folder, read_json

FORMAT = 1
KEYS = ("model", "sizes", "method", "found", "measured")
FOLDER = Path(__file__).parent
DEFAULT: type[Method] = GTPPlus
DEFAULT_SHARE = 0.65
DEPLOY = "deploy"  # names settings for engines: in them every layer that reduces costs time of its own
DEPLOY_LAYERS, DEPLOY_MULTIPLE = 3, 8


@dataclass(frozen=True)
class Sizes:
    """Sizes that a model must share with the one a recipe was made for."""

    layers: int
    channels: int
    heads: int
    grid: tuple[int, int]
    prefix_tokens: int

    def __str__(self) -> str:
        rows, columns = self.grid
        return f"{self.layers} layers of {self.channels} channels, {self.heads} heads, {rows} x {columns} patches"


@dataclass(frozen=True)
class Recipe:
    """Settings for one model, how they were found and what they measured."""

    model: str
    sizes: Sizes
    method: Method
    found: dict[str, Any]  # target, images, seed, evaluations, versions
    measured: dict[str, Any]  # macs, share of the unreduced model's, kl and agreement on which images

    def to_dict(self) -> dict[str, object]:
        from gtp_vit.jsonable import jsonable

        return {
            "format": FORMAT,
            "model": self.model,
            "sizes": dataclasses.asdict(self.sizes),
            "method": self.method.to_dict(),
            "found": jsonable(self.found),
            "measured": jsonable(self.measured),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def check(self, host: Host) -> None:
        """Raise BadSetting if this recipe is for a different model."""
        own, name = sizes_of_vit(host.vit), host.inputs.name
        if own != self.sizes:
            raise BadSetting(
                f"the recipe is for {self.model} ({self.sizes}), this model has {own}; run gtp-vit tune on it, or "
                "patch(model) without a recipe"
            )
        if _is_known(name) and _is_known(self.model) and name != self.model.split(".", 1)[0]:
            raise BadSetting(
                f"the recipe is for {self.model}, this is {name}; run gtp-vit tune on it, or take the settings alone: "
                "patch(model, read_recipe(...).method)"
            )


def sizes_of_vit(vit: VitInfo) -> Sizes:
    return Sizes(vit.depth, vit.dim, vit.heads, vit.grid, vit.prefix)


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a JSON file, in the metadata of a safetensors checkpoint, or of this name in the package."""
    path = Path(path)
    if not is_file(path):
        shipped = FOLDER / f"{path.name}.json"
        if len(path.parts) != 1 or not is_file(shipped):
            raise GTPError(_no_such_recipe(path))
        path = shipped
    return _with_files(recipe_from_dict(read_json(path), str(path)), path.parent)


def _no_such_recipe(path: Path) -> str:
    name = shown(str(path))[1:-1]
    if is_folder(path) and path.name:
        return f"{name} is a folder; give the recipe file in it"
    near = difflib.get_close_matches(name, [*known_methods(), *shipped_recipes()], n=2)
    hint = f"did you mean {' or '.join(map(repr, near))}? Else " if near else ""
    return (
        f"there is no recipe {name}; {hint}give a file that gtp-vit tune wrote, one of the package's ({_by_model()}), "
        f"or a method: {', '.join(known_methods())}, {DEPLOY}, or settings like GTPPlus()"
    )


def _by_model() -> str:
    """Names of the recipes in the package, briefly: a model, and how its recipes' names go on."""
    endings: dict[str, list[str]] = {}
    for name in shipped_recipes():
        model, dash, ending = name.partition("-")
        endings.setdefault(model, []).append(dash + ending)
    return "; ".join(f"{model} with {', '.join(each)}" for model, each in endings.items())


def _with_files(recipe: Recipe, folder: Path) -> Recipe:
    """Learned parts are in files next to the recipe, which stores their names without a folder."""
    named = {part: folder / file for part in recipe.method.files if (file := getattr(recipe.method, part)) is not None}
    found = {part: str(path) for part, path in named.items() if is_file(path)}
    return dataclasses.replace(recipe, method=dataclasses.replace(recipe.method, **found))


def recipe_from_dict(stored: object, where: str) -> Recipe:
    """The recipe in a dictionary, checked; `where` is for errors."""
    if not isinstance(stored, dict) or "format" not in stored:
        raise GTPError(f"{where} is no recipe: it names no format; make one with gtp-vit tune")
    if stored["format"] is True or stored["format"] != FORMAT:
        raise GTPError(
            f"{where} is a recipe of format {shown(stored['format'])}, this version reads format {FORMAT}; update "
            "gtp-vit, or tune again"
        )
    missing = [key for key in KEYS if key not in stored]
    if missing:
        raise GTPError(f"{where} is no whole recipe: it lacks {', '.join(missing)}")
    try:
        for key in stored:
            check_name("key", key, ("format", *KEYS))
        return Recipe(
            model=checked(Recipe, "model", stored["model"]),
            sizes=_sizes(stored["sizes"]),
            method=method_from_dict(stored["method"]),
            found=_dictionary("found", stored["found"]),
            measured=_dictionary("measured", stored["measured"]),
        )
    except GTPError as error:
        raise type(error)(f"{where} is no recipe: {error}") from error


def _dictionary(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSetting(f"{name} is {shown(value)}; it must be a dictionary")
    return value


def _sizes(stored: object) -> Sizes:
    names = [field.name for field in dataclasses.fields(Sizes)]
    sizes = _dictionary("sizes", stored)
    for name in sizes:
        check_name("size", name, names)
    lacking = [name for name in names if name not in sizes]
    if lacking:
        raise BadSetting(f"its sizes lack {', '.join(lacking)}")
    return Sizes(**{name: checked(Sizes, name, sizes[name]) for name in names})


def is_recipe(name: str) -> bool:
    """Does this name a recipe rather than a method?"""
    return name.endswith((".json", ".safetensors")) or name in shipped_recipes()


def default_method(host: Host) -> Method:
    """GTP+ at DEFAULT_SHARE of the MACs: what `patch` uses without a method and for "gtp_plus".

    The package's own recipe for this model if there is one, else a schedule of the shape that did well on all models
    that were measured.
    """
    shipped = _shipped(host, "")
    if shipped is not None:
        return shipped.method
    costs = host.costs()
    unreduced = costs.with_method(DEFAULT.at(host.vit, 0))  # the shortened last block may be enough for a small model
    return costs.around(DEFAULT, min(DEFAULT_SHARE * costs.whole, unreduced))[1]


def deploy_method(host: Host) -> Method:
    """GTP+ at DEFAULT_SHARE of the MACs for engines: few layers reduce, and numbers of tokens are multiples of eight.

    The package's own recipe for this model if there is one, else three layers from a third of the depth on, where the
    searches for those recipes put them.
    """
    shipped = _shipped(host, f"-{DEPLOY}")
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
        method = GTPPlus(propagate=tuple(whole_tokens(plan, vit.image_tokens, fewest, aligned)))
        if costs.with_method(method) <= DEFAULT_SHARE * costs.whole:
            return method
    return default_method(host)


def _shipped(host: Host, ending: str) -> Recipe | None:
    """The package's recipe for this model at DEFAULT_SHARE, with this ending of its name; None if there is none."""
    name = f"{host.inputs.name}{ending}" if ending else f"{host.inputs.name}-{DEFAULT_SHARE}"
    if name not in shipped_recipes():
        return None
    recipe = read_recipe(name)
    if recipe.sizes != sizes_of_vit(host.vit):
        return None
    try:
        recipe.method.check_weights(host.matrices)
    except BadSetting:  # other weights than those it was learned on
        return None
    return recipe


def given(source: object) -> Recipe | None:
    """The recipe that `source` is, or names; None if it is something else."""
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and source != DEPLOY and not is_method(source)):
        return read_recipe(source)
    return None


def resolve(source: object, host: Host) -> Any:
    """The settings that `source` names: a recipe, its file or name, or a method's name; others are returned unchanged.

    The name of a method means its defaults. Those of GTP+ depend on the model: the 8 tokens a layer of its class are
    nearly all that a ViT-L has.
    """
    name = DEFAULT.name if source is None else source if isinstance(source, str) else ""
    if name == DEPLOY:
        return deploy_method(host)
    if name and is_method(name):
        return default_method(host) if name == DEFAULT.name else method_class(name)()
    recipe = given(source)
    if recipe is None:
        return source
    recipe.check(host)
    return recipe.method


def _is_known(name: str) -> bool:
    """Is this the name of a timm architecture?"""
    import timm

    return bool(timm.is_model(name.split(".", 1)[0]))


def shipped_recipes() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))
