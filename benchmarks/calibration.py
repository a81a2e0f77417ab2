"""What does calibration give, and which of its parts? On images that it was not learned on.

    python benchmarks/calibration.py vit_tiny_patch16_224 --checkpoint W --data-dir imagenet/calibration

GTP+ with and without a calibration at the same MACs, and with parts of it left out: the shape of its schedule, and on
the shape without calibration the probe, the registers, averages by importance. KL divergence to the unreduced model,
with the paired difference to GTP+ without calibration.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import tyro

from gtp_vit import GTPPlus
from gtp_vit.core.schedule import CALIBRATED_SHAPE, DEFAULT_SHAPE
from gtp_vit.methods.gtp_plus import merge
from gtp_vit.methods.gtp_plus.learning.calibrate import CALIBRATED_FLOOR
from gtp_vit.methods.gtp_plus.learning.sensitivity import learn_sensitivity
from subject import Flags as SubjectFlags
from subject import change, write_figures


@dataclass(frozen=True)
class Flags(SubjectFlags):
    images: int = 400
    """To learn from."""


def main(flags: Flags) -> None:
    subject = flags.subject()
    begin = time.time()
    learned = learn_sensitivity(subject.model, subject.seen)
    seconds, own = time.time() - begin, learned.calibration
    rows: list[dict[str, Any]] = [{"seconds": round(seconds, 1), "fit": learned.fit, "registers": own.registers}]

    def add(name: str, found: torch.Tensor, method: GTPPlus) -> None:
        rows.append({"variant": name, **change(found, before), "plan": method.remove})
        print(json.dumps(rows[-1]), flush=True)

    plain = subject.at_share(GTPPlus(remove=DEFAULT_SHAPE), flags.share)
    before = subject.damage(plain)
    add("without calibration", before, plain)
    without = {
        "registers": dataclasses.replace(own, registers=()),
        "probe": dataclasses.replace(own, probe=torch.zeros_like(own.probe)),
    }
    for variant in ("", "averages by importance", *without):
        settings = GTPPlus(importance_floor=CALIBRATED_FLOOR, calibration=without.get(variant, own).to_text())
        shapes = {", old shape": DEFAULT_SHAPE} if variant else {", old shape": DEFAULT_SHAPE, "": CALIBRATED_SHAPE}
        for shape, plan in shapes.items():
            method = subject.at_share(dataclasses.replace(settings, remove=plan), flags.share)
            power = 0.0 if variant.startswith("averages") else merge.WEIGHT_POWER
            with mock.patch.object(merge, "WEIGHT_POWER", power):
                found = subject.damage(method, kernels="torch")
            add(f"calibrated{variant and f', without {variant}'}{shape}", found, method)
    write_figures(flags, ("model", "share", "images", "others"), rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
