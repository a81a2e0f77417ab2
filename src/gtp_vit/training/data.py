"""The images of a step, their order and mixing: functions of (seed, epoch, step, part) alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gtp_vit.data.dataset import ImageDataset, InMemoryDataset
from gtp_vit.data.items import Batch, Item, collate
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.errors import GTPError
from gtp_vit.training.settings import TrainingConfig

ORDER, IMAGE, PART = range(3)  # first number of a random key


@contextlib.contextmanager
def seeded(*key: int) -> Iterator[None]:
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


class SeededAugmentation(Dataset[Item]):
    """The images of one epoch; the same image drawn twice is augmented in two ways."""

    def __init__(self, images: Dataset[Item], seed: int, epoch: int) -> None:
        self.images, self.seed, self.epoch = images, seed, epoch

    def __getitem__(self, key: tuple[int, int]) -> Item:
        draw, place = key
        with seeded(IMAGE, self.seed, self.epoch, draw):
            return self.images[place]


def open_training_images(model: nn.Module, data: DataSettings, settings: TrainingConfig) -> ImageDataset:
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
    if isinstance(dataset, InMemoryDataset):
        return InMemoryDataset(dataset.images, torch.zeros_like(dataset.labels))
    return UnlabelledDataset(dataset)


class UnlabelledDataset(Dataset[Item]):
    """Images with label 0."""

    def __init__(self, images: Dataset[Item]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        return self.images[index]._replace(label=0)


def steps_of_epoch(images: int, settings: TrainingConfig) -> int:
    """The number of whole steps; which images are left over differs from epoch to epoch."""
    if images < settings.batch_size:
        fits = images - images % settings.micro_batch_size if images >= settings.micro_batch_size else images
        more = "" if images >= settings.micro_batch_size else f" --micro-batch {images}"
        raise GTPError(
            f"a step sees {settings.batch_size} images, but there are only {images}; give --batch-size {fits}{more}"
        )
    return images // settings.batch_size


def epoch_order(images: int, settings: TrainingConfig, epoch: int) -> Tensor:
    """Places of the images in the order of this epoch; each `repeats` times, as many as there are images in all."""
    with seeded(ORDER, settings.train_seed, epoch):
        shuffled = torch.randperm(images)
    return shuffled.repeat_interleave(settings.repeats)[:images]


def micro_batches_of(
    images: int, settings: TrainingConfig, epoch: int, first: int, rank_and_world_size: tuple[int, int]
) -> Iterator[list[tuple[int, int]]]:
    """(draw, place) of each image of each part that this process computes, from step `first` on.

    One step at a time: as a list, those of ImageNet would fill hundreds of megabytes of every process and reader.
    """
    rank, processes = rank_and_world_size
    places = epoch_order(images, settings, epoch)
    for step in range(first, steps_of_epoch(images, settings)):
        begin, end = step * settings.batch_size, (step + 1) * settings.batch_size
        draws = list(zip(range(begin, end), places[begin:end].tolist(), strict=True))
        # Neighbours, which may be repeats of one image, go to different parts.
        for part in range(rank, settings.num_micro_batches, processes):
            yield draws[part :: settings.num_micro_batches]


def load_micro_batches(
    dataset: Dataset[Item],
    settings: TrainingConfig,
    epoch: int,
    first: int,
    *,
    rank_and_world_size: tuple[int, int],
    workers: int,
) -> Iterator[Batch]:
    """This process's parts of an epoch, from step `first` on."""
    parts = micro_batches_of(len(dataset), settings, epoch, first, rank_and_world_size)  # type: ignore[arg-type]
    draws = SeededAugmentation(dataset, settings.train_seed, epoch)
    return iter(DataLoader(draws, batch_sampler=parts, num_workers=workers, collate_fn=collate))


class Mixer:
    """timm's mixup and cutmix, and label smoothing: images in, images and soft labels out."""

    def __init__(self, settings: TrainingConfig, classes: int) -> None:
        from timm.data import Mixup

        self.mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.smoothing, num_classes=classes)
        self.mixup.mixup_enabled = settings.uses_mixup
        self.labels, self.classes = settings.labels, classes

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.mixup.mixup_enabled and len(images) % 2:
            from timm.data.mixup import mixup_target

            return images, mixup_target(self.soft_labels(labels), self.classes, 1.0, self.mixup.label_smoothing)
        even = len(images) // 2 * 2  # an image that could not be read leaves one without a partner
        return self.mixup(images[:even].clone(), self.soft_labels(labels[:even]))

    def soft_labels(self, labels: Tensor) -> Tensor:
        """Labels, checked to be classes of the model; zeros if labels are not used."""
        if not self.labels:
            return torch.zeros_like(labels)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            wrong = int(labels.max()) if int(labels.max()) >= self.classes else int(labels.min())
            raise GTPError(f"an image has label {wrong}; the model has classes 0 to {self.classes - 1}")
        return labels
