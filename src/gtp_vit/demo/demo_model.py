"""The model that the page shows: its preprocessing, classes, costs, and example pictures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gtp_vit.backbones.host import Host
from gtp_vit.core.backbone import primary_output
from gtp_vit.core.costs import Costs
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.reducer import Method
from gtp_vit.data.image_file import IMAGE_EXTENSIONS
from gtp_vit.data.preview import PreviewTransform, preview_transform
from gtp_vit.data.walk import Walk
from gtp_vit.demo.upload import read_upload
from gtp_vit.errors import GTPError, check_name, check_range
from gtp_vit.methods import known_methods, method_class
from gtp_vit.methods.identity import Identity
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.registry import select_measure
from gtp_vit.models import bundled
from gtp_vit.models.class_names import class_names
from gtp_vit.models.sources import transform_of
from gtp_vit.patching import host_of, patch
from gtp_vit.profiling.budget import method_at_cost
from gtp_vit.recipes.defaults import DEFAULT_FRACTION, DEFAULT_METHOD, default_method
from gtp_vit.recipes.provenance import Measurements, Provenance
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_EXAMPLES = 24
MIN_FRACTION, MAX_FRACTION = 0.2, 1.0  # shares of the MACs that can be asked for


class Example(NamedTuple):
    """A picture that people can start with."""

    name: str
    picture: Image


@dataclass(frozen=True, eq=False)
class DemoModel:
    """A model to look at. Everything in it is made once and only read afterwards."""

    name: str
    model: nn.Module
    host: Host
    costs: Costs
    measure: Measure
    view: PreviewTransform
    classes: list[str] | None  # names, if it scores classes and they are known
    methods: tuple[str, ...]  # those that fit it
    left_out: tuple[str, ...]  # why others do not
    examples: tuple[Example, ...]
    python: str  # the line that makes the model

    @property
    def restores_patches(self) -> bool:
        """Must reduced models give every patch a feature?"""
        return self.measure.restores or self.host.needs_all_patches is not None

    @property
    def compares_neighbours(self) -> bool:
        """Does it return one vector for an image, to be compared with others?"""
        return "neighbours" in self.measure.demo_sections


def make_demo_model(
    name: str, model: nn.Module, examples: Sequence[Example], python: str, img_size: int | None = None
) -> DemoModel:
    """A model with all that the page needs of it; raises GTPError if it cannot be shown."""
    host, measure = host_of(model), select_measure(model)
    if host.output is None:
        raise GTPError(f"{name} takes more than images; the demo shows models that take pictures alone")
    fitting, left_out = [], []
    for candidate in known_methods():
        if candidate == Identity.name:
            continue
        try:
            method_class(candidate).at_strength(host.vit, 0.5).build(host.vit)
            fitting.append(candidate)
        except GTPError as error:
            left_out.append(f"{candidate}: {error}")
    # Its own images are 28 x 28 already: nothing of them may be cut off.
    whole = 1.0 if name == bundled.NAME else None
    return DemoModel(
        name=name,
        model=model,
        host=host,
        costs=host.costs(),
        measure=measure,
        view=preview_transform(model, transform_of(name, model), img_size=img_size, crop_pct=whole),
        classes=class_names(model) if "classes" in measure.demo_sections else None,
        methods=tuple(fitting),
        left_out=tuple(left_out),
        examples=tuple(examples),
        python=python,
    )


def bundled_examples() -> list[Example]:
    """One image of each class of those in the package, and some more."""
    from PIL import Image

    images, labels = bundled.sample_images()
    first = [int((labels == label).nonzero()[0]) for label in range(len(bundled.CLASSES))]
    places = [*first, *(place for place in range(len(images)) if place not in first)][:16]
    return [Example(bundled.CLASSES[int(labels[place])], Image.fromarray(images[place].numpy())) for place in places]


def read_examples(folder: Path) -> list[Example]:
    """Pictures of a folder, spread over it; raises if there are none that can be read."""
    if not folder.is_dir():
        raise GTPError(f"--examples is {folder}; give a folder of pictures")
    walk = Walk(folder, lambda name: Path(name).suffix.lower() in IMAGE_EXTENSIONS)
    paths = [path for path in map(Path, walk.paths) if path.is_file()]
    count = min(len(paths), MAX_EXAMPLES)
    examples, problems = [], []
    for path in (paths[index * len(paths) // count] for index in range(count)):
        try:
            picture, _ = read_upload(path)
        except GTPError as error:
            problems.append(f"{path.name}: {error}")
            continue
        picture.thumbnail((512, 512))  # memory: a photo of a phone has 36 MB
        examples.append(Example(path.stem, picture))
    if not examples:
        raise GTPError(f"no picture in {folder} can be read{'; ' + problems[0] if problems else ''}; give others")
    return examples


@functools.lru_cache(maxsize=512)
def settings_at(demo_model: DemoModel, name: str, fraction: float) -> Method:
    """The named method nearest to a share of the MACs; GTP+ at its default share as `patch(model)` has it."""
    check_name("method", name, demo_model.methods)
    check_range("fraction", fraction, MIN_FRACTION, MAX_FRACTION, why="(of the unreduced model's MACs)")
    if name == DEFAULT_METHOD.name and fraction == DEFAULT_FRACTION:
        return default_method(demo_model.host)
    costs, method = demo_model.costs, method_class(name)
    ends = sorted(costs.macs_with(method.at_strength(costs.vit, strength)) for strength in (0.0, 1.0))
    return method_at_cost(costs, name, min(max(fraction * costs.unreduced, ends[0]), ends[1]))


def recipe_at(demo_model: DemoModel, name: str, fraction: float) -> Recipe:
    """Settings as a file that `patch` reads."""
    method = settings_at(demo_model, name, fraction)
    macs = demo_model.costs.macs_with(method)
    by = "gtp-vit demo: settings from a share of the MACs, without a search"
    provenance = Provenance(by=by, target={"macs": fraction})
    measured = Measurements(macs=macs, fraction=round(macs / demo_model.costs.unreduced, 4))
    return Recipe(demo_model.host.inputs.name, sizes_of_vit(demo_model.host.vit), method, provenance, measured)


def python_for(demo_model: DemoModel) -> str:
    """The lines that do the same in Python, with the recipe in a file."""
    restored = ", restore=True" if demo_model.restores_patches else ""
    return f'model = {demo_model.python}\nfast = gtp_vit.patch(model, "recipe.json"{restored})'


def patched_model(demo_model: DemoModel, method: Method) -> Any:
    """The model with a method; weights are shared."""
    return patch(demo_model.model, method, restore=demo_model.restores_patches, quiet=True)


@functools.lru_cache(maxsize=2)
def example_tensors(demo_model: DemoModel) -> Tensor:
    """The examples as the model takes them, [E, channels, height, width]."""
    return torch.stack([demo_model.view(example.picture).tensor for example in demo_model.examples])


@functools.lru_cache(maxsize=64)
def example_vectors(demo_model: DemoModel, method: Method | None) -> Tensor:
    """The model's vectors of the examples, with a method or without, [E, C]."""
    model = demo_model.model if method is None else patched_model(demo_model, method)
    with torch.inference_mode(), eval_mode(model):
        parts = example_tensors(demo_model).split(8)
        return torch.cat([primary_output(model(part), demo_model.measure.kind).float() for part in parts])
