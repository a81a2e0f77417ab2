"""Opening images by the names that timm has for data sets: folders, Hugging Face sets, WebDataset, torchvision's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from gtp_vit.data import image_folder
from gtp_vit.data.dataset import ImageDataset, StreamingImageDataset
from gtp_vit.data.library_readers import HuggingFaceReader, TimmReader, TorchvisionReader
from gtp_vit.data.parquet_reader import ParquetReader
from gtp_vit.data.reader import Reader
from gtp_vit.data.stores import StoreReader, url_of
from gtp_vit.data.tar_reader import TarReader, tar_files
from gtp_vit.data.transforms import TimmSettings, Transform, make_transform, preprocessing_of
from gtp_vit.errors import GTPError, first_line
from gtp_vit.patching import host_of

PARQUET = "parquet/"


@dataclass(frozen=True)
class DataSettings:
    """Where images come from and how they are prepared; names as in timm's validate.py."""

    data_dir: Path  # or a URL
    dataset: str = ""  # "" = folders of images; hfds/NAME, wds/NAME and torch/NAME as in timm; parquet/COLUMN
    split: str = "validation"
    img_size: int | None = None
    crop_pct: float | None = None
    interpolation: str = ""
    ignore_exif: bool = False  # take pictures as they are stored, not upright as their EXIF data say
    count_links: bool = False  # count a picture once for each name that leads to it
    limit: int = 0  # only the first images, at most this many; 0 = all
    labels: bool = True  # False: they are not used, so folders need not be the model's classes
    transform: Transform | None = None  # None: timm's, as the checkpoint's preparation says


def open_images(
    model: nn.Module, settings: DataSettings, augment: TimmSettings | None = None
) -> ImageDataset | StreamingImageDataset:
    """The data set, checked against the model's classes; for training with the settings of timm's augmentation."""
    _check_folder(settings)
    inputs = host_of(model).inputs
    if settings.transform is not None:
        return open_with_transform(settings, settings.transform, (inputs.channels, *inputs.size), inputs.classes)
    names = ("crop_pct", "interpolation", "img_size")
    config = preprocessing_of(model, {name: getattr(settings, name) for name in names})
    return open_with_transform(settings, make_transform(config, augment), tuple(config["input_size"]), inputs.classes)


def open_with_transform(
    settings: DataSettings, transform: Transform, shape: tuple[int, ...], classes: int = 0
) -> ImageDataset | StreamingImageDataset:
    """The data set, prepared by `transform` into tensors of this shape; checked against this many classes, 0 = any."""
    _check_folder(settings)
    try:
        reader = _open(settings)
    except GTPError:
        raise
    except Exception as error:
        raise GTPError(f"no images in {settings.data_dir}: {first_line(error)}") from error
    if not isinstance(reader, Reader):
        return StreamingImageDataset(
            reader, transform, shape, settings.limit, source=_source(settings), ignore_exif=settings.ignore_exif
        )
    if len(reader) == 0:
        place = url_of(settings.data_dir) or settings.data_dir
        raise GTPError(f"no images in {place}; give a folder with one folder of images for each class")
    if isinstance(reader, image_folder.FolderReader):
        reader.warn_about_skipped_files()
    if settings.labels and classes:
        _check_classes(reader, settings.data_dir, classes)
    return ImageDataset(reader, transform, shape, settings.limit, ignore_exif=settings.ignore_exif)


def _open(settings: DataSettings) -> Reader | Iterable[Any]:
    """A reader, or a stream of pictures and labels; raises many exception types."""
    import timm.data

    folder, name, links = settings.data_dir, settings.dataset, settings.count_links
    url = url_of(folder)
    if name.startswith(PARQUET):
        return ParquetReader(folder, name.removeprefix(PARQUET))
    if url is not None:
        if name:
            raise GTPError(f"{name} cannot be read from {url}; folders of images and {PARQUET}COLUMN can")
        return StoreReader(url, settings.split)
    if not name:
        return image_folder.FolderReader(image_folder.split_folder(folder, settings.split), count_links=links)
    image_folder.check_no_loop(folder, name)
    dataset = timm.data.create_dataset(name, root=str(folder), split=settings.split, **_timm_options(name))
    reader = getattr(dataset, "reader", None)
    if reader is None:
        return TorchvisionReader(dataset, source=_source(settings), ignore_exif=settings.ignore_exif, count_links=links)
    if name.startswith("wds/") and not reader.split_info.alt_label:
        paths = tar_files(folder, reader.split_info.filenames)
        if paths is not None:
            duplicates = image_folder.find_duplicates(paths, folder, count_links=links)
            return TarReader([path for path in paths if str(path) not in duplicates], folder)
    if isinstance(dataset, IterableDataset):
        return dataset
    if name.startswith("hfds/"):
        return HuggingFaceReader(reader)
    return TimmReader(reader, source=_source(settings), count_links=links)


def _source(settings: DataSettings) -> str:
    """Data set and split by name: one folder may hold several of both."""
    return f"{settings.dataset} {settings.split}".strip()


def _timm_options(dataset: str) -> dict[str, str]:
    """Options for timm, which by itself reads .png, .jpg and .jpeg only, and cuts streams to 8 bits."""
    return {"input_img_mode": ""} if dataset.startswith(("wds/", "hfids/")) else {}


def _check_folder(settings: DataSettings) -> None:
    folder = settings.data_dir
    if url_of(folder) is not None:
        return
    if not settings.dataset and folder.is_file():
        raise GTPError(f"{folder} is a file; give the folder that it is in, and --limit 1 for one picture of it")
    if not settings.dataset and not folder.is_dir():
        near = [path.name for path in folder.parent.glob(f"{folder.name[:3]}*")] if folder.parent.is_dir() else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise GTPError(f"there is no folder {folder}{hint}")


def _check_classes(reader: Reader, folder: Path, num_classes: int) -> None:
    """Raise GTPError if the reader knows its classes and has another number of them."""
    classes = len(reader.class_to_idx)
    if classes in (0, num_classes):
        return
    empty = image_folder.empty_class(reader.root or folder, reader.class_to_idx)
    if empty is not None:
        raise GTPError(f"class {empty} has no images in {folder}; put some there: the model has {num_classes} classes")
    raise GTPError(
        f"{folder} has {classes} classes, but the model has {num_classes}; give the model's own data, or a "
        f"model with {classes} classes (--num-classes)"
    )
