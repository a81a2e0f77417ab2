"""filed: an exported file in the place of a model. Only its output can be seen, not where its patches went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.data.preview import PreparedPicture, View, view_through
from gtp_vit.demo.demo_model import Example
from gtp_vit.demo.inspection import Likely, likely, rounds_for
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.file_images import transform_in_words
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Measure, check_base
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.registry import measure_for
from gtp_vit.models import bundled
from gtp_vit.profiling.benchmark import Timing, benchmark_models

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Filed:
    """An exported file to look at."""

    file: ExportedFile
    run: ExportedModel
    original: nn.Module | None  # the model it was made from, if its weights are here
    why_alone: str  # why they are not
    view: View
    measure: Measure
    examples: tuple[Example, ...]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def python(self) -> str:
        """The lines that run the file."""
        return self.file.engine.examples(self.name, self.file.metadata.precision)[0].code


def make_filed(
    file: ExportedFile,
    run: ExportedModel,
    examples: Sequence[Example],
    original: nn.Module | None = None,
    why_alone: str = "",
    view: View | None = None,
) -> Filed:
    """A file with all that the page needs of it; without its model, pictures are prepared as the file says."""
    output = file.metadata.output
    measure = measure_for(output)(kind=output.kind)
    if measure.restores:
        raise GTPError(
            f"{file.name} returns something for every token; the demo shows files with one output for a picture"
        )
    return Filed(file, run, original, why_alone, view or view_of_file(file), measure, tuple(examples))


def view_of_file(file: ExportedFile) -> View:
    """From a picture to what a file sees of it, as the file says."""
    whole = file.metadata.model == bundled.NAME and file.metadata.preparation.crop_pct is None
    transform = transform_in_words(file, {"crop_pct": 1.0} if whole else {})  # its pictures have no border to cut off
    if transform is None:
        raise GTPError(
            f"{file.name} does not say how pictures are prepared; give --checkpoint, the weights it was made from"
        )
    return view_through(transform)


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
    filed: Filed, picture: Image, *, timed: bool, progress: Callable[[int, int], None] | None = None
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
    return likely(scores, filed.file.metadata.classes) if "classes" in filed.measure.shows else ()
