"""A model on a worker, from settings that a driver sent; and what a driver can know of it without weights."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gtp_vit.backbones.host import remove_classifier
from gtp_vit.core.backbone import Transform
from gtp_vit.core.reducer import Method
from gtp_vit.data.dataset import orientation_words
from gtp_vit.data.transforms import make_transform, preprocessing_of
from gtp_vit.embeddings.batch_embedder import BatchEmbedder, EmbeddingSpec
from gtp_vit.engines import is_exported
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.file_images import transform_for_file
from gtp_vit.errors import GTPError, SettingError, first_line
from gtp_vit.models.factory import create_model, has_own_weights
from gtp_vit.models.sources import library_of, public_name, transform_of
from gtp_vit.patching import patch, tower_of
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.runs import distributed
from gtp_vit.runs.identity import ImagesIdentity, run_identity
from gtp_vit.version import __version__


@dataclass(frozen=True)
class ModelSettings:
    """The model and the output to take; names as in `gtp-vit embed`."""

    model: str
    method: Method | Recipe | str | Path | None = None
    unreduced: bool = False
    checkpoint: str | None = None
    num_classes: int | None = None
    img_size: int | None = None
    crop_pct: float | None = None
    interpolation: str = ""
    ignore_exif: bool = False
    logits: bool = False
    normalise: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0

    def check_fits_a_file(self) -> None:
        """Raise SettingError for a setting that an exported file has fixed."""
        fixed = ("method", "unreduced", "checkpoint", "num_classes", "img_size", "logits")
        for name in fixed:
            if getattr(self, name):
                raise SettingError(f"{name} was fixed when {Path(self.model).name} was exported; remove it")
        if self.device != "cpu":
            raise SettingError(f"device is {self.device}; exported files run on a CPU; remove it")

    @property
    def changes(self) -> dict[str, float | str]:
        """The preparation of images, where it is not the weights' own."""
        every = {"crop_pct": self.crop_pct, "interpolation": self.interpolation, "img_size": self.img_size}
        return {name: value for name, value in every.items() if value}

    @property
    def place(self) -> Path | None:
        """The file or folder that every worker needs; None for weights of a hub or of the package."""
        if self.checkpoint is not None or is_exported(self.model):
            return Path(self.checkpoint or self.model).absolute()
        library, name = library_of(self.model)
        is_place = library.has_weights and library.prefix and (Path(name).exists() or name.startswith(("/", ".", "~")))
        return Path(name).absolute() if is_place else None


@dataclass(frozen=True)
class LoadedModel:
    """The objects of a worker."""

    embedder: BatchEmbedder
    transform: Transform
    identity: dict[str, object]
    lock: threading.Lock = field(default_factory=threading.Lock)  # one batch at a time


@dataclass(frozen=True)
class _Preparation:
    """The preprocessing of any image."""

    identity_of_images: ImagesIdentity

    def identity(self) -> ImagesIdentity:
        return self.identity_of_images


def spec_without_weights(settings: ModelSettings) -> EmbeddingSpec:
    """The shape of an embedding, from the name of the model, or the description in an exported file."""
    if is_exported(settings.model):
        output = ExportedFile.read(Path(settings.model)).metadata.output
        spec = BatchEmbedder(torch.nn.Module(), output=output).spec
    else:
        model = create_model(settings.model, img_size=settings.img_size, num_classes=settings.num_classes, meta=True)
        if not settings.logits:
            remove_classifier(model)
        spec = BatchEmbedder(model).spec
    assert spec is not None  # supported models and files say what they return
    return spec


def load(settings: ModelSettings) -> LoadedModel:
    """The model; an error names this machine, and the place that was looked at."""
    try:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        return _from_file(settings) if is_exported(settings.model) else _from_model(settings)
    except Exception as error:  # libraries, the hub and the network raise errors of many classes
        place = settings.place
        where = "" if place is None else f"; every worker needs {place}, and here it {_state(place)}"
        kind = type(error) if isinstance(error, GTPError) else GTPError
        raise kind(f"worker {socket.gethostname()} cannot load {settings.model}: {first_line(error)}{where}") from error


def _state(place: Path) -> str:
    return "is there" if place.exists() else "is missing"


def _from_model(settings: ModelSettings) -> LoadedModel:
    own = has_own_weights(settings.model)
    model = create_model(
        settings.model,
        pretrained=settings.checkpoint is None and not own,
        checkpoint=settings.checkpoint,
        img_size=settings.img_size,
        num_classes=settings.num_classes,
    ).to(distributed.device_of(settings.device))
    transform = transform_of(settings.model, model)
    if transform is None:
        transform = make_transform(preprocessing_of(model, settings.changes))
    elif settings.crop_pct or settings.interpolation:
        raise SettingError(
            f"{settings.model} preprocesses images with its own transform; remove crop_pct, interpolation"
        )
    if not settings.logits:
        remove_classifier(model)
    runs = model if settings.unreduced else patch(model, settings.method)
    embedder = BatchEmbedder(runs, normalise=settings.normalise, dtype=settings.dtype)
    method = None if settings.unreduced else tower_of(runs).reduction.method.to_dict()
    prepared = _Preparation(ImagesIdentity("", str(transform), orientation_words(settings.ignore_exif)))
    known = run_identity(public_name(settings.model), {"": runs}, prepared, method=method, engine="torch")
    return LoadedModel(embedder, transform, known.to_dict() | _of_output(embedder))


def _from_file(settings: ModelSettings) -> LoadedModel:
    file = ExportedFile.read(Path(settings.model))
    metadata = file.metadata
    transform = transform_for_file(file, settings.changes)
    loaded = file.load(settings.threads)
    embedder = BatchEmbedder(loaded, output=metadata.output, normalise=settings.normalise, dtype=settings.dtype)
    prepared = ImagesIdentity("", str(transform), orientation_words(settings.ignore_exif))
    known = {"version": __version__, "model": metadata.model, "weights": metadata.fingerprint, **file.settings()}
    return LoadedModel(embedder, transform, {**known, **prepared.to_dict()} | _of_output(embedder))


def _of_output(embedder: BatchEmbedder) -> dict[str, object]:
    assert embedder.spec is not None
    output = {"kind": embedder.spec.kind, "shape": list(embedder.spec.shape), "grid": None}
    return {"output": output, "normalise": embedder.normalise, "stored": embedder.dtype}
