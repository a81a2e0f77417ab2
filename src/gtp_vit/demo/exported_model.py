"""An exported file in the place of a model. Only its output can be seen, not where its patches went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.data.preview import Preview, PreviewTransform, preview_through
from gtp_vit.demo.demo_model import Example
from gtp_vit.demo.inspection import ClassProbability, rounds_for, top_classes
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.file_images import transform_from_metadata
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError
from gtp_vit.metrics.base import UNREDUCED, Measure, check_reference_outputs
from gtp_vit.metrics.damage import Damage
from gtp_vit.metrics.registry import measure_for_output
from gtp_vit.models import bundled
from gtp_vit.profiling.benchmark import Timing, benchmark_models

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class ExportedSubject:
    """An exported file to look at."""

    file: ExportedFile
    run: ExportedModel
    original_model: nn.Module | None  # the model it was made from, if its weights are here
    why_no_original: str  # why they are not
    view: PreviewTransform
    measure: Measure
    examples: tuple[Example, ...]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def python(self) -> str:
        """The lines that run the file."""
        return self.file.engine.examples(self.name, self.file.metadata.precision)[0].code


def make_exported_subject(
    file: ExportedFile,
    run: ExportedModel,
    examples: Sequence[Example],
    original_model: nn.Module | None = None,
    why_no_original: str = "",
    view: PreviewTransform | None = None,
) -> ExportedSubject:
    """A file with all that the page needs of it; without its model, pictures are prepared as the file says."""
    output = file.metadata.output
    measure = measure_for_output(output)(kind=output.kind)
    if measure.restores:
        raise GTPError(
            f"{file.name} returns something for every token; the demo shows files with one output for a picture"
        )
    return ExportedSubject(
        file, run, original_model, why_no_original, view or view_of_file(file), measure, tuple(examples)
    )


def view_of_file(file: ExportedFile) -> PreviewTransform:
    """From a picture to what a file sees of it, as the file says."""
    whole = file.metadata.model == bundled.NAME and file.metadata.preprocessing.crop_pct is None
    # Its pictures have no border to cut off.
    transform = transform_from_metadata(file, {"crop_pct": 1.0} if whole else {})
    if transform is None:
        raise GTPError(f"{file.name} has no image preprocessing; give --checkpoint, the weights it was made from")
    return preview_through(transform)


@dataclass(frozen=True)
class FileInspection:
    """One picture in a file."""

    preview: Preview
    before: tuple[ClassProbability, ...]  # of the model it was made from, if that is here
    after: tuple[ClassProbability, ...]
    damage: float | None
    timing: Timing | None
    rounds: int


@torch.inference_mode()
def inspect_file(
    exported: ExportedSubject, picture: Image, *, timed: bool, progress: Callable[[int, int], None] | None = None
) -> FileInspection:
    """Run a picture through the file, and through the model it was made from."""
    preview = exported.view(picture)
    image = preview.tensor[None]
    output = exported.measure.check(exported.name, exported.run(image), 1).float()
    if exported.original_model is None:
        return FileInspection(preview, (), _top_classes(exported, output), None, None, 0)
    with eval_mode(exported.original_model):
        base = exported.measure.outputs(UNREDUCED, exported.original_model, image)
    check_reference_outputs(base, [0], image)
    damage = Damage.between(exported.measure, base, output).mean
    timing, rounds = None, 0
    if timed:
        models = {UNREDUCED: exported.original_model, exported.name: exported.run}
        rounds = rounds_for(models.values(), image)
        timing = benchmark_models(models, image, rounds=rounds, progress=progress)[1]
    return FileInspection(preview, _top_classes(exported, base), _top_classes(exported, output), damage, timing, rounds)


def _top_classes(exported: ExportedSubject, scores: Tensor) -> tuple[ClassProbability, ...]:
    return top_classes(scores, exported.file.metadata.classes) if "classes" in exported.measure.demo_sections else ()
