"""Items and batches: prepared images with their places, labels and names, or the reason why there is none."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

NO_LABEL = -1


class Item(NamedTuple):
    """One image, or why there is none."""

    image_index: int
    image: Tensor  # zeros if it cannot be read
    label: int
    name: str
    error: str  # "" = none


class Batch(NamedTuple):
    """Images that could be read, and the others' names and problems."""

    indices: Tensor  # [B] places in the data set
    images: Tensor  # [B, channels, height, width]
    labels: Tensor  # [B]
    unreadable: dict[int, str]  # place -> name and problem
    names: tuple[str, ...] = ()  # of the images that could be read


def collate(items: list[Item]) -> Batch:
    """Items as one batch, those that could not be read apart."""
    good = [item for item in items if not item.error]
    # In a reader's process this writes to memory that the other process reads: no copy, and no gaps left in the heap.
    images = default_collate([item.image for item in good]) if good else torch.zeros(0, *items[0].image.shape)
    return Batch(
        torch.tensor([item.image_index for item in good], dtype=torch.long),
        images,
        torch.tensor([item.label for item in good], dtype=torch.long),
        {item.image_index: f"{item.name}: {item.error}" for item in items if item.error},
        tuple(item.name for item in good),
    )
