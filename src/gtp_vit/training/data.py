"""Which images a step sees, in which order, and how they are mixed: functions of (seed, epoch, step, part) alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gtp_vit.data.dataset import ImageFiles, InMemory
from gtp_vit.data.items import Batch, Item, collate
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.errors import GTPError
from gtp_vit.training.settings import Training

ORDER, IMAGE, PART = range(3)  # first number of a random key


@contextlib.contextmanager
def drawn_from(*key: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators by `key`, and restore them afterwards."""
    first, second = (int(word) for word in np.random.SeedSequence(key).generate_state(2))
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(first)
        np.random.seed(first)
        torch.manual_seed(first << 32 | second)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class Draws(Dataset[Item]):
    """The images of one epoch; the same image drawn twice is augmented in two ways."""

    def __init__(self, images: Dataset[Item], seed: int, epoch: int) -> None:
        self.images, self.seed, self.epoch = images, seed, epoch

    def __getitem__(self, key: tuple[int, int]) -> Item:
        draw, place = key
        with drawn_from(IMAGE, self.seed, self.epoch, draw):
            return self.images[place]


def open_training_images(model: nn.Module, data: DataSettings, settings: Training) -> ImageFiles:
    """Augmented images, accessible by index."""
    dataset = open_images(model, data, settings.augment())
    if isinstance(dataset, IterableDataset):
        raise GTPError(
            f"{data.dataset} is a stream, whose images have no index: it cannot be shuffled or resumed; "
            "give folders, hfds/NAME or torch/NAME"
        )
    return dataset


def without_labels(dataset: Dataset[Item]) -> Dataset[Item]:
    """The images with label 0: their own labels may be missing, or of classes that the model does not have."""
    if isinstance(dataset, InMemory):
        return InMemory(dataset.images, torch.zeros_like(dataset.labels))
    return Unlabelled(dataset)


class Unlabelled(Dataset[Item]):
    """Images with label 0."""

    def __init__(self, images: Dataset[Item]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        return self.images[index]._replace(label=0)


def steps_of_epoch(images: int, settings: Training) -> int:
    """The number of whole steps; which images are left over differs from epoch to epoch."""
    if images < settings.batch_size:
        fits = images - images % settings.part if images >= settings.part else images
        more = "" if images >= settings.part else f" --micro-batch {images}"
        raise GTPError(
            f"a step sees {settings.batch_size} images, but there are only {images}; give --batch-size {fits}{more}"
        )
    return images // settings.batch_size


def order(images: int, settings: Training, epoch: int) -> Tensor:
    """Places of the images in the order of this epoch; each `repeats` times, as many as there are images in all."""
    with drawn_from(ORDER, settings.train_seed, epoch):
        shuffled = torch.randperm(images)
    return shuffled.repeat_interleave(settings.repeats)[:images]


def parts_of(
    images: int, settings: Training, epoch: int, first: int, share: tuple[int, int]
) -> Iterator[list[tuple[int, int]]]:
    """(draw, place) of each image of each part that this process computes, from step `first` on.

    One step at a time: as a list, those of ImageNet would fill hundreds of megabytes of every process and reader.
    """
    rank, processes = share
    places = order(images, settings, epoch)
    for step in range(first, steps_of_epoch(images, settings)):
        begin, end = step * settings.batch_size, (step + 1) * settings.batch_size
        draws = list(zip(range(begin, end), places[begin:end].tolist(), strict=True))
        # Neighbours, which may be repeats of one image, go to different parts.
        for part in range(rank, settings.parts, processes):
            yield draws[part :: settings.parts]


def load(
    dataset: Dataset[Item], settings: Training, epoch: int, first: int, *, share: tuple[int, int], workers: int
) -> Iterator[Batch]:
    """This process's parts of an epoch, from step `first` on."""
    parts = parts_of(len(dataset), settings, epoch, first, share)  # type: ignore[arg-type]
    draws = Draws(dataset, settings.train_seed, epoch)
    return iter(DataLoader(draws, batch_sampler=parts, num_workers=workers, collate_fn=collate))


class Mixer:
    """timm's mixup and cutmix, and label smoothing: images in, images and soft labels out."""

    def __init__(self, settings: Training, classes: int) -> None:
        from timm.data import Mixup

        self.mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.smoothing, num_classes=classes)
        self.mixup.mixup_enabled = settings.mixes
        self.labels, self.classes = settings.labels, classes

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.mixup.mixup_enabled and len(images) % 2:
            from timm.data.mixup import mixup_target

            return images, mixup_target(self.known(labels), self.classes, 1.0, self.mixup.label_smoothing)
        even = len(images) // 2 * 2  # an image that could not be read leaves one without a partner
        return self.mixup(images[:even].clone(), self.known(labels[:even]))

    def known(self, labels: Tensor) -> Tensor:
        """Labels, checked to be classes of the model; zeros if labels are not used."""
        if not self.labels:
            return torch.zeros_like(labels)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            wrong = int(labels.max()) if int(labels.max()) >= self.classes else int(labels.min())
            raise GTPError(f"an image has label {wrong}; the model has classes 0 to {self.classes - 1}")
        return labels
