"""Recipes: settings for one model as JSON, with where they are from and what was measured with them.

A recipe is a file of its own, or metadata of a safetensors checkpoint. Some ship with the package, in this folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.backbones.host import Host
from gtp_vit.core.reducer import Method
from gtp_vit.core.settings import coerce_setting
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import GTPError, SettingError, check_name, short_repr
from gtp_vit.methods import known_methods, method_from_dict
from gtp_vit.recipes.provenance import Measurements, Provenance, read_part, without_defaults

FORMAT = 1
RECIPE_KEYS = ("model", "sizes", "method", "provenance", "measured")
FOLDER = Path(__file__).parent
DEPLOY = "deploy"  # names settings for engines: in them every layer that reduces costs time of its own


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
    """Settings for one model, where they are from and what was measured with them.

    >>> recipe = read_recipe("deit_tiny_patch16_224-0.65")
    >>> recipe.method.name, recipe.provenance.target
    ('gtp_plus', {'macs': 0.65})
    """

    model: str
    sizes: Sizes
    method: Method
    provenance: Provenance = Provenance()
    measured: Measurements = Measurements()

    def labelled(self, *, model: str = "", data: str = "") -> Recipe:
        """The recipe with the name of its model, and with what the images were that it was made with."""
        provenance = dataclasses.replace(self.provenance, data=data or self.provenance.data)
        return dataclasses.replace(self, model=model or self.model, provenance=provenance)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "sizes": dataclasses.asdict(self.sizes),
            "method": self.method.to_dict(),
            "provenance": without_defaults(self.provenance),
            "measured": without_defaults(self.measured),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def check(self, host: Host) -> None:
        """Raise SettingError if this recipe is for a different model."""
        own, name = sizes_of_vit(host.vit), host.inputs.name
        if own != self.sizes:
            raise SettingError(
                f"the recipe is for {self.model} ({self.sizes}), this model has {own}; run gtp-vit tune on it, or "
                "patch(model) without a recipe"
            )
        if _is_known(name) and _is_known(self.model) and name != self.model.split(".", 1)[0]:
            raise SettingError(
                f"the recipe is for {self.model}, this is {name}; run gtp-vit tune on it, or take the settings alone: "
                "patch(model, read_recipe(...).method)"
            )


def sizes_of_vit(vit: ViTInfo) -> Sizes:
    return Sizes(vit.depth, vit.dim, vit.heads, vit.grid, vit.prefix)


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a JSON file, in the metadata of a safetensors checkpoint, or of this name in the package.

    Args:
        path: a file that `gtp-vit tune` or `save_checkpoint` wrote, or the name of a recipe in the package.

    Returns:
        The recipe, whose every field was checked.

    Raises:
        GTPError: there is no such file or recipe, or it is not a recipe that this version reads.

    >>> read_recipe("deit_tiny_patch16_224-0.65").model
    'deit_tiny_patch16_224'
    """
    from gtp_vit.recipes.files import read_json

    path = Path(path)
    if not os.path.isfile(path):
        shipped = FOLDER / f"{path.name}.json"
        if len(path.parts) != 1 or not os.path.isfile(shipped):
            raise GTPError(_no_such_recipe(path))
        path = shipped
    return _with_files(recipe_from_dict(read_json(path), str(path)), path.parent)


def _no_such_recipe(path: Path) -> str:
    name = short_repr(str(path))[1:-1]
    if os.path.isdir(path) and path.name:
        return f"{name} is a folder; give the recipe file in it"
    near = difflib.get_close_matches(name, [*known_methods(), *packaged_recipes()], n=2)
    hint = f"did you mean {' or '.join(map(repr, near))}? Else " if near else ""
    return (
        f"there is no recipe {name}; {hint}give a file that gtp-vit tune wrote, one of the package's ({_by_model()}), "
        f"or a method: {', '.join(known_methods())}, {DEPLOY}, or settings like GTPPlus()"
    )


def _by_model() -> str:
    """Names of the recipes in the package, briefly: a model, and how its recipes' names go on."""
    endings: dict[str, list[str]] = {}
    for name in packaged_recipes():
        model, dash, ending = name.partition("-")
        endings.setdefault(model, []).append(dash + ending)
    return "; ".join(f"{model} with {', '.join(names)}" for model, names in endings.items())


def _with_files(recipe: Recipe, folder: Path) -> Recipe:
    """Learned parts are in files next to the recipe, which stores their names without a folder."""
    named = {
        part: folder / file
        for part in recipe.method.weight_file_fields
        if (file := getattr(recipe.method, part)) is not None
    }
    paths = {part: str(path) for part, path in named.items() if os.path.isfile(path)}
    return dataclasses.replace(recipe, method=dataclasses.replace(recipe.method, **paths))


def recipe_from_dict(stored: object, where: str) -> Recipe:
    """The recipe in a dictionary, checked; `where` is for errors."""
    if not isinstance(stored, dict) or "format" not in stored:
        raise GTPError(f"{where} is not a recipe: it names no format; make one with gtp-vit tune")
    if stored["format"] is True or stored["format"] != FORMAT:
        raise GTPError(
            f"{where} is a recipe of format {short_repr(stored['format'])}, this version reads format {FORMAT}; update "
            "gtp-vit, or tune again"
        )
    missing = [key for key in RECIPE_KEYS if key not in stored]
    if missing:
        raise GTPError(f"{where} is an incomplete recipe: it lacks {', '.join(missing)}")
    try:
        for key in stored:
            check_name("key", key, ("format", *RECIPE_KEYS))
        return Recipe(
            model=coerce_setting(Recipe, "model", stored["model"]),
            sizes=read_part(Sizes, "sizes", stored["sizes"]),
            method=method_from_dict(stored["method"]),
            provenance=read_part(Provenance, "provenance", stored["provenance"]),
            measured=read_part(Measurements, "measured", stored["measured"]),
        )
    except GTPError as error:
        raise type(error)(f"{where} is not a recipe: {error}") from error


def is_recipe(name: str) -> bool:
    """Does this name a recipe rather than a method?"""
    return name.endswith((".json", ".safetensors")) or name in packaged_recipes()


def _is_known(name: str) -> bool:
    """Is this the name of a timm architecture?"""
    import timm

    return bool(timm.is_model(name.split(".", 1)[0]))


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))
