"""The interface of a measure: the distance between a reduced model's outputs and the unreduced one's.

Each kind of output has a measure of its own (registry.py lists them). A measure stores a few numbers for each image and
model, as arrays that fit into a journal, and makes figures of them when all images are done: some, such as nearest
neighbours, need them all.

Shapes: B batch, I images.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Output, primary_output
from gtp_vit.errors import GTPError, SettingError
from gtp_vit.metrics.input_checks import check_finite

UNREDUCED = "unreduced"
Array = npt.NDArray[Any]
Arrays = dict[str, Array]  # a row for each image
Stored = str | float | None  # of one image, as JSON: a number, null for NaN, or numbers as base64


@dataclass(frozen=True)
class Metric:
    """A figure of a model over all images: the mean of a value of each image, unless it says otherwise."""

    name: str  # in files
    title: str  # of a column
    decimals: int = 4
    interval: bool = True  # is its interval shown in tables?
    brief: bool = True  # is it in tables with many other columns?
    change: str = ""  # of which value it is the difference to the unreduced model's
    quantile: tuple[str, float] | None = None  # of which value it is which quantile
    partial: bool = False  # do some images have no value?
    timm: bool = False  # has timm columns for it in results files?


@dataclass(frozen=True)
class Bound:
    """A bound that a search can be given, such as max_kl; the command line has a flag of the same name."""

    name: str
    help: str  # goes on "the cheapest schedule with"
    low: float = 0.0  # its values are above this,
    high: float = 100.0  # and at most this
    metric: str = ""  # which figure is bounded; "" = it bounds no figure of a measure
    at_least: bool = False  # else at most
    reading: Callable[[float], float] = float  # from the figure to what is bounded

    def is_met(self, value: float, figures: Mapping[str, float]) -> bool:
        reached = self.reading(figures[self.metric])
        return reached >= value if self.at_least else reached <= value


@dataclass(frozen=True)
class Measure:
    """Base class: how the outputs of one kind are compared. Subclasses are frozen dataclasses.

    All that is special about a measure is in its class; others ask it and never compare its name.
    """

    name: ClassVar[str]
    help: ClassVar[str]  # for --help: what it compares
    metrics: ClassVar[tuple[Metric, ...]]
    damage: ClassVar[str]  # the figure by which methods are ranked; less is better
    objective: ClassVar[str]  # the array whose mean a search minimises
    summary: ClassVar[tuple[str, ...]]  # the figures that a recipe has
    headline: ClassVar[str] = ""  # the figure that pages plot as quality; "" = the damage
    bounds: ClassVar[tuple[Bound, ...]] = ()  # targets that a search can be given
    needs_labels: ClassVar[bool] = False  # must images come with classes?
    restores: ClassVar[bool] = False  # are reduced models patched with restore?
    demo_sections: ClassVar[frozenset[str]] = frozenset()  # of one image: classes, neighbours, features
    explanation: ClassVar[str]  # a sentence for people
    undefined: ClassVar[str] = "not finite"  # which outputs have no damage

    kind: str = "classes"  # the model's `Output.kind`, which says what to read of what it returns

    @classmethod
    def fits(cls, output: Output | None) -> bool:
        """Is this the measure for such an output, if none is named? None: nothing is known of the output."""
        return False

    @classmethod
    def unsupported_reason(cls, output: Output) -> str | None:
        """Why such outputs cannot be measured so, and what to do; None if they can."""
        if output.kind != "tokens":
            return None
        return (
            f"the model has an output for every token, {output.width} numbers each; create it with pooling, e.g. "
            "global_pool='token'"
        )

    @property
    def min_images(self) -> int:
        """The smallest number of images for meaningful figures."""
        return 1

    def settings(self) -> dict[str, object]:
        """The settings that decide the figures, for the identity of a run."""
        return {"measure": self.name}

    def outputs(self, name: str, model: nn.Module, images: Tensor) -> Tensor:
        """The outputs to compare, checked; a row per image. `name` is the model's, for errors."""
        return self.check(name, primary_output(model(images), self.kind), len(images)).float()

    def check(self, name: str, output: object, images: int) -> Tensor:
        """`output` if it is what this measure compares; raises SettingError."""
        raise NotImplementedError

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        """The stored values of each image: `output` against the unreduced model's `base`. NaN where one is not finite.

        `keep_arrays` [B]: of which images arrays may be large.
        """
        raise NotImplementedError

    def check_labels(self, labels: Tensor, width: int) -> None:
        """Refuse labels that this measure needs and that make no sense."""

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """The values of each image for all models, by figure; the unreduced one is first. Figures may be missing."""
        raise NotImplementedError

    def explain(self, base: Arrays) -> str:
        """The explanation beside the figures in reports; `base` has the unreduced model's values of each image."""
        return self.explanation

    def direction(self, output: Tensor, noise: Tensor) -> Tensor:
        """A random direction in the output with the covariance by which the damage grows, [B, ...] like both arguments.

        Calibration asks how sensitive the output is to each token in such directions. Here: all directions alike.
        """
        return noise

    def metric(self, name: str) -> Metric:
        return next(figure for figure in self.metrics if figure.name == name)

    def bound(self, name: str) -> Bound | None:
        return next((bound for bound in self.bounds if bound.name == name), None)


