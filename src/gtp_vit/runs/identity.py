"""The identity of a run: fingerprints of architecture, weights, learned parts and images, settings, precision, version.

Every command that can resume stores it, so that a table never mixes two models or data sets. File names are not enough:
a checkpoint can be overwritten between two starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.data.dataset import ImageFiles, ImageStream, InMemory
from gtp_vit.data.tar_index import Tars
from gtp_vit.methods import known_methods
from gtp_vit.patching import host_of, is_patched, unpatch
from gtp_vit.recipes import sizes_of_vit
from gtp_vit.version import __version__


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
        "architecture": architecture_fingerprint(plain),
        "weights": tensors_fingerprint(plain.state_dict()),
        "learned": {key: tensors_fingerprint(own) for key, own in learned.items() if own} | _files_of_methods(settings),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        **images_identity(dataset),
        **settings,
    }


def architecture_fingerprint(model: nn.Module) -> str:
    """A hash of what a model computes with its weights: modules, their settings, and numbers that are not stored.

    Two folders of Hugging Face can have the same weights and another activation or epsilon in their configuration.
    """
    modules = re.sub(" at 0x[0-9a-f]+", "", repr(model))  # where a function is in memory
    described: Any = getattr(getattr(model, "config", None), "to_dict", dict)()
    stored = model.state_dict()
    others = {name: value for name, value in model.named_buffers() if name not in stored}
    return _digest(
        [modules, json.dumps(_of_the_model(described), sort_keys=True, default=str), tensors_fingerprint(others)]
    )


def _of_the_model(configuration: Any) -> Any:
    """A configuration without what is of the file it was read from: its place and version."""
    if not isinstance(configuration, dict):
        return configuration
    left_out = ("transformers_version", "dtype", "torch_dtype")
    kept = {str(key): value for key, value in configuration.items() if key not in left_out}
    return {key: _of_the_model(value) for key, value in kept.items() if not key.startswith("_")}


def _files_of_methods(settings: Any) -> dict[str, str]:
    """Fingerprints of the files that settings of methods name, wherever among the settings of a run these are."""
    if isinstance(settings, (list, tuple)):
        settings = dict(enumerate(settings))
    if not isinstance(settings, Mapping):
        return {}
    method = known_methods().get(str(settings.get("method"))) if isinstance(settings.get("method"), str) else None
    names = [settings.get(key) for key in (() if method is None else method.files)]
    found = {str(name): _content(Path(str(name))) for name in names if name}
    for inner in settings.values():
        found |= _files_of_methods(inner)
    return found


def _content(path: Path) -> str:
    """A hash of a file, behind whatever links."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:  # whoever needs it says so
        return "cannot be read"


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
        target = _Links(reader.root)
        for path, label in samples[:count]:
            yield f"{os.path.relpath(path, reader.root)} {_size(path)} {label}{target(path)}"
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
    target = _Links(root)
    for path in paths:
        yield f"{path.relative_to(root)} {_size(path)}{target(path)}"


class _Links:
    """Where links below a folder lead: a link that leads elsewhere is another image, also if that has the same size.

    Relative to where the folder really is, which may be another place on every machine.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root, self.real = str(root), os.path.realpath(root)
        self.folders: dict[str, str] = {}

    def __call__(self, path: str | os.PathLike[str]) -> str:
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(folder)
        found = os.path.join(self.folders[folder], name)
        if os.path.islink(found):
            found = os.path.realpath(found)
        elif self.folders[folder] == os.path.normpath(os.path.join(self.real, os.path.relpath(folder, self.root))):
            return ""  # nothing on the way is a link
        return f" -> {os.path.relpath(found, self.real)}"


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
