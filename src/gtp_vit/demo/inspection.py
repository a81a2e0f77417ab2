"""One picture in a model, with one or two methods at a share of the MACs: what they keep, change and cost.

Pure functions of a subject and one person's inputs. Shapes: M0 patches, K tokens that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.reducer import Method
from gtp_vit.data.preview import Preview
from gtp_vit.demo.demo_model import DemoModel, example_tensors, example_vectors, patched_model, settings_at
from gtp_vit.metrics.base import UNREDUCED, check_reference_outputs
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.dense import patch_errors, patch_features
from gtp_vit.patching import patch
from gtp_vit.profiling.benchmark import Timing, benchmark_models
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.trace import Trace, trace
from gtp_vit.report.patch_features import feature_panels, same_segment_percent
from gtp_vit.tensors import rescale

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_CLASSES_SHOWN = 5  # classes and neighbours that are shown
TIMING_SECONDS = 0.5  # of timing, if the model is quick enough
MIN_ROUNDS, MAX_ROUNDS, WARMUP = 5, 25, 3


class ClassProbability(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class Neighbour(NamedTuple):
    """An example and its cosine to the picture."""

    example_index: int
    cosine: float


@dataclass(frozen=True)
class Features:
    """Restored features of the patches beside the unreduced ones."""

    picture: Image  # colours and segments of both
    error: float  # relative, mean over the patches
    same: float  # patches in the same segment, in percent


@dataclass(frozen=True)
class Column:
    """One method's column: its effect on one picture."""

    name: str  # of the method
    method: Method
    requested: float  # share of the MACs
    macs: int
    fraction: float  # that it has
    macs_of_this_picture: bool  # does its cost depend on the picture?
    trace: Trace
    damage: float  # by the subject's measure
    classes: tuple[ClassProbability, ...]  # the first ones; none if the model has no classes
    neighbours: tuple[Neighbour, ...]  # the nearest examples, by this method's vectors
    features: Features | None  # of encoders
    model: Any


@dataclass(frozen=True)
class Inspection:
    """One picture without and with methods."""

    preview: Preview
    unreduced_macs: int  # MACs of the unreduced model
    classes: tuple[ClassProbability, ...]
    neighbours: tuple[Neighbour, ...]
    columns: tuple[Column, ...]


def inspect_picture(demo_model: DemoModel, picture: Image, methods: Sequence[str], fraction: float) -> Inspection:
    """Run a picture through the model without and with these methods."""
    preview = demo_model.view(picture)
    image = preview.tensor[None]
    chosen = [settings_at(demo_model, name, fraction) for name in methods]
    with torch.inference_mode(), eval_mode(demo_model.model):
        base = demo_model.measure.outputs(UNREDUCED, demo_model.model, image)
        check_reference_outputs(base, [0], image)
        columns = tuple(
            _column(demo_model, preview, base, name, method, fraction)
            for name, method in zip(methods, chosen, strict=True)
        )
        return Inspection(
            preview=preview,
            unreduced_macs=demo_model.costs.unreduced,
            classes=_top_classes(demo_model, base),
            neighbours=_nearest(demo_model, None, image, base),
            columns=columns,
        )


def _column(demo_model: DemoModel, preview: Preview, base: Tensor, name: str, method: Method, asked: float) -> Column:
    image, fast = preview.tensor[None], patched_model(demo_model, method)
    adaptive = bool(fast.reducer.adaptive)
    cost = macs(fast, images=image).total if adaptive else demo_model.costs.macs_with(method)
    output = demo_model.measure.outputs(name, fast, image)
    return Column(
        name=name,
        method=method,
        requested=asked,
        macs=cost,
        fraction=cost / demo_model.costs.unreduced,
        macs_of_this_picture=adaptive,
        trace=trace(fast, image),
        damage=Damage.between(demo_model.measure, base, output).mean,
        classes=_top_classes(demo_model, output),
        neighbours=_nearest(demo_model, method, image, output),
        features=_features(demo_model, preview, method) if "features" in demo_model.measure.demo_sections else None,
        model=fast,
    )


def _top_classes(demo_model: DemoModel, scores: Tensor) -> tuple[ClassProbability, ...]:
    return top_classes(scores, demo_model.classes) if "classes" in demo_model.measure.demo_sections else ()


def top_classes(scores: Tensor, names: Sequence[str] | None) -> tuple[ClassProbability, ...]:
    """The first classes of one picture, [1, classes], with their probabilities."""
    best = scores[0].double().softmax(dim=0).topk(min(NUM_CLASSES_SHOWN, scores.shape[1]))
    known = names or [f"class {number}" for number in range(scores.shape[1])]
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(ClassProbability(known[place], value) for place, value in pairs)


def _nearest(demo_model: DemoModel, method: Method | None, image: Tensor, vector: Tensor) -> tuple[Neighbour, ...]:
    """The examples nearest to a picture, other than itself: both with the same method."""
    if not demo_model.compares_neighbours or not demo_model.examples:
        return ()
    cosines = F.cosine_similarity(rescale(example_vectors(demo_model, method)), rescale(vector), dim=1)
    itself = (example_tensors(demo_model) == image).flatten(1).all(dim=1)
    cosines = cosines.masked_fill(itself, -2.0)
    best = cosines.topk(min(NUM_CLASSES_SHOWN, int((~itself).sum())))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Neighbour(place, value) for place, value in pairs)


def _features(demo_model: DemoModel, preview: Preview, method: Method) -> Features:
    image, fast = preview.tensor[None], patch(demo_model.model, method, restore=True, quiet=True)
    one, other = (patch_features(model, image)[0].float() for model in (demo_model.model, fast))
    error = float(patch_errors(one, other).mean())
    panels = feature_panels(preview.picture, one, other, demo_model.host.vit.grid)
    return Features(panels, error, same_segment_percent(one, other))


def time_columns(
    demo_model: DemoModel, inspection: Inspection, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Timing], int]:
    """Speed of each method against the unreduced model, timed in turns on this picture; and the rounds."""
    image = inspection.preview.tensor[None]
    models = {UNREDUCED: demo_model.model}
    models |= {f"{number} {column.name}": column.model for number, column in enumerate(inspection.columns)}
    rounds = rounds_for(models.values(), image)
    return benchmark_models(models, image, rounds=rounds, progress=progress)[1:], rounds


def rounds_for(models: Iterable[nn.Module], image: Tensor) -> int:
    """Rounds of these models that fit into TIMING_SECONDS, estimated from one round."""
    begin = time.perf_counter()
    with torch.inference_mode():
        for model in models:
            model(image)
    fitting = int(TIMING_SECONDS / (time.perf_counter() - begin)) - WARMUP
    return min(max(fitting, MIN_ROUNDS), MAX_ROUNDS)
