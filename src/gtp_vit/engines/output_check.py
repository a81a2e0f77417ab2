"""An exported file is run in its engine and compared with torch, before it is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import primary_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines.engine import Array, Engine
from gtp_vit.engines.engine_process import EngineProcess
from gtp_vit.engines.program import output_spec
from gtp_vit.errors import GTPError
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.patching import host_of
from gtp_vit.tensors import rescale

BATCHES = (1, 3, 8)
# A token that two implementations choose differently, for a rounding error, moves an output by more than rounding does:
# so most images must be exact in 32 bits, not all.
EXACT_TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class OutputCheck:
    """An exported file against torch on one batch, both with the same method."""

    batch: int
    max_difference: float  # the largest, absolute
    max_output: float  # output of torch, absolute
    exact: int  # images within EXACT_TOLERANCE
    cosine: float  # the smallest of an image's outputs with torch's
    agreement: float | None  # in percent: the same first class; None for outputs that are no classes
    kl: float | None  # to torch, mean; likewise


def check_outputs(
    model: nn.Module, engine: Engine, path: Path, precision: str, images: Tensor | None
) -> tuple[OutputCheck, ...]:
    """Run a file on several batches, of noise if there are no images; raises GTPError if it is not the model."""
    inputs, kind = host_of(model).inputs, output_spec(model).kind
    if images is None:
        shape = (sum(BATCHES), inputs.channels, *inputs.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    images = images.float().cpu()
    images = images.repeat(-(-sum(BATCHES) // len(images)), 1, 1, 1)[: sum(BATCHES)]
    batches = images.split(list(BATCHES))
    actual = run_file(engine, path, precision, [batch.contiguous().numpy() for batch in batches])
    with torch.inference_mode(), eval_mode(model):
        expected = [primary_output(model(batch), kind) for batch in batches]
    checks = tuple(
        compare_outputs(one, torch.from_numpy(other), kind == "classes")
        for one, other in zip(expected, actual, strict=True)
    )
    problem = _problem(checks, engine, precision)
    if problem is not None:
        raise GTPError(f"the exported file is not what torch computes: {problem}; nothing was written")
    return checks


def run_file(engine: Engine, path: Path, precision: str, batches: Sequence[Array]) -> list[Array]:
    """The outputs of a new file; raises GTPError if the engine fails or crashes."""
    process = EngineProcess(engine, path, precision, name="the exported file", advice="nothing was written")
    try:
        return [process(batch) for batch in batches]
    finally:
        process.end()


def compare_outputs(expected: Tensor, actual: Tensor, classes: bool) -> OutputCheck:
    """Outputs of an engine against those of torch for the same images."""
    if expected.shape != actual.shape:
        raise GTPError(
            f"the engine's output is {list(actual.shape)}, torch's {list(expected.shape)}; nothing was written"
        )
    one, other = expected.flatten(1).double(), actual.flatten(1).double()
    difference, largest = (one - other).abs().amax(dim=1), float(one.abs().max())
    agreement = kl = None
    if classes:
        agreement = 100 * float((one.argmax(dim=1) == other.argmax(dim=1)).double().mean())
        kl = float(kl_per_image(one, other).mean())
    cosine = torch.nn.functional.cosine_similarity(rescale(one), rescale(other), dim=1)
    exact = int((difference <= EXACT_TOLERANCE * max(largest, 1.0)).sum())
    return OutputCheck(len(one), float(difference.max()), largest, exact, float(cosine.min()), agreement, kl)


def _problem(checks: Sequence[OutputCheck], engine: Engine, precision: str) -> str | None:
    """Why a file is refused; None if it is good."""
    allowed = engine.precisions[precision]
    if not all(math.isfinite(check.max_difference) for check in checks):
        return "its outputs are not finite"
    images, exact = sum(check.batch for check in checks), sum(check.exact for check in checks)
    if allowed.exact and exact < 0.75 * images:
        worst = max(check.max_difference for check in checks)
        count = f"only {exact} of {images} images are within {EXACT_TOLERANCE:g} of it"
        return f"{count}, the largest difference is {worst:.2g}"
    for check in checks:
        if check.kl is not None and check.kl > allowed.max_kl:
            return f"KL is {check.kl:.3g} at batch {check.batch}, more than {allowed.max_kl}"
        if check.kl is None and check.cosine < allowed.min_cosine:
            return f"the cosine is {check.cosine:.3g} at batch {check.batch}, less than {allowed.min_cosine}"
    return None
