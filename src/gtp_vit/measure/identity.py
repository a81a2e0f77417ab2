"""The identity of a run: fingerprints of weights and images, settings, precision, version.

Every command that can resume stores it, so that a table never mixes two models or data sets. File names are not enough:
a checkpoint can be overwritten between two starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit import __version__
from gtp_vit.inputs.data import ImageFiles, ImageStream, InMemory
from gtp_vit.inputs.tars import Tars
from gtp_vit.patch import host_of, is_patched, unpatch
from gtp_vit.recipes import sizes_of_vit


def identity(name: str, models: Mapping[str, nn.Module] | nn.Module, dataset: Any, **settings: Any) -> dict[str, Any]:
    """What must be equal for a run to be resumed, as JSON.

    Args:
        name: of the unreduced model.
        models: the unreduced model alone, or first among others, by their names in the results.
        dataset: what they are run on, or a tensor of prepared images.
        settings: anything else that changes a figure.
    """
    every: dict[str, Any] = {"": models} if isinstance(models, nn.Module) else dict(models)
    plain = unpatch(next(iter(every.values())))
    weight = next(plain.parameters())
    # Learned parts of a method come from a file that its settings only name.
    learned = {key: model.reducer.state_dict() for key, model in every.items() if is_patched(model)}
    return {
        "version": __version__,
        "model": f"{name} ({sizes_of_vit(host_of(plain).vit)})",
        "weights": tensors_fingerprint(plain.state_dict()),
        "learned": {key: tensors_fingerprint(own) for key, own in learned.items() if own},
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        **images_identity(dataset),
        **settings,
    }


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(memoryview(raw.numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()[:16]


def images_identity(dataset: Any) -> dict[str, Any]:
    """Which images, and how they are prepared. Of files only names, sizes and labels count, not the content."""
    if isinstance(dataset, Tensor):
        return {"images": f"{len(dataset)}, {tensors_fingerprint({'images': dataset})}"}
    if isinstance(dataset, InMemory):
        both = {"images": dataset.images, "labels": dataset.labels}
        return {"images": f"{len(dataset)}, {tensors_fingerprint(both)}"}
    if isinstance(dataset, torch.utils.data.Subset):
        inner = images_identity(dataset.dataset)
        return {**inner, "images": f"{inner['images']}, {len(dataset)} of them, {_digest(map(str, dataset.indices))}"}
    if isinstance(dataset, ImageFiles):
        return {"images": f"{len(dataset)}, {_digest(_listed(dataset))}", **_prepared(dataset)}
    if isinstance(dataset, ImageStream):
        stream: Any = dataset.stream
        root = Path(getattr(getattr(stream, "reader", None), "root", None) or "")
        count = len(stream) if hasattr(stream, "__len__") else "a stream"
        listed = f"{count}, {dataset.limit or 'all'}, {_digest(_files_below(root))}"
        return {"images": listed, **_prepared(dataset)}
    # A user's own data set: only its number of images is known.
    return {"images": f"{len(dataset)} of {type(dataset).__name__}"}


def _prepared(dataset: ImageFiles | ImageStream) -> dict[str, str]:
    """What is done to each picture."""
    return {
        "preparation": str(dataset.transform),
        "orientation": "as stored" if dataset.ignore_exif else "as EXIF says",
    }


def _listed(dataset: ImageFiles) -> Iterator[str]:
    """A line for each image that is read, in order."""
    reader, count = dataset.reader, len(dataset)
    samples = getattr(reader, "samples", None)
    if isinstance(samples, list) and samples and isinstance(samples[0][0], (str, os.PathLike)):
        for path, label in samples[:count]:
            yield f"{os.path.relpath(path, reader.root)} {_size(path)} {label}"
    elif isinstance(reader, Tars):
        yield f"{count}"
        yield from reader.listed()
    elif hasattr(getattr(reader, "dataset", None), "_fingerprint"):  # a Hugging Face data set has its own
        yield f"{reader.dataset._fingerprint} {count}"
    else:
        yield f"{type(reader).__name__} {count}"
        yield from _files_below(Path(getattr(reader, "root", "") or ""))


def _files_below(root: Path) -> Iterator[str]:
    """Names and sizes of all files in a folder, or of one file; nothing if it is not on this machine."""
    if root == Path():
        return
    paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    for path in paths:
        yield f"{path.relative_to(root)} {_size(path)}"


def _size(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it will be reported as unreadable
        return -1


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()[:16]
