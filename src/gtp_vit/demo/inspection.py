"""study: one picture in a model, with one or two methods at a share of the MACs: what they keep, change and cost.

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
from gtp_vit.data.preview import PreparedPicture
from gtp_vit.demo.demo_model import Subject, example_tensors, example_vectors, reduced, settings_at
from gtp_vit.metrics.base import UNREDUCED, check_base
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.dense import patch_errors, patch_features
from gtp_vit.patching import patch
from gtp_vit.profiling.benchmark import Timing, benchmark_models
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.trace import Trace, trace
from gtp_vit.report.patch_features import feature_panels, same_segment
from gtp_vit.tensors import rescaled

if TYPE_CHECKING:
    from PIL.Image import Image

FIRST = 5  # classes and neighbours that are shown
SECONDS = 0.5  # of timing, if the model is quick enough
FEWEST_ROUNDS, MOST_ROUNDS, WARMUP = 5, 25, 3


class Likely(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class Neighbour(NamedTuple):
    """An example and its cosine to the picture."""

    place: int
    cosine: float


@dataclass(frozen=True)
class Features:
    """Restored features of the patches beside the unreduced ones."""

    picture: Image  # colours and segments of both
    error: float  # relative, mean over the patches
    same: float  # patches in the same segment, in percent


@dataclass(frozen=True)
class Column:
    """What one method does to one picture."""

    name: str  # of the method
    method: Method
    asked: float  # share of the MACs
    macs: int
    share: float  # that it has
    of_this_picture: bool  # does its cost depend on the picture?
    trace: Trace
    damage: float  # by the subject's measure
    classes: tuple[Likely, ...]  # the first ones; none if the model has no classes
    neighbours: tuple[Neighbour, ...]  # the nearest examples, by this method's vectors
    features: Features | None  # of encoders
    fast: Any


@dataclass(frozen=True)
class Study:
    """One picture without and with methods."""

    seen: PreparedPicture
    whole: int  # MACs of the unreduced model
    classes: tuple[Likely, ...]
    neighbours: tuple[Neighbour, ...]
    columns: tuple[Column, ...]


def look(subject: Subject, picture: Image, methods: Sequence[str], share: float) -> Study:
    """Run a picture through the model without and with these methods."""
    seen = subject.view(picture)
    image = seen.tensor[None]
    chosen = [settings_at(subject, name, share) for name in methods]
    with torch.inference_mode(), eval_mode(subject.model):
        base = subject.measure.outputs(UNREDUCED, subject.model, image)
        check_base(base, [0], image)
        columns = tuple(
            _column(subject, seen, base, name, method, share) for name, method in zip(methods, chosen, strict=True)
        )
        return Study(
            seen=seen,
            whole=subject.costs.whole,
            classes=_likely(subject, base),
            neighbours=_nearest(subject, None, image, base),
            columns=columns,
        )


def _column(subject: Subject, seen: PreparedPicture, base: Tensor, name: str, method: Method, asked: float) -> Column:
    image, fast = seen.tensor[None], reduced(subject, method)
    adaptive = bool(fast.reducer.adaptive)
    cost = macs(fast, images=image).total if adaptive else subject.costs.with_method(method)
    output = subject.measure.outputs(name, fast, image)
    return Column(
        name=name,
        method=method,
        asked=asked,
        macs=cost,
        share=cost / subject.costs.whole,
        of_this_picture=adaptive,
        trace=trace(fast, image),
        damage=Damage.between(subject.measure, base, output).mean,
        classes=_likely(subject, output),
        neighbours=_nearest(subject, method, image, output),
        features=_features(subject, seen, method) if "features" in subject.measure.shows else None,
        fast=fast,
    )


def _likely(subject: Subject, scores: Tensor) -> tuple[Likely, ...]:
    return likely(scores, subject.classes) if "classes" in subject.measure.shows else ()


def likely(scores: Tensor, names: Sequence[str] | None) -> tuple[Likely, ...]:
    """The first classes of one picture, [1, classes], with their probabilities."""
    best = scores[0].double().softmax(dim=0).topk(min(FIRST, scores.shape[1]))
    known = names or [f"class {number}" for number in range(scores.shape[1])]
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Likely(known[place], value) for place, value in pairs)


def _nearest(subject: Subject, method: Method | None, image: Tensor, vector: Tensor) -> tuple[Neighbour, ...]:
    """The examples nearest to a picture, other than itself: both with the same method."""
    if not subject.embeds or not subject.examples:
        return ()
    cosines = F.cosine_similarity(rescaled(example_vectors(subject, method)), rescaled(vector), dim=1)
    itself = (example_tensors(subject) == image).flatten(1).all(dim=1)
    cosines = cosines.masked_fill(itself, -2.0)
    best = cosines.topk(min(FIRST, int((~itself).sum())))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Neighbour(place, value) for place, value in pairs)


def _features(subject: Subject, seen: PreparedPicture, method: Method) -> Features:
    image, fast = seen.tensor[None], patch(subject.model, method, restore=True, quiet=True)
    one, other = (patch_features(each, image)[0].float() for each in (subject.model, fast))
    error = float(patch_errors(one, other).mean())
    panels = feature_panels(seen.picture, one, other, subject.host.vit.grid)
    return Features(panels, error, same_segment(one, other))


def time_columns(
    subject: Subject, study: Study, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Timing], int]:
    """How fast each method is against the unreduced model here, in turns on this picture; and in how many rounds."""
    image = study.seen.tensor[None]
    models = {UNREDUCED: subject.model}
    models |= {f"{number} {column.name}": column.fast for number, column in enumerate(study.columns)}
    rounds = rounds_for(models.values(), image)
    return benchmark_models(models, image, rounds=rounds, progress=progress)[1:], rounds


def rounds_for(models: Iterable[nn.Module], image: Tensor) -> int:
    """How many rounds of these models fit into SECONDS, as far as one round tells."""
    begin = time.perf_counter()
    with torch.inference_mode():
        for model in models:
            model(image)
    fitting = int(SECONDS / (time.perf_counter() - begin)) - WARMUP
    return min(max(fitting, FEWEST_ROUNDS), MOST_ROUNDS)
