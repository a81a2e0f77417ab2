"""calibrate: GTP+ that knows what matters to a model, learned from a few hundred images; no search, no labels."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from torch import Tensor, nn

from gtp_vit.core.reducer import Method
from gtp_vit.core.schedule import CALIBRATED_SHAPE, calibrated, resample
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import GTPError, check_range
from gtp_vit.methods.gtp_plus.learning.sensitivity import Progress, learn_sensitivity
from gtp_vit.methods.gtp_plus.method import GTPPlus
from gtp_vit.metrics.base import Measure
from gtp_vit.patching import host_of, unpatch
from gtp_vit.recipes.defaults import DEFAULT_FRACTION
from gtp_vit.recipes.provenance import Measurements, Provenance
from gtp_vit.recipes.recipe import Recipe, sizes_of_vit
from gtp_vit.runs.journal import Journal
from gtp_vit.tuning.space import ScheduleLimits, ScheduleSpace, unreachable_error
from gtp_vit.version import __version__

BATCH_SIZE = 8  # images in a backward pass, whose memory it bounds
CALIBRATED_FLOOR = 0.3  # the probe knows better than attention what does not matter


def calibrate(
    model: nn.Module,
    images: Tensor,
    *,
    macs: float = DEFAULT_FRACTION,
    measure: str | Measure = "auto",
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Progress | None = None,
) -> Recipe:
    """GTP+ with its default shape at a share of the MACs and what it learned of the model; a recipe that `patch` takes.

    It learns by one backward pass per image how sensitive the output is to each token, and which cells the model uses
    registers. `tune` does the same and searches the schedule as well.

    Args:
        model: a supported ViT with the weights it will be used with; it is run in eval mode.
        images: a few hundred, prepared as the model expects them, [I, channels, height, width]. No labels are needed.
        macs: share of the unreduced model's MACs.
        measure: what counts as damage: auto chooses by what the model returns; dense: features of patches.
        batch_size: images at a time.
        seed: of the random directions in the output.
        progress: called after every batch, with the images done and their number.

    Returns:
        The settings with the calibration, how well it predicts (`provenance.fit`), and their MACs.

    Raises:
        GTPError: the images or the model give nothing to learn from, e.g. equal images or no gradients.

    >>> import torch, gtp_vit
    >>> model, images = gtp_vit.create_model("test_vit"), torch.rand(40, 3, 160, 160)
    >>> fast = gtp_vit.patch(model, calibrate(model, images))
    >>> round(gtp_vit.macs(fast).total / gtp_vit.macs(model).total, 2)
    0.65
    """
    check_range("macs", macs, 0, 1, exclude_low=True)
    check_range("batch_size", batch_size, 1, 65536, integer=True)
    plain: Any = unpatch(model)
    host = host_of(plain)
    begin = time.time()
    options: dict[str, Any] = {"measure": measure, "batch_size": batch_size, "seed": seed, "progress": progress}
    sensitivity = learn_sensitivity(plain, images, **options)
    space = ScheduleSpace(
        host.costs(), with_calibration(GTPPlus(), sensitivity.calibration.to_text(), host.vit), ScheduleLimits()
    )
    target = macs * space.unreduced_macs
    plan = [0] * host.vit.depth  # the shortened last block may be enough
    if space.cost(plan) > target:
        fitted = space.fit(resample(CALIBRATED_SHAPE, host.vit.depth), target)
        if fitted is None:
            raise unreachable_error(space, target)
        plan = fitted
    method, cost = space.with_plan(plan), space.cost(plan)
    provenance = Provenance(
        by="gtp_vit.calibrate",
        version=__version__,
        target={"macs": macs},
        seed=seed,
        images=len(images),
        fit=sensitivity.fit,
        registers=sensitivity.calibration.registers,
        minutes=round((time.time() - begin) / 60, 1),
    )
    measured = Measurements(macs=cost, fraction=round(cost / space.unreduced_macs, 4))
    return Recipe(host.inputs.name, sizes_of_vit(host.vit), method, provenance, measured)


def with_calibration(method: GTPPlus, text: str, vit: ViTInfo) -> GTPPlus:
    """The settings with this calibration, and the floor and the shape that suit it where none was chosen.

    The shape of a search's start counts as not chosen. Half of the tokens leave.
    """
    floor, propagate = method.importance_floor, method.remove
    if floor == GTPPlus().importance_floor:
        floor = CALIBRATED_FLOOR
    if propagate in (GTPPlus().remove, GTPPlus.at_strength(vit, 0.5).remove):
        propagate = tuple(calibrated(vit.depth, vit.image_tokens, vit.image_tokens / (2 * vit.depth)))
    return dataclasses.replace(method, importance_floor=floor, remove=propagate, calibration=text)


def calibrate_method(
    method: Method, model: nn.Module, images: Tensor, *, measure: Measure, batch_size: int, journal: Journal | None
) -> tuple[Method, str]:
    """Settings for a search, with what was learned of the model on these images, and how that went in one line.

    Other methods have nothing to learn, and where nothing can be learned the settings stay as they are. What was
    learned is in the journal: another number of threads would round it differently.
    """
    if not isinstance(method, GTPPlus):
        return method, ""
    if method.calibration is not None:
        return method, "given"
    vit = host_of(model).vit
    for entry in [] if journal is None else journal.entries:
        if "calibration" in entry:
            return with_calibration(method, entry["calibration"], vit), entry["learned"]
    try:
        sensitivity = learn_sensitivity(model, images, measure=measure, batch_size=min(batch_size, BATCH_SIZE))
    except GTPError as error:
        return method, f"none: {error}"
    text, registers = sensitivity.calibration.to_text(), len(sensitivity.calibration.registers)
    fits = [fit for fit in sensitivity.fit if fit is not None]
    how_well = f"{len(images)} images, explains {min(fits):.2f} to {max(fits):.2f}, {registers} registers"
    if journal is not None:
        journal.append({"calibration": text, "learned": how_well})
    return with_calibration(method, text, vit), how_well
