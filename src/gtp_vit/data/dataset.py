"""Data sets of prepared images: files that a reader opens, streams, tensors in memory, and a user's own.

An image that cannot be read does not end a run and is not replaced by another (as timm's own data sets do): it comes
back with the reason, and the caller counts it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from gtp_vit.data import image_file
from gtp_vit.data.items import NO_LABEL, Item
from gtp_vit.data.reader import Reader, files_below
from gtp_vit.data.transforms import Transform
from gtp_vit.errors import GTPError, first_line
from gtp_vit.runs.fingerprint import lines_fingerprint, tensors_fingerprint
from gtp_vit.runs.identity import ImagesIdentity

if TYPE_CHECKING:
    from PIL.Image import Image


class SizedDataset(Protocol):
    """A data set with a length and an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class ImageDataset(Dataset[Item]):
    """Images that a reader opens one by one."""

    def __init__(
        self, reader: Reader, transform: Transform, shape: tuple[int, ...], limit: int = 0, *, ignore_exif: bool = False
    ) -> None:
        self.reader, self.transform, self.shape, self.limit = reader, transform, shape, limit
        self.ignore_exif = ignore_exif
        self.has_labels, self.classes = reader.has_labels, reader.classes

    def __len__(self) -> int:
        return min(len(self.reader), self.limit or len(self.reader))

    def __getitem__(self, index: int) -> Item:
        name = self.reader.name(index)
        try:
            name, file, label = self.reader.open(index)
            with contextlib.closing(file):
                picture = image_file.decode(file, ignore_exif=self.ignore_exif)
                return Item(index, self.transform(picture), _class_number(label), name, "")
        except Exception as error:  # decoders raise many exception types
            return Item(index, torch.zeros(self.shape), NO_LABEL, name, first_line(error))

    def identity(self) -> ImagesIdentity:
        listing = lines_fingerprint(self.reader.listing(len(self)))
        return ImagesIdentity(f"{len(self)}, {listing}", str(self.transform), orientation_words(self.ignore_exif))


class StreamingImageDataset(IterableDataset[Item]):
    """Images of which only the next one is known; places are counted.

    Readers of streams leave out what they cannot decode; if the stream says how many there are, these are reported.
    """

    has_labels, classes = True, None  # as far as is known

    def __init__(
        self,
        stream: Iterable[tuple[Image, int | None]],
        transform: Transform,
        shape: tuple[int, ...],
        limit: int = 0,
        *,
        source: str = "",
        ignore_exif: bool = False,
    ) -> None:
        self.stream, self.transform, self.shape, self.limit = stream, transform, shape, limit
        self.source, self.ignore_exif = source, ignore_exif

    def __iter__(self) -> Iterator[Item]:
        place = -1
        for place, (image, label) in enumerate(itertools.islice(self.stream, self.limit or None)):
            name = f"image {place}"
            try:
                picture = image_file.decode(image, ignore_exif=self.ignore_exif)
                yield Item(place, self.transform(picture), _class_number(label), name, "")
            except Exception as error:
                yield Item(place, torch.zeros(self.shape), NO_LABEL, name, first_line(error))
        if not self.limit:
            for missing in range(place + 1, self._expected_length() or 0):
                problem = "it could not be decoded"
                yield Item(missing, torch.zeros(self.shape), NO_LABEL, "an image of the stream", problem)

    def _expected_length(self) -> int | None:
        try:
            return len(self.stream)  # type: ignore[arg-type]
        except TypeError:
            return None

    def identity(self) -> ImagesIdentity:
        root = getattr(getattr(self.stream, "reader", None), "root", None)
        files = lines_fingerprint(files_below(Path(root or "")))
        count = self._expected_length() or "a stream"
        images = ", ".join(word for word in (self.source, str(count), str(self.limit or "all"), files) if word)
        return ImagesIdentity(images, str(self.transform), orientation_words(self.ignore_exif))


class InMemoryDataset(Dataset[Item]):
    """Images that are already prepared."""

    classes = None

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    @property
    def has_labels(self) -> bool:
        return bool((self.labels != NO_LABEL).any())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return Item(index, self.images[index], int(self.labels[index]), f"image {index}", "")

    def identity(self) -> ImagesIdentity:
        tensors = {"images": self.images, "labels": self.labels}
        return ImagesIdentity(f"{len(self)}, {tensors_fingerprint(tensors)}")


class UserDataset(Dataset[Item]):
    """A data set of the caller's: prepared images, alone or first in a tuple with their label."""

    has_labels, classes = True, None  # as far as is known

    def __init__(self, images: SizedDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        name = f"image {index}"
        try:
            sample = self.images[index]
            if isinstance(sample, Item):
                return sample._replace(image_index=index)
            image, label = sample, NO_LABEL
            if isinstance(sample, (tuple, list)) and len(sample) > 1:
                image, label = sample[:2]
            if isinstance(image, (tuple, list)):
                image = image[0]
            if not isinstance(image, Tensor):
                raise GTPError(f"it is a {type(image).__name__} and must be a tensor; give the data set a transform")
        except Exception as error:  # of the caller's own code
            return Item(index, torch.zeros(0), NO_LABEL, name, first_line(error))
        try:
            return Item(index, image, int(label), name, "")
        except (TypeError, ValueError):  # a caller's second value may be anything
            return Item(index, image, NO_LABEL, name, "")


Images: TypeAlias = ImageDataset | StreamingImageDataset | InMemoryDataset | UserDataset


def _class_number(label: int | None) -> int:
    """A label as a number; splits without labels have -1 or None, and any other is an error."""
    return NO_LABEL if label is None else int(label)


def orientation_words(ignore_exif: bool) -> str:
    """Its part of a run's identity."""
    return "as stored" if ignore_exif else "as EXIF says"
