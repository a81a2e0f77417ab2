"""Batches of tables as platforms give them: Arrow's, pandas', and dicts of columns; each keeps its kind.

Arrow and pandas are looked at only where they are imported already: who gives such a batch has done it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gtp_vit.errors import InputError

if TYPE_CHECKING:
    import pyarrow


class Added(Protocol):
    """The columns that are added to a batch."""

    @property
    def vectors(self) -> npt.NDArray[np.floating]: ...

    @property
    def errors(self) -> list[str | None]: ...


class Kind(Protocol):
    """A kind of table."""

    def names(self, batch: Any) -> list[str]:
        """Its columns."""

    def images(self, batch: Any, column: str) -> list[object]:
        """The cells of a column."""

    def add(self, batch: Any, image: str, output: str, error: str, added: Added) -> Any:
        """A new batch with two more columns."""


@dataclass(frozen=True)
class ArrowKind:
    """pyarrow's Table and RecordBatch: lists, null where there is no embedding."""

    fixed_size: bool = False

    def names(self, batch: pyarrow.Table) -> list[str]:
        return list(batch.schema.names)

    def images(self, batch: pyarrow.Table, column: str) -> list[object]:
        import pyarrow

        array = batch.column(column)
        if not isinstance(array.type, pyarrow.BaseExtensionType):
            return array.to_pylist()
        cells: list[object] = []
        for chunk in getattr(array, "chunks", [array]):  # tensors: pyarrow's own have the first method, Ray's the other
            whole = chunk.to_numpy_ndarray() if hasattr(chunk, "to_numpy_ndarray") else chunk.to_numpy(False)
            cells += list(whole)
        return cells

    def add(self, batch: pyarrow.Table, image: str, output: str, error: str, added: Added) -> pyarrow.Table:
        import pyarrow

        width = added.vectors.shape[1]
        vector, reason = arrow_schema(output, error, width if self.fixed_size else -1, str(added.vectors.dtype))
        missing = np.array([text is not None for text in added.errors], bool)
        numbers = pyarrow.array(np.where(missing[:, None], 0, added.vectors).reshape(-1), vector.type.value_type)
        lists = pyarrow.FixedSizeListArray.from_arrays(numbers, width, mask=pyarrow.array(missing)).cast(vector.type)
        batch = batch.append_column(vector, lists)
        return batch.append_column(reason, pyarrow.array(added.errors, reason.type))


class PandasKind:
    """pandas' DataFrame: an array in every cell, None where there is no embedding."""

    def names(self, batch: Any) -> list[str]:
        return [str(name) for name in batch.columns]

    def images(self, batch: Any, column: str) -> list[object]:
        return list(batch[column])

    def add(self, batch: Any, image: str, output: str, error: str, added: Added) -> Any:
        return batch.assign(**{output: _cells(added), error: np.array(added.errors, object)})


class DictKind:
    """A dict of columns. Where the images are a list, so are the new columns, with None where there is no embedding.

    Where they are a numpy array, the embeddings are one array [rows, numbers]; it has no null, so NaN stands for none.
    """

    def names(self, batch: Mapping[str, Any]) -> list[str]:
        return [str(name) for name in batch]

    def images(self, batch: Mapping[str, Any], column: str) -> list[object]:
        return list(batch[column])

    def add(self, batch: Mapping[str, Any], image: str, output: str, error: str, added: Added) -> dict[str, Any]:
        if isinstance(batch[image], np.ndarray):
            return {**batch, output: added.vectors, error: np.array(added.errors, object)}
        return {**batch, output: list(_cells(added)), error: added.errors}


class _Loaded(NamedTuple):
    module: str
    classes: tuple[str, ...]
    kind: Kind


def kind_of(batch: object, *, fixed_size: bool = False) -> Kind:
    """The kind of a batch; raises InputError for what is none."""
    arrow, pandas = ("Table", "RecordBatch"), ("DataFrame",)
    for name, classes, kind in (
        _Loaded("pyarrow", arrow, ArrowKind(fixed_size)),
        _Loaded("pandas", pandas, PandasKind()),
    ):
        library = sys.modules.get(name)
        if library is not None and isinstance(batch, tuple(getattr(library, cls) for cls in classes)):
            return kind
    if isinstance(batch, Mapping):
        return DictKind()
    raise InputError(
        f"a batch is a {type(batch).__name__}; give a dict of columns, an Arrow table or record batch, or a pandas "
        "DataFrame"
    )


def arrow_schema(
    output: str, error: str, length: int, dtype: str, table: pyarrow.Schema | None = None
) -> pyarrow.Schema:
    """The two columns as Arrow has them, behind those of a table; a length of -1 = lists of any."""
    try:
        import pyarrow
    except ImportError as failure:
        raise InputError("an Arrow schema needs pyarrow: pip install 'gtp-vit[parquet]'") from failure
    number = pyarrow.float16() if dtype == "float16" else pyarrow.float32()
    added = [pyarrow.field(output, pyarrow.list_(number, length)), pyarrow.field(error, pyarrow.string())]
    return pyarrow.schema([*(table or []), *added], metadata=None if table is None else table.metadata)


def _cells(added: Added) -> npt.NDArray[np.object_]:
    """A vector or None for every row."""
    cells = np.empty(len(added.errors), object)
    for row, (vector, error) in enumerate(zip(added.vectors, added.errors, strict=True)):
        cells[row] = vector if error is None else None
    return cells
