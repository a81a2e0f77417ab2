"""Embedder: a column of embeddings for every batch of a table, on whatever worker a data platform calls it."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Item, collate
from gtp_vit.data.transforms import INTERPOLATIONS
from gtp_vit.embeddings.batch_embedder import DTYPES, EmbeddingSpec
from gtp_vit.engines import is_exported
from gtp_vit.errors import GTPError, SettingError, check_name, check_range
from gtp_vit.models.factory import require_known_model
from gtp_vit.platforms import tables
from gtp_vit.platforms.loading import LoadedModel, ModelSettings, load, spec_without_weights
from gtp_vit.platforms.pictures import prepared
from gtp_vit.recipes.defaults import as_recipe
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.runs.identity import differences
from gtp_vit.version import __version__

if TYPE_CHECKING:
    import pyarrow

Table = TypeVar("Table")

# Models of this process, by the Embedder they belong to: some platforms unpickle it anew for every task.
_LOADED: dict[str, LoadedModel] = {}
_LOADING = threading.Lock()
MAX_LOADED = 2


class Vectors(NamedTuple):
    """The embeddings of some images."""

    vectors: npt.NDArray[np.float32] | npt.NDArray[np.float16]  # [images, numbers]; NaN where there is none
    errors: list[str | None]  # why there is none


class Embedder:
    """Adds the embeddings of a column of images to batches of a table: Arrow, pandas, or a dict of columns.

    Made for platforms that send it to their workers: it is light and can be pickled, and a worker loads the model at
    its first batch. Other columns pass through. An image that cannot be read has no embedding, and the reason in a
    second column; it does not end the job. A worker with another version of gtp-vit, other weights than `fingerprint`
    says, or without the weights does, with an error that names it.

    >>> import gtp_vit
    >>> embed = gtp_vit.Embedder("fashion_vit")
    >>> embed.dimensions
    64
    >>> embed({"id": [7, 8], "image": [b"", None]})["embedding_error"]
    ['zero bytes', 'null']
    """

    def __init__(
        self,
        model: str | Path,
        method: Method | Recipe | str | Path | None = None,
        *,
        image: str = "image",
        output: str = "embedding",
        unreduced: bool = False,
        checkpoint: str | Path | None = None,
        num_classes: int | None = None,
        img_size: int | None = None,
        crop_pct: float | None = None,
        interpolation: str = "",
        ignore_exif: bool = False,
        logits: bool = False,
        normalise: bool = False,
        dtype: str = "float32",
        fixed_size: bool = False,
        batch_size: int = 64,
        device: str = "cpu",
        threads: int = 0,
        fingerprint: str = "",
    ) -> None:
        """Check the settings; nothing is loaded.

        Args:
            model: a name as for `gtp-vit embed`, with its pre-trained weights; or a file of `export`.
            method: as for `patch`. The file of a recipe is read here, so workers do not need it.
            image: the column of images: bytes, names or URLs of files, PIL images, uint8 arrays [height, width,
                channels], or Hugging Face's dicts of bytes and path.
            output: the column to add; the one of reasons is called like it, with _error behind.
            unreduced: leave the model as it is.
            checkpoint: a file of weights that every worker can read, in place of the pre-trained ones.
            num_classes: how many classes the checkpoint has, if different from the model's own number.
            img_size: height and width of the images, if different from the model's own.
            crop_pct: share of the image that is taken, if different from the weights' own.
            interpolation: how images are resized, if different from the weights' own.
            ignore_exif: take pictures as they are stored, not upright as their EXIF data say.
            logits: of a classifier, the scores of its classes instead of its features.
            normalise: scale every vector to length 1.
            dtype: of the stored numbers, float32 or float16.
            fixed_size: in Arrow, lists of fixed length, as Lance's tables and indexes want them. Do not write such to
                Parquet: pyarrow cannot read lists of fixed length back if one of them is null.
            batch_size: images that the model gets at a time, at most; a larger batch is cut into such parts.
            device: cpu, cuda, or auto: an accelerator if the worker has one.
            threads: CPU threads; 0 leaves torch's choice, which most platforms set.
            fingerprint: of the weights, as `identity()` and the manifest of `gtp-vit embed` say; others are refused.
        """
        name = str(model)
        check_name("dtype", dtype, DTYPES)
        check_range("batch_size", batch_size, 1, 65536, integer=True)
        check_range("threads", threads, 0, 4096, integer=True)
        if interpolation:
            check_name("interpolation", interpolation, INTERPOLATIONS)
        if crop_pct is not None:
            check_range("crop_pct", crop_pct, 0, 1, exclude_low=True)
        if unreduced and method is not None:
            raise SettingError("unreduced cannot be combined with method; remove one of them")
        if image in (output, f"{output}_error"):
            raise SettingError(f"image and output are both {image!r}; the images stay, so give output another name")
        self.settings = ModelSettings(
            name,
            as_recipe(method) or method,
            unreduced=unreduced,
            checkpoint=None if checkpoint is None else str(checkpoint),
            num_classes=num_classes,
            img_size=img_size,
            crop_pct=crop_pct,
            interpolation=interpolation,
            ignore_exif=ignore_exif,
            logits=logits,
            normalise=normalise,
            dtype=dtype,
            device=device,
            threads=threads,
        )
        if is_exported(name):
            self.settings.check_fits_a_file()
        else:
            require_known_model(name)
        self.image, self.output, self.batch_size, self.fingerprint = image, output, batch_size, fingerprint
        self.fixed_size = fixed_size
        self.version, self.made_on, self.key = __version__, socket.gethostname(), uuid.uuid4().hex
        self._spec: EmbeddingSpec | None = None
        self._model: LoadedModel | None = None

    @property
    def error_column(self) -> str:
        """The column with the reasons."""
        return f"{self.output}_error"

    @property
    def dimensions(self) -> int:
        """The length of an embedding; known without weights."""
        if self._model is not None:
            self._spec = self._model.embedder.spec
        if self._spec is None:
            self._spec = spec_without_weights(self.settings)
        return self._spec.shape[0]

    def schema(self, table: pyarrow.Schema | None = None) -> pyarrow.Schema:
        """The columns that are added, as Arrow has them; behind those of a table if one is given. Loads no weights."""
        length = self.dimensions if self.fixed_size else -1
        return tables.arrow_schema(self.output, self.error_column, length, self.settings.dtype, table)

    def identity(self) -> dict[str, object]:
        """The settings that decide the numbers: version, weights, method, image preprocessing; loads the model.

        As in the manifest of `gtp-vit embed`, without what is of its images and files.
        """
        return dict(self._load().identity)

    def vectors(self, images: list[object]) -> Vectors:
        """The embeddings of some images, for tables that `__call__` does not know."""
        if images:
            self._load()
        errors: list[str | None] = [None] * len(images)
        result: npt.NDArray[np.float32] | npt.NDArray[np.float16]
        result = np.full((len(images), self.dimensions), np.nan, np.dtype(self.settings.dtype))
        for begin in range(0, len(images), self.batch_size):
            model = self._load()
            items = [
                prepared(index, image, model.transform, ignore_exif=self.settings.ignore_exif)
                for index, image in enumerate(images[begin : begin + self.batch_size], begin)
            ]
            self._embed(model, items, result, errors)
        return Vectors(result, errors)

    def _embed(
        self, model: LoadedModel, items: list[Item], result: npt.NDArray[np.floating], errors: list[str | None]
    ) -> None:
        batch = collate(items)
        with model.lock:
            part = model.embedder(batch)
        result[part.indices.numpy()] = part.embeddings.numpy()
        for index, text in (part.unreadable | part.not_finite).items():
            errors[index] = text.partition(": ")[2]  # behind the name

    def __call__(self, batch: Table) -> Table:
        """The batch with two more columns, of its own kind.

        A batch of another size or composition may differ in the last bits: of the same 64 images it has the numbers
        that `gtp-vit embed --batch-size 64` has of them.
        """
        kind = tables.kind_of(batch, fixed_size=self.fixed_size)
        names = kind.names(batch)
        if self.image not in names:
            raise GTPError(f"the table has no column {self.image!r}, but {', '.join(map(repr, names)) or 'none'}")
        for name in (self.output, self.error_column):
            if name in names:
                raise GTPError(f"the table has a column {name!r} already; remove it, or give output another name")
        return kind.add(batch, self.image, self.output, self.error_column, self.vectors(kind.images(batch, self.image)))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_model": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        if state.get("version") != __version__:
            raise GTPError(
                f"this Embedder is of gtp-vit {state.get('version')} on {state.get('made_on')}, and worker "
                f"{socket.gethostname()} has {__version__}; install the same version everywhere"
            )
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Embedder({self.settings.model!r}, image={self.image!r}, output={self.output!r})"

    def _load(self) -> LoadedModel:
        """The model, once in a process."""
        if self._model is not None:
            return self._model
        with _LOADING:
            model = _LOADED.get(self.key)
            if model is None:
                model = load(self.settings)
                self._check(model)
                while len(_LOADED) >= MAX_LOADED:
                    _LOADED.pop(next(iter(_LOADED)))
                _LOADED[self.key] = model
        self._model = model
        return model

    def _check(self, model: LoadedModel) -> None:
        """Raise GTPError if the weights are not those that were asked for."""
        have = str(model.identity["weights"])
        if self.fingerprint not in ("", have):
            difference = differences({"weights": self.fingerprint}, {"weights": have})
            raise GTPError(
                f"worker {socket.gethostname()} has other weights of {self.settings.model}: {difference}; copy the "
                "same there"
            )
