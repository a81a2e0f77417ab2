"""Would GTP+ do less damage if ...? Variants of its arithmetic on calibration images, paired with what ships.

    python benchmarks/variants.py vit_tiny_patch16_224 --checkpoint W --data-dir imagenet/calibration

With a calibration: tokens compared on fewer channels, those with the largest part of their length (free) or the first
principal components (whose projection is counted), at the same schedule and at the same MACs; other powers of the
average and of the size. Without one: tokens far longer than the image's median neither leave nor receive. Each variant
replaces a function of methods/gtp_plus/merge.py in this process. KL to the unreduced model on images that the
calibration has not seen, and the paired difference to GTP+ as it is, calibrated or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from gtp_vit import GTPPlus, patch
from gtp_vit.core.loop import run
from gtp_vit.core.schedule import CALIBRATED_SHAPE, DEFAULT_SHAPE
from gtp_vit.core.vit import ForwardPass
from gtp_vit.kernels.arguments import GTPPlusMergeInputs, GTPPlusMergeResult
from gtp_vit.methods.gtp_plus import merge as merging
from gtp_vit.methods.gtp_plus import method as gtp_plus
from gtp_vit.methods.gtp_plus.learning.calibrate import CALIBRATED_FLOOR
from gtp_vit.methods.gtp_plus.learning.sensitivity import REGISTER_NORM_RATIO, RecordTokens, learn_sensitivity
from gtp_vit.methods.gtp_plus.method import CalibratedReducer
from gtp_vit.patching import host_of
from subject import Flags as SubjectFlags
from subject import change, write_figures


@dataclass(frozen=True)
class Flags(SubjectFlags):
    channels: int = 64
    """For comparing tokens on fewer channels."""


@dataclass(frozen=True)
class Fewer:
    """Comparing tokens on `count` numbers: channels of each layer [L, count], or projections of them [L, C, count]."""

    count: int
    channels: Tensor | None = None
    projections: Tensor | None = None

    def units(self, layer: int, unit: Tensor) -> Tensor:
        if self.channels is not None:
            found = unit[..., self.channels[layer]]
        else:
            assert self.projections is not None
            found = unit @ self.projections[layer]
        return F.normalize(found, dim=-1)

    def macs(self, reducer: CalibratedReducer, run: ForwardPass) -> int:
        reducing = [step.keys for step in run.reducing if step.keys > step.out]
        probe = sum(reducing) * reducer.vit.dim
        projected = sum(reducing) * reducer.vit.dim * self.count if self.projections is not None else 0
        return sum(merging.num_similarities(keys) * self.count for keys in reducing) + probe + projected


@contextlib.contextmanager
def comparing(fewer: Fewer) -> Iterator[None]:
    """GTP+ with a calibration compares tokens so."""
    now = {"layer": 0}
    merge, similarity = CalibratedReducer.merge, merging.earlier_similarity

    def watched(self: Any, attention: Any, *rest: Any) -> Any:
        now["layer"] = attention.layer
        return merge(self, attention, *rest)

    def similar(unit: Tensor) -> Tensor:
        return similarity(fewer.units(now["layer"], unit))

    with (
        mock.patch.object(CalibratedReducer, "merge", watched),
        mock.patch.object(CalibratedReducer, "overhead_macs", functools.partialmethod(lambda *a: fewer.macs(*a))),
        mock.patch.object(merging, "earlier_similarity", similar),
    ):
        yield


@contextlib.contextmanager
def protecting_long_tokens() -> Iterator[None]:
    """GTP+ without a calibration leaves tokens alone that are far longer than the image's median."""

    def conserve(ops: object, inputs: GTPPlusMergeInputs) -> GTPPlusMergeResult:
        importance, total = inputs.importance, inputs.x + inputs.branch
        length = total[:, -importance.shape[1] :].norm(dim=2)
        long = (length > REGISTER_NORM_RATIO * length.median(dim=1, keepdim=True).values).float()
        size = torch.ones_like(importance) if inputs.size is None else inputs.size
        found = merging._merge(merging._merge_inputs(inputs, total, importance, size, size, long))
        return merging._with_layer_norm(inputs, found)

    with mock.patch.object(gtp_plus, "gtp_plus_merge", conserve):
        yield


def moments(model: Any, images: Tensor) -> Tensor:
    """The second moments of unit vectors after each layer's attention, [L, C, C]."""
    watched: Any = patch(model, RecordTokens(), shorten_last_block=False, quiet=True)
    found: Tensor = torch.zeros(())
    with torch.inference_mode():
        for part in images.split(50):
            run(watched, part)
            seen = torch.stack([F.normalize(z[:, 1:], dim=2).flatten(0, 1) for z in watched.reducer.recorded])
            found = found + seen.transpose(1, 2) @ seen
    return found


def main(flags: Flags) -> None:
    subject = flags.subject()
    text = learn_sensitivity(subject.model, subject.seen).calibration.to_text()
    costs = host_of(subject.model).costs()
    plain = subject.at_share(GTPPlus(remove=DEFAULT_SHAPE), flags.share)
    start = GTPPlus(remove=CALIBRATED_SHAPE, importance_floor=CALIBRATED_FLOOR, calibration=text)
    calibrated = subject.at_share(start, flags.share)
    second = moments(subject.model, subject.seen)
    energy = second.diagonal(dim1=1, dim2=2)
    largest = Fewer(flags.channels, channels=energy.topk(flags.channels, dim=1).indices)
    components = torch.linalg.eigh(second.double()).eigenvectors[..., -flags.channels :].float()
    principal = Fewer(flags.channels, projections=components)
    rows: list[dict[str, Any]] = []

    def measured(method: GTPPlus) -> Tensor:
        return subject.damage(method, kernels="torch")

    def add(name: str, against: Tensor, make: Callable[[], GTPPlus], variant: Any) -> None:
        with variant:
            method = make()
            share = costs.macs_with(method) / costs.unreduced
            found = measured(method)
        rows.append({"variant": name, "share": round(share, 4), **change(found, against)})
        print(flags.model, json.dumps(rows[-1]), flush=True)

    none = contextlib.nullcontext()
    before = measured(plain)
    add("GTP+", before, lambda: plain, none)
    add("long tokens left alone", before, lambda: plain, protecting_long_tokens())
    add("calibrated, against GTP+", before, lambda: calibrated, none)
    own = measured(calibrated)
    for name, fewer in (("largest channels", largest), ("principal components", principal)):
        add(f"{flags.channels} {name}, same schedule", own, lambda: calibrated, comparing(fewer))
        add(
            f"{flags.channels} {name}, same MACs",
            own,
            lambda: subject.at_share(calibrated, flags.share),
            comparing(fewer),
        )
    for power in (0.0, 0.5, 1.0):
        add(f"averages by importance to the power {power:g}", own, lambda: calibrated,
            mock.patch.object(merging, "WEIGHT_POWER", power))  # fmt: skip
    for setting, values in (("importance_floor", (0.15, 0.6)), ("size_bias", (0.8, 1.0))):
        for value in values:
            changed = dataclasses.replace(calibrated, **{setting: value})  # type: ignore[arg-type]
            add(f"{setting} {value:g}", own, lambda changed=changed: changed, none)  # type: ignore[misc]
    write_figures(flags, ("model", "share", "images", "others", "channels"), rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
