"""Settings of a search: the target, the search, the limits of a schedule, and where speed is measured.

The flags of `gtp-vit tune` are made from these classes: their fields, defaults, ranges and docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from gtp_vit.core.ranges import Range, check_ranges
from gtp_vit.core.reducer import Method
from gtp_vit.engines import TORCH
from gtp_vit.errors import SettingError, check_name, check_range
from gtp_vit.metrics.base import Bound, Measure
from gtp_vit.metrics.registry import MEASURES, select_measure
from gtp_vit.recipes.defaults import DEFAULT_FRACTION
from gtp_vit.runs.journal import Journal

# Targets that every model has, whatever its outputs; those of its outputs are the bounds of their measure.
COSTS = (
    Bound("macs", "share of the unreduced model's MACs", high=1),
    Bound("speedup", "speed-up over the unreduced model, measured on this machine", low=1),
)


def target_bounds() -> dict[str, list[tuple[str, Bound]]]:
    """All targets by name, each with the measures that have it; "" = it needs none."""
    bounds = {bound.name: [("", bound)] for bound in COSTS}
    for measure in MEASURES.values():
        for bound in measure.bounds:
            bounds.setdefault(bound.name, []).append((measure.name, bound))
    return bounds


@dataclass(frozen=True)
class Target:
    """The target of a search: a fraction of the MACs, a speed-up, or a bound on the damage, such as max_kl.

    At a share or a speed-up the search does as little damage as it can; within a bound it saves as much as it can.

    >>> Target("max_kl", 0.02)
    Target(name='max_kl', value=0.02, measure='auto')
    >>> Target("speedup", 1.5).name
    'speedup'
    """

    name: str
    """macs, speedup, or a bound of a measure."""
    value: float
    """In the unit of what is bounded: a share, a factor, a percentage."""
    measure: str | Measure = "auto"
    """How outputs are compared; auto chooses by what the model returns, dense compares restored features."""

    def __post_init__(self) -> None:
        bounds = [bound for _, bound in target_bounds()[check_name("target", self.name, target_bounds())]]
        low, high = min(bound.low for bound in bounds), max(bound.high for bound in bounds)
        check_range(self.name, self.value, low, high, exclude_low=True)
        if not isinstance(self.measure, Measure):
            check_name("measure", self.measure, ("auto", *MEASURES))

    def measure_of(self, model: nn.Module) -> Measure:
        """The measure for this model's outputs; raises SettingError if it has no figure for the target."""
        measure = select_measure(model, self.measure)
        self.bound(measure)
        return measure

    def bound(self, measure: Measure) -> Bound:
        """The bounded figure, for outputs with this measure."""
        bounds = {bound.name: bound for bound in (*COSTS, *measure.bounds)}
        if self.name not in bounds:
            raise SettingError(
                f"the target {self.name} does not fit this model, whose outputs are measured as {measure.name}; give "
                f"one of {', '.join(bounds)}"
            )
        check_range(self.name, self.value, bounds[self.name].low, bounds[self.name].high, exclude_low=True)
        return bounds[self.name]


DEFAULT_TARGET = Target("macs", DEFAULT_FRACTION)


@dataclass(frozen=True)
class SearchConfig:
    """Length, seed and first step of a search.

    >>> SearchConfig(passes=20, minutes=5).passes
    20
    """

    passes: Annotated[int, Range(1, 10**6)] = 150
    """Passes of the search over its images."""
    minutes: Annotated[float, Range(0, 10**6)] = 0
    """End the search after this many minutes; 0 = no limit."""
    seed: int = 0
    """Seed of the search; some methods have a --seed of their own."""
    batch_size: Annotated[int, Range(1, 65536)] = 32
    """Images at a time."""
    calibrate: bool = True
    """Calibrate first, with one backward pass per image; gtp_plus only."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class TimingConfig:
    """The engine that speed is measured in, and the result is checked in. Damage is always that of the model in torch.

    >>> TimingConfig(engine="onnxruntime").precision
    'f32'
    """

    engine: str = TORCH
    """torch, or the name of an engine."""
    precision: str = "f32"
    """In the engine: f32, bf16 or int8."""
    batch_size: Annotated[int, Range(1, 65536)] = 8
    """Images in a batch where speed is measured."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Progress:
    """A report of `tune` while the search runs."""

    done: float  # share of the search
    best: Method
    damage: float  # mean over the images of the search
    title: str  # what the damage is
    fraction: float  # of the unreduced model's MACs


@dataclass(frozen=True)
class Tracking:
    """Callback for the progress of a search, and the journal that stores its figures.

    >>> reports = []
    >>> tracking = Tracking(progress=reports.append)
    """

    progress: Callable[[Progress], None] | None = None  # called with the best so far
    journal: Journal | None = None  # of this run; figures in it are reused
