"""What does calibration give, and which of its parts? On images that it was not learned on.

    python benchmarks/calibration.py vit_tiny_patch16_224 --checkpoint W --data-dir imagenet/calibration

GTP+ with and without a calibration at the same MACs, and with parts of it left out: the probe, the registers, averages
by importance. KL divergence to the unreduced model, with the paired difference to GTP+ without calibration.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from gtp_vit import GTPPlus, create_model, patch
from gtp_vit.inputs.data import DataSettings, batches, open_images
from gtp_vit.measure.classes import kl_per_image
from gtp_vit.measure.sensitivity import learn_sensitivity
from gtp_vit.methods import merging
from gtp_vit.patch import host_of
from gtp_vit.search.calibrate import CALIBRATED_FLOOR
from gtp_vit.search.space import Limits, Space


@dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.Positional]
    """Name of a model that scores classes."""
    checkpoint: Path
    """Its weights."""
    data_dir: Path
    """Folder of images; never those that results are reported on."""
    share: float = 0.55
    """Of the unreduced model's MACs."""
    images: int = 400
    """To learn from."""
    others: int = 300
    """To measure on."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the figures here as well."""


def main(flags: Flags) -> None:
    torch.set_num_threads(flags.threads)
    model = create_model(flags.model, checkpoint=flags.checkpoint)
    files = open_images(model, DataSettings(data_dir=flags.data_dir, labels=False))
    mixed = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[arg-type]
    wanted = torch.utils.data.Subset(files, mixed[: flags.images + flags.others])
    images = torch.cat([batch.images for batch in batches(wanted, batch_size=50, workers=1)])
    begin = time.time()
    learned = learn_sensitivity(model, images[: flags.images])
    seconds, own, others = time.time() - begin, learned.calibration, images[flags.images :]
    rows: list[dict[str, Any]] = [{"seconds": round(seconds, 1), "fit": learned.fit, "registers": own.registers}]

    host = host_of(model)
    start = GTPPlus(propagate=GTPPlus.at(host.vit, 0.5).propagate)
    space = Space(host.costs(), start, Limits())
    plan = space.fit(space.plan_of(start), flags.share * space.whole)
    assert plan is not None

    def outputs(fast: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([fast(part) for part in others.split(50)])

    base = outputs(model)
    before = kl_per_image(base, outputs(patch(model, space.with_plan(plan))))
    rows.append({"variant": "without calibration", "kl": round(float(before.mean()), 5), "plan": plan})
    without = {
        "registers": dataclasses.replace(own, registers=()),
        "probe": dataclasses.replace(own, probe=torch.zeros_like(own.probe)),
    }
    for variant in ("all", "averages by importance", *without):
        text = without.get(variant, own).to_text()
        method = GTPPlus(propagate=tuple(plan), floor=CALIBRATED_FLOOR, calibration=text)
        power = merging.SHARE_POWER
        if variant.startswith("averages"):
            merging.SHARE_POWER = 0.0
        found = kl_per_image(base, outputs(patch(model, method, kernels="torch")))
        merging.SHARE_POWER = power
        difference = (found - before) / before.mean()
        row = {"variant": variant if variant == "all" else f"without {variant}", "kl": round(float(found.mean()), 5)}
        row["change %"] = round(100 * float(difference.mean()), 1)
        rows.append(row | {"standard error": round(100 * float(difference.std()) / len(found) ** 0.5, 1)})
    for row in rows:
        print(json.dumps(row))
    if flags.json is not None:
        flags.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
