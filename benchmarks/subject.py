"""A classifier, images that GTP+ learns from, and others that its damage is measured on."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from gtp_vit import GTPPlus, create_model, patch
from gtp_vit.data.loader import take_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.patching import host_of
from gtp_vit.tuning.space import ScheduleLimits, ScheduleSpace


@dataclass(frozen=True)
class Flags:
    """A model, images to learn from, and others to measure on."""

    model: Annotated[str, tyro.conf.Positional]
    """Name of a model that scores classes."""
    checkpoint: Path
    """Its weights."""
    data_dir: Path
    """Folder of images; never those that results are reported on."""
    share: float = 0.55
    """Of the unreduced model's MACs."""
    images: int = 300
    """To learn from."""
    others: int = 300
    """To measure on."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the figures here as well."""

    def subject(self) -> Subject:
        """The model and its images, with the threads of the flags."""
        torch.set_num_threads(self.threads)
        return Subject.read(self.model, self.checkpoint, self.data_dir, self.images, self.others)


def weights_of(folder: Path, model: str) -> Path:
    """The file of a model's weights in a folder: its name begins with the model's."""
    files = sorted(folder.glob(f"{model.split('.', 1)[0]}*"))
    found = [path for path in files if path.suffix in (".safetensors", ".pth", ".tar", ".pt")]
    if not found:
        raise SystemExit(f"there are no weights of {model} in {folder}")
    return found[0]


def write_figures(flags: Any, names: Sequence[str], **figures: Any) -> None:
    """Write figures, and the flags with these names, where the flags say."""
    if flags.json is not None:
        options = {name: getattr(flags, name) for name in names}
        flags.json.write_text(json.dumps({**options, **figures}, indent=1) + "\n")


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
        read = take_images(wanted, images + others, model)
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

    def space(self, method: GTPPlus) -> ScheduleSpace:
        return ScheduleSpace(host_of(self.model).costs(), method, ScheduleLimits())

    def at_share(self, method: GTPPlus, share: float) -> GTPPlus:
        return at_share(self.space(method), share)


def at_share(space: ScheduleSpace, share: float) -> GTPPlus:
    """The shape of a space's method at this share of the unreduced model's MACs, its own work counted."""
    plan = space.fit(space.plan_of(space.method), share * space.unreduced_macs)
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
