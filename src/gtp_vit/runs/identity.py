"""The identity of a run: fingerprints of architecture, weights, learned parts and images, settings, precision, version.

Every command that can resume stores it, so that a table never mixes two models or data sets. File names are not enough:
a checkpoint can be overwritten between two starts. Data sets say themselves which images they have (`HasIdentity`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import Subset

from gtp_vit.methods import known_methods
from gtp_vit.patching import host_of, is_patched, unpatch
from gtp_vit.recipes.recipe import sizes_of_vit
from gtp_vit.runs.fingerprint import content_fingerprint, lines_fingerprint, tensors_fingerprint
from gtp_vit.version import __version__


@dataclass(frozen=True)
class ImagesIdentity:
    """The images of a run and their preprocessing; empty if they are tensors already."""

    images: str
    preprocessing: str = ""
    orientation: str = ""

    def to_dict(self) -> dict[str, str]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


@runtime_checkable
class HasIdentity(Protocol):
    """A data set that knows which images it has. Of files only names, sizes and labels count, not the content."""

    def identity(self) -> ImagesIdentity: ...


@dataclass(frozen=True)
class RunIdentity:
    """The values that must be equal for a run to be resumed."""

    model: str  # name and sizes
    weights: str  # fingerprint
    images: ImagesIdentity
    architecture: str = ""  # fingerprint; an exported file has none
    learned: dict[str, str] = field(default_factory=dict)  # of methods: model or file -> fingerprint
    dtype: str = ""
    device: str = ""
    settings: dict[str, object] = field(default_factory=dict)  # whatever else changes a figure, as JSON

    def to_dict(self) -> dict[str, object]:
        """As JSON, in one flat dictionary, as files store it and `differences` compares it."""
        own: dict[str, object] = {"version": __version__, "model": self.model, "architecture": self.architecture}
        own |= {"weights": self.weights, "learned": self.learned, "dtype": self.dtype, "device": self.device}
        own = {key: value for key, value in own.items() if value != ""} | self.images.to_dict()
        if both := own.keys() & self.settings.keys():
            raise KeyError(f"settings have names of the identity's own fields: {', '.join(sorted(both))}")
        return json.loads(json.dumps({**own, **self.settings}))


def run_identity(
    name: str, models: Mapping[str, nn.Module] | nn.Module, dataset: object, **settings: object
) -> RunIdentity:
    """The identity of a run over images.

    Args:
        name: of the unreduced model.
        models: the unreduced model alone, or first among others, by their names in the results.
        dataset: what they are run on, or a tensor of prepared images.
        settings: anything else that changes a figure, as JSON.
    """
    by_name = {"": models} if isinstance(models, nn.Module) else dict(models)
    plain = unpatch(next(iter(by_name.values())))
    weight = next(plain.parameters())
    # Learned parts of a method come from a file that its settings only name.
    learned = {key: model.reducer.state_dict() for key, model in by_name.items() if is_patched(model)}
    return RunIdentity(
        model=f"{name} ({sizes_of_vit(host_of(plain).vit)})",
        weights=tensors_fingerprint(plain.state_dict()),
        images=images_identity(dataset),
        architecture=architecture_fingerprint(plain),
        learned={key: tensors_fingerprint(parts) for key, parts in learned.items() if parts}
        | _files_of_methods(settings),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=weight.device.type,
        settings=settings,
    )


def images_identity(dataset: object) -> ImagesIdentity:
    """The images of a run, and their preprocessing."""
    if isinstance(dataset, Tensor):
        return ImagesIdentity(f"{len(dataset)}, {tensors_fingerprint({'images': dataset})}")
    if isinstance(dataset, Subset):
        whole = images_identity(dataset.dataset)
        chosen = f"{len(dataset)} of them, {lines_fingerprint(map(str, dataset.indices))}"
        return dataclasses.replace(whole, images=f"{whole.images}, {chosen}")
    if isinstance(dataset, HasIdentity):
        return dataset.identity()
    # A user's own data set: only its number of images is known.
    if not isinstance(dataset, Sized):
        raise TypeError(f"a {type(dataset).__name__} has no length and no identity()")
    return ImagesIdentity(f"{len(dataset)} of {type(dataset).__name__}")


def architecture_fingerprint(model: nn.Module) -> str:
    """A hash of what a model computes with its weights: modules, their settings, and numbers that are not stored.

    Two folders of Hugging Face can have the same weights and another activation or epsilon in their configuration.
    """
    modules = re.sub(" at 0x[0-9a-f]+", "", repr(model))  # where a function is in memory
    configuration: object = getattr(getattr(model, "config", None), "to_dict", dict)()
    stored = model.state_dict()
    others = {name: value for name, value in model.named_buffers() if name not in stored}
    settings = json.dumps(_without_origin(configuration), sort_keys=True, default=str)
    return lines_fingerprint([modules, settings, tensors_fingerprint(others)])


def _without_origin(configuration: object) -> object:
    """A configuration without what is of the file it was read from: its place and version."""
    if not isinstance(configuration, dict):
        return configuration
    origin = ("transformers_version", "dtype", "torch_dtype")
    settings = {str(key): value for key, value in configuration.items() if key not in origin}
    return {key: _without_origin(value) for key, value in settings.items() if not key.startswith("_")}


def _files_of_methods(settings: object) -> dict[str, str]:
    """Fingerprints of the files that settings of methods name, wherever among the settings of a run these are."""
    if isinstance(settings, (list, tuple)):
        settings = dict(enumerate(settings))
    if not isinstance(settings, Mapping):
        return {}
    method = known_methods().get(str(settings.get("method"))) if isinstance(settings.get("method"), str) else None
    names = [settings.get(key) for key in (() if method is None else method.weight_file_fields)]
    fingerprints = {str(name): content_fingerprint(Path(str(name))) for name in names if name}
    for inner in settings.values():
        fingerprints |= _files_of_methods(inner)
    return fingerprints


def differences(stored: Mapping[str, object], present: Mapping[str, object], prefix: str = "") -> str:
    """The differences of two identities, as text: the stored value, then the present one.

    >>> differences({"model": "a", "method": {"r": 8}}, {"model": "a", "method": {"r": 9}})
    'method r was 8 and is 9'
    """
    sentences = []
    for key in {**stored, **present}:
        old, new = stored.get(key, "not there"), present.get(key, "not there")
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and old.get("method") == new.get("method"):
            sentences.append(differences(old, new, f"{prefix}{key} "))
        else:
            sentences.append(f"{prefix}{key} {_stored_and_present(old, new)}")
    return ", ".join(sentences)


def _stored_and_present(*values: object) -> str:
    # Settings of different methods have no fields in common: their names say enough.
    old, new = (str(value.get("method", value)) if isinstance(value, dict) else str(value) for value in values)
    first_difference = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), 0)
    skip = max(0, first_difference - 20)  # long texts may differ near the end
    return f"was {_shorten(old, skip)} and is {_shorten(new, skip)}"


def _shorten(text: str, skip: int) -> str:
    shown = " ".join((f"...{text[skip:]}" if skip else text).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
