"""Images, prepared as the model needs them: folders, Hugging Face sets and WebDataset, by the names timm has for them.

An image that cannot be read does not end a run and is not replaced by another (as timm's own data sets do): it comes
back with the reason, and the caller counts it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from gtp_vit.data import image_file, image_folder, tar_index
from gtp_vit.data.hf_dataset import Rows
from gtp_vit.errors import GTPError, first_line
from gtp_vit.patching import host_of

WANTED = "give a folder with one folder of images for each class"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # as timm calls them


class Item(NamedTuple):
    """One image, or why there is none."""

    place: int
    image: Tensor  # zeros if it cannot be read
    label: int
    name: str
    problem: str  # "" = none


class Batch(NamedTuple):
    """Images that could be read, and the others' names and problems."""

    place: Tensor  # [B] places in the data set
    images: Tensor  # [B, channels, height, width]
    labels: Tensor  # [B]
    unreadable: dict[int, str]  # place -> name and problem
    names: tuple[str, ...] = ()  # of the images that could be read


@dataclass(frozen=True)
class DataSettings:
    """Where images come from and how they are prepared; names as in timm's validate.py."""

    data_dir: Path
    dataset: str = ""  # "" = folders of images; hfds/NAME, wds/NAME and torch/NAME as in timm
    split: str = "validation"
    img_size: int | None = None
    crop_pct: float | None = None
    interpolation: str = ""
    ignore_exif: bool = False  # take pictures as they are stored, not upright as their EXIF data say
    count_links: bool = False  # count a picture once for each name that leads to it
    limit: int = 0  # only the first images, at most this many; 0 = all
    labels: bool = True  # False: they are not used, so folders need not be the model's classes
    transform: Any = None  # from a picture to a tensor; None: timm's, as the checkpoint's preparation says


class ImageFiles(Dataset[Item]):
    """A timm reader with a place for every image."""

    def __init__(
        self, reader: Any, transform: Any, shape: tuple[int, ...], limit: int = 0, *, ignore_exif: bool = False
    ) -> None:
        self.reader, self.transform, self.shape, self.limit = reader, transform, shape, limit
        self.ignore_exif = ignore_exif

    def __len__(self) -> int:
        return min(len(self.reader), self.limit or len(self.reader))

    def __getitem__(self, index: int) -> Item:
        name = str(self.reader.filename(index)) if hasattr(self.reader, "filename") else f"image {index}"
        try:
            if hasattr(self.reader, "samples"):  # files of a folder: opening one would wait for a pipe
                image_file.check_is_file(self.reader.filename(index, absolute=True))
            if isinstance(self.reader, Rows):  # whose names are in the rows
                name, file, label = self.reader.named(index)
            else:
                file, label = self.reader[index]
            with contextlib.closing(file):
                picture = image_file.decode(file, ignore_exif=self.ignore_exif)
                return Item(index, self.transform(picture), _number(label), name, "")
        except Exception as error:  # decoders raise errors of many classes
            return Item(index, torch.zeros(self.shape), -1, name, first_line(error))


class ImageStream(IterableDataset[Item]):
    """A timm reader that only knows the next image; places are counted.

    Readers of streams leave out what they cannot decode; if the stream says how many there are, these are reported.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        transform: Any,
        shape: tuple[int, ...],
        limit: int = 0,
        *,
        ignore_exif: bool = False,
    ) -> None:
        self.stream, self.transform, self.shape, self.limit = stream, transform, shape, limit
        self.ignore_exif = ignore_exif

    def __iter__(self) -> Iterator[Item]:
        index = -1
        for index, (image, label) in enumerate(itertools.islice(self.stream, self.limit or None)):
            try:
                picture = image_file.decode(image, ignore_exif=self.ignore_exif)
                yield Item(index, self.transform(picture), _number(label), f"image {index}", "")
            except Exception as error:
                yield Item(index, torch.zeros(self.shape), -1, f"image {index}", first_line(error))
        try:
            promised = len(self.stream)  # type: ignore[arg-type]
        except TypeError:
            promised = 0
        if not self.limit:
            for place in range(index + 1, promised):
                yield Item(place, torch.zeros(self.shape), -1, "an image of the stream", "it could not be decoded")


def _number(label: Any) -> int:
    """A label as a number; splits without labels have -1 or None."""
    return -1 if label is None else int(label)


class InMemory(Dataset[Item]):
    """Images that are already prepared."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return Item(index, self.images[index], int(self.labels[index]), f"image {index}", "")


