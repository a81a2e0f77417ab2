"""The settings of finetuning; the defaults are the paper's: DeiT's augmentation and regularisation, 30 epochs.

A step of the optimiser sees `batch_size` images over all processes, in parts of `micro_batch` images; which process
computes which part changes nothing. None means: as the method's authors did (protocols.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

from gtp_vit.errors import SettingError, check_name, check_range

Precision = Literal["off", "bfloat16"]


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a run; names are timm's where timm has one.

    >>> TrainingConfig(epochs=5).batch_size
    512
    """

    epochs: int = 30
    """Passes over the data."""
    batch_size: int = 512
    """Images of one step of the optimiser, over all processes."""
    micro_batch: int = 64
    """Images that a process computes at a time; the rest of a step is accumulated."""
    lr: float | None = None
    """Highest learning rate; by default 1e-5, and what the authors of EViT and DynamicViT used for these."""
    min_lr: float | None = None
    """Learning rate at the end; by default 1e-6, EViT 2e-6."""
    learned_lr: float | None = None
    """Highest learning rate of a method's own parts, DynamicViT's predictors; by default 100 times --lr."""
    weight_decay: float | None = None
    """Weight decay of AdamW; by default 0.05, EViT 1e-6."""
    warmup: float | None = None
    """Fraction of the run in which the learning rate rises; by default 5 of 30 epochs, EViT none."""
    drop_path: float | None = None
    """Stochastic depth in the last layer, less in those before; by default 0.1, EViT and DynamicViT none."""
    clip_grad: float | None = None
    """Clip gradients to this norm."""
    ema: float = 0.0
    """Decay of a moving average of the weights, e.g. 0.9999, which is then what is evaluated and written; 0 = none."""
    amp: Precision = "off"
    """Mixed precision, on machines that have it."""
    grad_checkpointing: bool = False
    """Gradient checkpointing: less memory, more time."""
    distill: float | None = None
    """Weight of the KL divergence to the unreduced model's soft logits, besides the labels' of weight 1; 0 = none. By
    default none, with --no-labels 1, and 0.5 for DynamicViT."""
    labels: bool = True
    """--no-labels: learn from the unreduced model only; images need no labels then."""
    ramp_start: float = 0.0
    """Epochs without any reduction at the beginning."""
    ramp_epochs: float = 0.0
    """Epochs after these in which the reduction grows to its full strength, along a cosine."""
    auto_augment: str = "rand-m9-mstd0.5-inc1"
    """timm's description of the automatic augmentation; empty = none."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Area range of the random crop. Images of up to 32 pixels are shifted instead, as in DeiT; 1 1 switches both
    off."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    reprob: float = 0.25
    """Probability of erasing a random rectangle."""
    mixup: float = 0.8
    """Alpha of mixup; 0 = none."""
    cutmix: float = 1.0
    """Alpha of cutmix; 0 = none. With both, each is used for half of the parts."""
    smoothing: float = 0.1
    """Label smoothing."""
    repeats: int = 3
    """Repeated augmentation: draws of an image per epoch, which then sees one n-th of the images (DeiT: 3)."""
    train_seed: int = 0
    """Seed of everything that training draws: order, augmentation, mixing, dropped layers."""
    save_every: int = 0
    """Steps between two checkpoints inside an epoch; 0 = only after each epoch."""
    log_every: int = 20
    """Steps between two lines of the log."""

    def check(self) -> None:
        """Raise SettingError where a setting is out of range."""
        for name in ("epochs", "batch_size", "micro_batch", "repeats", "log_every"):
            check_range(name, getattr(self, name), 1, 10**6, integer=True)
        check_range("save_every", self.save_every, 0, 10**9, integer=True)
        check_range("train_seed", self.train_seed, 0, 2**32 - 1, integer=True)
        for name, high in (("lr", 10.0), ("learned_lr", 10.0), ("clip_grad", 1e9)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, high, exclude_low=True)
        for name, high in (("min_lr", 10.0), ("weight_decay", 10.0), ("warmup", 1.0), ("drop_path", 0.9)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, high)
        for name in ("hflip", "reprob", "smoothing"):
            check_range(name, getattr(self, name), 0, 1)
        for name in ("distill", "mixup", "cutmix", "ramp_start", "ramp_epochs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, 10**4)
        if self.distill == 0 and not self.labels:
            raise SettingError(
                "distill is 0 and labels are not used: nothing is left to learn from; give more, or use labels"
            )
        check_range("ema", self.ema, 0, 0.999999)
        check_name("amp", self.amp, get_args(Precision))
        low, high = self.scale
        check_range("scale", low, 0, high, exclude_low=True)
        check_range("scale", high, low, 1)
        if self.batch_size % self.micro_batch_size:
            raise SettingError(
                f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}; give one that does"
            )
        if self.micro_batch_size % 2 and self.uses_mixup:
            raise SettingError(
                f"micro_batch is {self.micro_batch_size}; mixup and cutmix mix pairs: give an even number, or none"
            )
        if self.ramp_start + self.ramp_epochs > self.epochs:
            raise SettingError(
                f"the reduction reaches full strength after {self.ramp_start + self.ramp_epochs:g} epochs, and "
                f"there are {self.epochs}; shorten ramp_start or ramp_epochs"
            )

    @property
    def micro_batch_size(self) -> int:
        """Number of images in one part."""
        return min(self.micro_batch, self.batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Number of parts in one step."""
        return self.batch_size // self.micro_batch_size

    @property
    def uses_mixup(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def strength(self, epoch: float) -> float:
        """Strength of the reduction in this epoch (counted from 0), rising from 0 to 1 along half a cosine.

        >>> [round(TrainingConfig(ramp_start=1, ramp_epochs=4).strength(epoch), 2) for epoch in range(6)]
        [0.0, 0.0, 0.15, 0.5, 0.85, 1.0]
        """
        if epoch < self.ramp_start:
            return 0.0
        if epoch >= self.ramp_start + self.ramp_epochs:
            return 1.0
        return 0.5 - 0.5 * math.cos(math.pi * (epoch - self.ramp_start) / self.ramp_epochs)

    def augment(self) -> dict[str, object]:
        """Arguments for timm.data.create_transform."""
        return {
            "scale": self.scale,
            "hflip": self.hflip,
            "auto_augment": self.auto_augment or None,
            "color_jitter": None,
            "re_prob": self.reprob,
            "re_mode": "pixel",
        }

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)
