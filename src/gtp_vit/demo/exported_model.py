"""filed: an exported file in the place of a model. Only its output can be seen, not where its patches went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.data.preview import PreparedPicture, View, view_through
from gtp_vit.data.transforms import make_transform
from gtp_vit.demo.demo_model import Example
from gtp_vit.demo.inspection import Likely, likely, rounds_for
from gtp_vit.engines.description import Description
from gtp_vit.engines.model_card import run_lines
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Measure, check_base
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.registry import measure_for
from gtp_vit.models import bundled
from gtp_vit.profiling.benchmark import Timing, benchmark_models


@dataclass(frozen=True, eq=False)
class Filed:
    """An exported file to look at."""

    name: str  # of the file
    about: Description  # what it says of itself
    run: ExportedModel
    original: nn.Module | None  # the model it was made from, if its weights are here
    why_alone: str  # why they are not
    view: View
    measure: Measure
    examples: tuple[Example, ...]

    @property
    def python(self) -> str:
        """The lines that run the file."""
        return run_lines(self.name, self.about)


def make_filed(
    name: str,
    about: Description,
    run: ExportedModel,
    examples: Sequence[Example],
    original: nn.Module | None = None,
    why_alone: str = "",
    view: View | None = None,
) -> Filed:
    """A file with all that the page needs of it; without its model, pictures are prepared as the file says."""
    measure = measure_for(Output(about.kind, about.width))(kind=about.kind)  # type: ignore[arg-type]  # checked when it was read
    if measure.restores:
        raise GTPError(f"{name} returns something for every token; the demo shows files with one output for a picture")
    return Filed(name, about, run, original, why_alone, view or view_of_file(name, about), measure, tuple(examples))


def view_of_file(name: str, about: Description) -> View:
    """From a picture to what a file sees of it, as the file says."""
    if "mean" not in about.preparation:
        raise GTPError(
            f"{name} does not say how pictures are prepared; give --checkpoint, the weights it was made from"
        )
    words = {word: value for word, value in about.preparation.items() if word != "processor"}
    if about.model == bundled.NAME:  # its pictures have no border to cut off
        words = {"crop_pct": 1.0, **words}
    return view_through(make_transform({**words, "input_size": (about.channels, *about.size)}))


@dataclass(frozen=True)
class FileStudy:
    """One picture in a file."""

    seen: PreparedPicture
    before: tuple[Likely, ...]  # of the model it was made from, if that is here
    after: tuple[Likely, ...]
    damage: float | None
    timing: Timing | None
    rounds: int


@torch.inference_mode()
def look_at_file(
    filed: Filed, picture: Any, *, timed: bool, progress: Callable[[int, int], None] | None = None
) -> FileStudy:
    """Run a picture through the file, and through the model it was made from."""
    seen = filed.view(picture)
    image = seen.tensor[None]
    found = filed.measure.check(filed.name, filed.run(image), 1).float()
    if filed.original is None:
        return FileStudy(seen, (), _likely(filed, found), None, None, 0)
    with eval_mode(filed.original):
        base = filed.measure.outputs(UNREDUCED, filed.original, image)
    check_base(base, [0], image)
    damage = Damage.between(filed.measure, base, found).mean
    timing, rounds = None, 0
    if timed:
        models = {UNREDUCED: filed.original, filed.name: filed.run}
        rounds = rounds_for(models.values(), image)
        timing = benchmark_models(models, image, rounds=rounds, progress=progress)[1]
    return FileStudy(seen, _likely(filed, base), _likely(filed, found), damage, timing, rounds)


def _likely(filed: Filed, scores: Tensor) -> tuple[Likely, ...]:
    return likely(scores, filed.about.classes) if "classes" in filed.measure.shows else ()
