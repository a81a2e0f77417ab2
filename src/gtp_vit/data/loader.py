"""Batches of a data set, in its order; several processes share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from gtp_vit.data.dataset import InMemoryDataset, StreamingImageDataset
from gtp_vit.data.items import Batch, Item, collate
from gtp_vit.errors import GTPError


def batches(
    dataset: Dataset[Item],
    *,
    batch_size: int,
    workers: int,
    skip: int = 0,
    pin: bool = False,
    rank_and_world_size: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Batches in the order of the data set, without its first `skip` images.

    `rank_and_world_size` is (rank, processes): the process then gets every n-th image, n = processes, from its rank on.
    """
    rank, processes = rank_and_world_size
    if isinstance(dataset, InMemoryDataset):  # no copy, no process
        places = range(skip + rank, len(dataset), processes)
        yield from planned_batches(dataset, (places[at : at + batch_size] for at in range(0, len(places), batch_size)))
        return
    if isinstance(dataset, StreamingImageDataset):
        if processes > 1:
            raise GTPError(
                "a stream of images cannot be shared by several processes; run one, or give folders or an indexed set"
            )
        read = 0
        for batch in DataLoader(dataset, batch_size, num_workers=min(workers, 1), collate_fn=collate):
            read += len(batch.indices) + len(batch.unreadable)
            if read > skip:  # the journal is written batch by batch, so a run stops between two of them
                yield batch
        return
    rest = Subset(dataset, range(skip + rank, len(dataset), processes))  # type: ignore[arg-type]
    yield from DataLoader(rest, batch_size, num_workers=workers, collate_fn=collate, pin_memory=pin)


def planned_batches(
    dataset: Dataset[Item], plan: Iterable[range], *, workers: int = 0, pin: bool = False
) -> Iterator[Batch]:
    """One batch for each range of places, whichever process asks: what is in a batch decides the last bits."""
    if not isinstance(dataset, InMemoryDataset):
        yield from DataLoader(dataset, batch_sampler=plan, num_workers=workers, collate_fn=collate, pin_memory=pin)  # type: ignore[arg-type]
        return
    for places in plan:
        own = slice(places.start, places.stop, places.step)
        names = tuple(f"image {place}" for place in places)
        yield Batch(torch.tensor(places), dataset.images[own], dataset.labels[own], {}, names)


def evenly_spaced_images(dataset: Dataset[Item], count: int) -> Dataset[Item]:
    """`count` images of a data set, evenly spread as its order is often by class; all if it has no more, or for 0."""
    if not count or not isinstance(dataset, Sized) or count >= len(dataset):
        return dataset
    places = [index * len(dataset) // count for index in range(count)]
    if isinstance(dataset, InMemoryDataset):
        return InMemoryDataset(dataset.images[places], dataset.labels[places])
    return Subset(dataset, places)


def first_images(dataset: Dataset[Item], count: int, *, batch_size: int, workers: int) -> tuple[Tensor, list[str]]:
    """The first images that can be read, at most `count`, and what could not be read on the way."""
    parts: list[Tensor] = []
    problems: list[str] = []
    for batch in batches(dataset, batch_size=batch_size, workers=workers):
        parts.append(batch.images)
        problems += batch.unreadable.values()
        if sum(map(len, parts)) >= count:
            break
    return torch.cat(parts)[:count] if parts else torch.zeros(0), problems


def take_images(dataset: Dataset[Item], count: int, model: nn.Module) -> Tensor:
    """The first images that can be read, at most `count`, on the model's device and in its precision."""
    images, _ = first_images(dataset, count, batch_size=count, workers=0)
    if not len(images):
        raise GTPError("none of the images could be read")
    weight = next(model.parameters())
    return images.to(weight.device, weight.dtype)