def preparation(model: nn.Module, settings: DataSettings) -> dict[str, Any]:
    """How this checkpoint needs its images: timm's data configuration of the model, with the user's changes."""
    import timm.data

    inputs = host_of(model).inputs
    if inputs.preparation is None:
        raise GTPError(
            f"it is not known how the weights of {inputs.name} want their images prepared; give a function "
            "from a picture to a tensor as transform=..., or name the model to the command: hf:FOLDER_OR_NAME"
        )
    changes = {"crop_pct": settings.crop_pct, "interpolation": settings.interpolation, "img_size": settings.img_size}
    given = {key: value for key, value in changes.items() if value}
    config = timm.data.resolve_data_config(given, pretrained_cfg=inputs.preparation)
    if not inputs.any_size:
        config["input_size"] = (inputs.channels, *inputs.size)
    return config


def open_images(
    model: nn.Module, settings: DataSettings, augment: Mapping[str, Any] | None = None
) -> ImageFiles | ImageStream:
    """The data set, checked against the model's classes; for training with the settings of timm's augmentation."""
    _check_folder(settings)
    inputs = host_of(model).inputs
    shape = (inputs.channels, *inputs.size)
    if settings.transform is None:
        config = preparation(model, settings)
        shape, transform = tuple(config["input_size"]), make_transform(config, augment)
    else:
        transform = settings.transform
    return open_pictures(settings, transform, shape, inputs.classes)


def open_pictures(
    settings: DataSettings, transform: Any, shape: tuple[int, ...], wanted: int = 0
) -> ImageFiles | ImageStream:
    """The data set, prepared by `transform` into tensors of this shape; checked against this many classes, 0 = any."""
    import timm.data

    _check_folder(settings)
    folder = settings.data_dir
    dataset: Any = None
    try:
        if settings.dataset:
            image_folder.check_no_loop(folder, settings.dataset)
            how = image_folder.how_to_read(settings.dataset)
            dataset = timm.data.create_dataset(settings.dataset, root=str(folder), split=settings.split, **how)
            reader: Any = getattr(dataset, "reader", None)
        else:
            reader = image_folder.Folder(
                image_folder.split_of(folder, settings.split), count_links=settings.count_links
            )
    except GTPError:
        raise
    except Exception as error:
        raise GTPError(f"no images in {folder}: {first_line(error)}") from error
    files = _tar_files(settings, reader)
    if files is not None:
        reader = tar_index.Tars(files, folder)
    elif isinstance(dataset, IterableDataset):
        return ImageStream(dataset, transform, shape, settings.limit, ignore_exif=settings.ignore_exif)
    elif reader is None:
        reader = TorchvisionReader(dataset, ignore_exif=settings.ignore_exif)
        image_folder.leave_out_again(dataset, folder, count_links=settings.count_links)
    elif settings.dataset.startswith("hfds/"):
        reader = Rows(reader)
    elif settings.dataset:  # a folder of ours has each once
        image_folder.leave_out_again(reader, folder, count_links=settings.count_links)
    if len(reader) == 0:
        raise GTPError(f"no images in {folder}; {WANTED}")
    if not settings.dataset:
        image_folder.name_others(Path(reader.root))
    classes = len(getattr(reader, "class_to_idx", ()))
    if settings.labels and classes and wanted and classes != wanted:
        empty = image_folder.empty_classes(Path(getattr(reader, "root", folder)), reader.class_to_idx)
        if empty:
            raise GTPError(
                f"class {empty[0]} has no images in {folder}; put some there: the model wants {wanted} classes"
            )
        raise GTPError(
            f"{folder} has {classes} classes, but the model has {wanted}; give the model's own data, or a "
            f"model with {classes} classes (--num-classes)"
        )
    return ImageFiles(reader, transform, shape, settings.limit, ignore_exif=settings.ignore_exif)


def _check_folder(settings: DataSettings) -> None:
    folder = settings.data_dir
    if not settings.dataset and folder.is_file():
        raise GTPError(f"{folder} is a file; give the folder that it is in, and --limit 1 for one picture of it")
    if not settings.dataset and not folder.is_dir():
        near = [path.name for path in folder.parent.glob(f"{folder.name[:3]}*")] if folder.parent.is_dir() else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise GTPError(f"there is no folder {folder}{hint}")


def _tar_files(settings: DataSettings, reader: Any) -> list[Path] | None:
    """The tar files of a WebDataset that is on this disk; None for streams and everything else."""
    if not settings.dataset.startswith("wds/") or reader is None or reader.split_info.alt_label:
        return None
    found = tar_index.paths_of(settings.data_dir, reader.split_info.filenames)
    return None if found is None else image_folder.tars_once(found, settings.data_dir, count_links=settings.count_links)


def make_transform(config: dict[str, Any], augment: Mapping[str, Any] | None = None) -> Any:
    """timm's transform for evaluation, or with `augment` for training."""
    import timm.data

    grey = len(config["mean"]) == 1
    if grey:  # timm's transforms want three channels
        config = {**config, "mean": config["mean"] * 3, "std": config["std"] * 3}
    transform = timm.data.create_transform(**config, is_training=augment is not None, **(augment or {}))
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):  # of RandAugment
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
    if augment is not None and max(config["input_size"][1:]) <= 32:
        from torchvision.transforms import RandomCrop

        shift = 0 if augment["scale"][0] == 1 else 4  # as DeiT does with small images, which it never enlarges
        transform.transforms[0] = RandomCrop(config["input_size"][1:], padding=shift)
    return OneChannel(transform) if grey else transform


