"""A classifier, images that GTP+ learns from, and others that its damage is measured on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtp_vit import GTPPlus, create_model, patch
from gtp_vit.data.loader import first_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.patching import host_of
from gtp_vit.tuning.space import Limits, Space


@dataclass(frozen=True)
class Subject:
    """Learn from `seen`, measure on `others`."""

    model: Any
    seen: Tensor
    others: Tensor

    @classmethod
    def read(cls, name: str, checkpoint: Path, folder: Path, images: int, others: int) -> Subject:
        """The images are the same for every model, in an order that mixes the classes."""
        model = create_model(name, checkpoint=checkpoint)
        files: Any = open_images(model, DataSettings(data_dir=folder, labels=False, ignore_exif=True))
        if len(files) < images + others:
            raise SystemExit(f"{folder} has {len(files)} images; {images} to learn from and {others} others are wanted")
        mixed = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
        wanted = torch.utils.data.Subset(files, mixed[: images + others])
        read = first_images(wanted, images + others, model)
        return cls(model, read[:images], read[images:])

    def outputs(self, model: Any, part: slice) -> Tensor:
        with torch.inference_mode():
            return torch.cat([model(batch) for batch in self.others[part].split(50)])

    @functools.cached_property
    def unreduced(self) -> Tensor:
        return self.outputs(self.model, slice(None))

    def damage(self, method: GTPPlus, part: slice = slice(None), **kernels: Any) -> Tensor:
        """KL of each of the other images, or of a part of them."""
        return kl_per_image(self.unreduced[part], self.outputs(patch(self.model, method, quiet=True, **kernels), part))

    def space(self, method: GTPPlus) -> Space:
        return Space(host_of(self.model).costs(), method, Limits())

    def at_share(self, method: GTPPlus, share: float) -> GTPPlus:
        return at_share(self.space(method), share)


def at_share(space: Space, share: float) -> GTPPlus:
    """The shape of a space's method at this share of the unreduced model's MACs, its own work counted."""
    plan = space.fit(space.plan_of(space.method), share * space.whole)
    assert plan is not None
    return space.with_plan(plan)  # type: ignore[return-value]


def change(found: Tensor, against: Tensor) -> dict[str, float]:
    """Mean KL, and the paired difference to another's in percent of that, with its standard error."""
    difference = 100 * (found - against) / against.mean()
    return {
        "kl": round(float(found.mean()), 5),
        "change %": round(float(difference.mean()), 1),
        "standard error": round(float(difference.std()) / len(found) ** 0.5, 1),
    }
