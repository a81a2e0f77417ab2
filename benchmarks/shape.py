"""One shape of GTP+'s schedule for several models, with what it learned of each: the schedule "learned".

    python benchmarks/shape.py --models deit_tiny_patch16_224 vit_tiny_patch16_224 --weights FOLDER \
        --data-dir imagenet/calibration --json docs/results/shape.json

A local search: one layer removes fewer tokens and another as many more as keep the MACs; what does less damage, mean
over the models in units of each one's damage at the start, is where it goes on. The images that are searched on are
neither those that were learned from nor those that the result is checked on. All models must have the same sizes.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from gtp_vit import GTPPlus
from gtp_vit.core.schedule import DEFAULT_SHAPE
from gtp_vit.methods.gtp_plus.learning.calibrate import CALIBRATED_FLOOR
from gtp_vit.methods.gtp_plus.learning.sensitivity import learn_sensitivity
from subject import Subject, change, weights_of, write_figures


@dataclass(frozen=True)
class Flags:
    models: tuple[str, ...]
    """Names of models that score classes, of the same sizes."""
    weights: Path
    """Folder with a file of weights for each, whose name begins with the model's."""
    data_dir: Path
    """Folder of images; never those that results are reported on."""
    share: float = 0.5514
    """Of the unreduced model's MACs: those of GTP at P = 14 on a Ti model."""
    checked: tuple[float, ...] = (0.5514, 0.7108)
    """Shares at which the result is checked."""
    images: int = 400
    """To learn from."""
    search_images: int = 240
    """To search on."""
    others: int = 360
    """To check on."""
    minutes: float = 16
    """Of the search."""
    start: tuple[int, ...] = DEFAULT_SHAPE
    """The schedule to begin with, and to compare with."""
    seed: int = 1
    """Of the search."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the figures here as well."""


class Search:
    """The models, each with settings that hold what was learned of it."""

    def __init__(self, flags: Flags) -> None:
        self.flags, self.subjects, self.settings = flags, [], []
        for name in flags.models:
            count = flags.search_images + flags.others
            self.subjects.append(
                Subject.read(name, weights_of(flags.weights, name), flags.data_dir, flags.images, count)
            )
            text = learn_sensitivity(self.subjects[-1].model, self.subjects[-1].seen).calibration.to_text()
            self.settings.append(GTPPlus(remove=flags.start, importance_floor=CALIBRATED_FLOOR, calibration=text))
        self.space = self.subjects[0].space(self.settings[0])

    def damage(self, plan: list[int], part: slice) -> Tensor:
        """KL of every model and image, [models, images]."""
        pairs = zip(self.subjects, self.settings, strict=True)
        methods = [(subject, self.space.with_plan(plan, settings)) for subject, settings in pairs]
        return torch.stack([subject.damage(method, part) for subject, method in methods])  # type: ignore[arg-type]

    def run(self) -> list[int]:
        """The best plan that was found at the share, by the images to search on."""
        target, choose = self.flags.share * self.space.unreduced_macs, random.Random(self.flags.seed)
        every, some = slice(0, self.flags.search_images), slice(0, self.flags.search_images // 3)
        best = self.space.fit(self.space.plan_of(self.settings[0]), target)  # type: ignore[arg-type]
        assert best is not None
        least = self.damage(best, every)
        unit, tried, again, begin = least.mean(dim=1, keepdim=True), {tuple(best)}, None, time.time()
        while time.time() - begin < 60 * self.flags.minutes:
            layers = list(self.space.layers)
            taken = choose.choice([layer for layer in layers if best[layer]])
            filled = choose.choice([layer for layer in layers if layer != taken])
            taken, filled, amount = again or (taken, filled, choose.choice((2, 4, 8)))
            again, fewer = None, list(best)
            fewer[taken] -= min(amount, fewer[taken])
            plan = self.space.rebalance(fewer, filled, target)
            if plan is None or tuple(plan) in tried:
                continue
            tried.add(tuple(plan))
            worse = ((self.damage(plan, some) - least[:, some]) / unit).mean(dim=0)
            if worse.mean() > 0.5 * worse.std() / len(worse) ** 0.5:
                continue
            found = self.damage(plan, every)
            if ((found - least) / unit).mean() < 0:
                best, least, again = plan, found, (taken, filled, amount)
                part = [round(each, 3) for each in (least.mean(dim=1, keepdim=True) / unit).flatten().tolist()]
                print(f"{(time.time() - begin) / 60:.1f} minutes, {len(tried)} plans: {best} {part}", flush=True)
        return best

    def check(self, shape: list[int]) -> list[dict[str, Any]]:
        """The shape against the start's on other images, at each share."""
        part, rows = slice(self.flags.search_images, None), []
        for subject, name, settings in zip(self.subjects, self.flags.models, self.settings, strict=True):
            for share in self.flags.checked:
                before = subject.at_share(settings, share)
                after = subject.at_share(subject.space(settings).with_plan(shape), share)  # type: ignore[arg-type]
                figures = change(subject.damage(after, part), subject.damage(before, part))
                rows.append({"model": name, "share": share, "plan": after.remove, **figures})
                print(json.dumps(rows[-1]), flush=True)
        return rows


def main(flags: Flags) -> None:
    torch.set_num_threads(flags.threads)
    search = Search(flags)
    shape = search.run()
    rows = search.check(shape)
    names = ("models", "share", "start", "seed", "images", "search_images", "others", "minutes")
    write_figures(flags, names, shape=shape, rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