def posterize(picture: Any, bits: int, **_: Any) -> Any:
    """The picture with the highest bits of each channel; timm asks for none at times, which Pillow refuses since 13."""
    from PIL import Image, ImageOps

    return ImageOps.posterize(picture, bits) if bits else Image.new(picture.mode, picture.size)


class OneChannel:
    """A transform for models of grey images: from a picture without colours to its one channel."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, picture: Any) -> Tensor:
        return self.transform(picture.convert("L").convert("RGB"))[:1]

    def __repr__(self) -> str:  # part of a run's identity
        return f"OneChannel({self.transform})"


class TorchvisionReader:
    """A data set of torchvision with the interface of timm's readers."""

    def __init__(self, dataset: Any, *, ignore_exif: bool = False) -> None:
        self.dataset, self.root = dataset, getattr(dataset, "root", "")
        if hasattr(dataset, "loader"):  # its own waits for pipes, and turns 16-bit grey into white
            dataset.loader = functools.partial(image_file.load_picture, ignore_exif=ignore_exif)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def batches(
    dataset: Dataset[Item],
    *,
    batch_size: int,
    workers: int,
    skip: int = 0,
    pin: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Batches in the order of the data set, without its first `skip` images.

    `share` is (rank, processes): the process then gets every n-th image, n = processes, from its rank on.
    """
    rank, processes = share
    if isinstance(dataset, InMemory):  # no copy, no process
        places = range(skip + rank, len(dataset), processes)
        for begin in range(0, len(places), batch_size):
            part = places[begin : begin + batch_size]
            yield _in_memory(dataset, part)
        return
    if isinstance(dataset, ImageStream):
        if processes > 1:
            raise GTPError(
                "a stream of images cannot be shared by several processes; run one, or give folders or an indexed set"
            )
        loader = DataLoader(dataset, batch_size, num_workers=min(workers, 1), collate_fn=collate)
        seen = 0
        for batch in loader:
            seen += len(batch.place) + len(batch.unreadable)
            if seen > skip:  # the journal is written batch by batch, so a run stops between two of them
                yield batch
        return
    rest = Subset(dataset, range(skip + rank, len(dataset), processes))  # type: ignore[arg-type]
    yield from DataLoader(rest, batch_size, num_workers=workers, collate_fn=collate, pin_memory=pin)


def planned_batches(
    dataset: Dataset[Item], plan: Iterable[range], *, workers: int, pin: bool = False
) -> Iterator[Batch]:
    """One batch for each range of places, whichever process asks: what is in a batch decides the last bits."""
    if isinstance(dataset, InMemory):
        yield from (_in_memory(dataset, places) for places in plan)
        return
    yield from DataLoader(dataset, batch_sampler=plan, num_workers=workers, collate_fn=collate, pin_memory=pin)  # type: ignore[arg-type]


def _in_memory(dataset: InMemory, places: range) -> Batch:
    own = slice(places.start, places.stop, places.step)
    names = tuple(f"image {place}" for place in places)
    return Batch(torch.tensor(places), dataset.images[own], dataset.labels[own], {}, names)


def spread_images(dataset: Any, count: int) -> Any:
    """`count` images of a data set, evenly spread as its order is often by class; all if it has no more, or for 0."""
    if not count or not hasattr(dataset, "__len__") or count >= len(dataset):
        return dataset
    places = [index * len(dataset) // count for index in range(count)]
    if isinstance(dataset, InMemory):
        return InMemory(dataset.images[places], dataset.labels[places])
    return Subset(dataset, places)


def first_images(dataset: Dataset[Item], count: int, model: nn.Module) -> Tensor:
    """The first images that can be read, at most `count`, on the model's device and in its precision."""
    weight, found = next(model.parameters()), []
    for batch in batches(dataset, batch_size=count, workers=0):
        found.append(batch.images)
        if sum(map(len, found)) >= count:
            break
    if not any(map(len, found)):
        raise GTPError("none of the images could be read")
    return torch.cat(found)[:count].to(weight.device, weight.dtype)


def collate(items: list[Item]) -> Batch:
    """Items as one batch, those that could not be read apart."""
    good = [item for item in items if not item.problem]
    # In a reader's process this writes to memory that the other process reads: no copy, and no gaps left in the heap.
    images = default_collate([item.image for item in good]) if good else torch.zeros(0, *items[0].image.shape)
    return Batch(
        torch.tensor([item.place for item in good], dtype=torch.long),
        images,
        torch.tensor([item.label for item in good], dtype=torch.long),
        {item.place: f"{item.name}: {item.problem}" for item in items if item.problem},
        tuple(item.name for item in good),
    )