def check_reference_outputs(outputs: Tensor, indices: Sequence[int], images: Tensor) -> None:
    """Refuse outputs of the unreduced model that are not finite; `indices` is where each image is in the data set."""
    finite = outputs.flatten(1).isfinite().all(dim=1).tolist()
    wrong = [where for where, fine in zip(indices, finite, strict=True) if not fine]
    if wrong:
        check_finite(images, indices)  # then it is not the model
        raise GTPError(
            f"the unreduced model's outputs are not finite on {len(wrong)} of {len(finite)} images (the first is image "
            f"{wrong[0]}): there is nothing to compare with; check its weights, or use float32"
        )


def refuse_shape(name: str, output: object, images: int, needed: str) -> SettingError:
    """The error for an output that a measure cannot compare."""
    shape = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    return SettingError(f"{name} returns {shape} for {images} images; {needed}")


def finite_rows(base: Tensor, output: Tensor) -> Tensor:
    """Images where both outputs are finite, [B]."""
    return (base.isfinite() & output.isfinite()).flatten(1).all(dim=1)


def to_array(tensor: Tensor) -> Array:
    """A figure of each image as an array, rounded as it is stored, so that a resumed run gives the same."""
    return tensor.double().numpy(force=True).round(9)


def encode_arrays(arrays: Mapping[str, Array]) -> dict[str, list[Stored]]:
    """Arrays as JSON: a value for each image, null for NaN; rows of several numbers as base64."""
    return {name: _encode_array(array) for name, array in arrays.items()}


def _encode_array(array: Array) -> list[Stored]:
    if array.ndim == 2:  # a row of NaN was not stored
        rows = np.ascontiguousarray(array, dtype=np.float32)
        return ["" if np.isnan(row).all() else base64.b64encode(row.tobytes()).decode() for row in rows]
    return [None if value != value else value for value in array.tolist()]


def decode_array(stored: Sequence[Stored]) -> Array:
    """An array from what `encode_arrays` made of it, of one or more batches."""
    if stored and isinstance(stored[0], str):
        rows = [np.frombuffer(base64.b64decode(str(text)), dtype=np.float32) for text in stored]
        width = max(map(len, rows))
        return np.stack([row if len(row) else np.full(width, np.nan, dtype=np.float32) for row in rows])
    return np.array([np.nan if value is None else value for value in stored])


def concatenate_arrays(parts: Sequence[Arrays]) -> Arrays:
    """The arrays of several batches as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def no_labels(images: int) -> Tensor:
    return torch.full((images,), -1)
