"""export: a model as a file that ONNX Runtime or OpenVINO runs, checked against torch before it is kept."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtp_vit.core.backbone import main_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines import check_precision, engine_of
from gtp_vit.engines.description import Description
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.engine_process import outputs_of
from gtp_vit.engines.metadata import about
from gtp_vit.engines.model_card import card
from gtp_vit.engines.onnx_export import check_exportable, output_of, write_onnx
from gtp_vit.errors import BadInput, BadSetting, GTPError, first_line
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.patching import host_of
from gtp_vit.runs.files import Lock, explained, is_locked, kept_if_used
from gtp_vit.tensors import rescaled

LOCK = ".lock"  # in the folder of an export that is running
BATCHES = (1, 3, 8)
MOST_IMAGES = 300  # more do not change the ranges of 8-bit numbers
# A file is refused beyond these. A token that two implementations choose differently, for a rounding error, moves an
# output by more than rounding does: so most images must be exact in 32 bits, not all.
EXACT = 1e-4  # of the largest output
LARGEST_KL = {"f32": 0.01, "bf16": 0.5, "int8": 0.5}
LEAST_COSINE = {"f32": 0.999, "bf16": 0.9, "int8": 0.9}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Checked:
    """An exported file against torch on one batch, both with the same method."""

    batch: int
    difference: float  # the largest, absolute
    largest: float  # output of torch, absolute
    exact: int  # images within EXACT
    cosine: float  # the smallest of an image's outputs with torch's
    agreement: float | None  # in percent: the same first class; None for outputs that are no classes
    kl: float | None  # to torch, mean; likewise


@dataclass(frozen=True)
class Exported:
    """What `export` wrote and found."""

    path: Path
    files: tuple[Path, ...]
    about: dict[str, Any]
    checks: tuple[Checked, ...]
    images: str  # what the checks were made on


def export(
    model: Any,
    path: str | Path,
    *,
    precision: str = "f32",
    images: Tensor | None = None,
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
    name: str = "",
    weights: str = "",
    preparation: dict[str, Any] | None = None,
    progress: Report | None = None,
) -> Exported:
    """Write a model, patched or not, to a file for an engine; with a card beside it that says how to use it.

    The file takes any number of images, has standard operators only, and says in its metadata what is in it. It is run
    in its engine and compared with torch; if it fails that, nothing is left behind.

    Args:
        model: a supported ViT in float32 on a CPU, as `patch` returns it.
        path: NAME.onnx for ONNX Runtime, NAME.xml for OpenVINO.
        precision: f32, int8, or for OpenVINO bf16. The choice of tokens is in floating point in all of them.
        images: some dozens, prepared as the model wants them. int8 needs them to find the ranges of its numbers, and
            the file is checked on them; without any it is checked on noise.
        classes: names of the classes, for the metadata; None = as the model's own weights have them, if that is known.
        overwrite: replace files that exist.
        name: of the model, for the metadata.
        weights: where its weights are from, for the metadata.
        preparation: of images, in timm's words, for the metadata; None = as the model itself says.
        progress: called with what is being done.
    """
    path = Path(path)
    engine = engine_of(path)
    check_precision(engine, precision)
    check_exportable(model)
    host = host_of(model)
    _check_images(images, host.inputs, precision)
    say = progress or _silent
    with explained(path):
        for existing in (path, *_beside(path)):
            if existing.is_dir() or (existing.exists() and not overwrite):
                raise GTPError(f"{existing} exists; give overwrite=True (--overwrite), or a different name")
    with kept_if_used(path.parent), _temporary(path) as folder, explained(path):
        description = about(model, engine, precision, classes, name, weights, preparation)
        onnx, made = folder / "float.onnx", folder / path.name
        say("tracing the model (half a minute for a small one)")
        write_onnx(model, onnx)
        say(
            "finding the ranges of 8-bit numbers (a minute)"
            if precision == "int8"
            else "writing the file (some seconds)"
        )
        some = None if images is None else images[:MOST_IMAGES].float().cpu().numpy()
        try:
            engine.make(onnx, made, precision, some, json.dumps(description.to_dict()))
        except GTPError:
            raise
        except Exception as error:  # engines raise errors of many classes; a full disk is one of them
            _check_space(folder, onnx)
            raise GTPError(f"{engine.name} cannot make {path.name}: {first_line(error)}") from error
        for each in folder.glob("float.onnx*"):
            each.unlink()
        say("comparing the file with torch at batch 1, 3 and 8 (some seconds)")
        _check_graph(engine, made, description)
        checks = _check(model, made, precision, images)
        what = "noise" if images is None else "images that were given"
        text = card(path.name, description, checks, what)
        _card_of(made).write_text(text, encoding="utf-8")
        ready = [each for each in folder.iterdir() if each.name != LOCK]
        written = sorted(ready, key=lambda each: each.suffix == path.suffix)  # what names others last
        if len(ready) > 2:  # weights of their own: old and new ones must never be mixed, not even by a kill
            path.unlink(missing_ok=True)
        for each in written:
            with open(each, "rb") as file:
                os.fsync(file.fileno())
            os.replace(each, path.with_name(each.name))
    files = tuple(path.with_name(each.name) for each in reversed(written))
    return Exported(path, files, description.to_dict(), checks, what)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A hidden folder beside a file that is being made; those of exports of it that were killed are deleted."""
    with explained(path):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
            if left.is_dir() and not is_locked(left / LOCK):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    lock = None
    try:
        lock = Lock(folder / LOCK)
        yield folder
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _silent(_: str) -> None:
    pass


def _card_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.md")


def _beside(path: Path) -> list[Path]:
    return [_card_of(path), *([path.with_suffix(".bin")] if path.suffix == ".xml" else [])]


def _check_images(images: Tensor | None, inputs: Any, precision: str) -> None:
    if images is None:
        if precision == "int8":
            raise BadSetting("int8 needs images to find the ranges of its numbers; give some dozens (--data-dir)")
        return
    wanted = (inputs.channels, *inputs.size)
    if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != wanted or not len(images):
        found = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise BadInput(f"images are {found}; give a tensor [images, {', '.join(map(str, wanted))}]")
    if not bool(images.isfinite().all()):
        raise BadInput("some images are not finite; give images as the model takes them")


def _check_space(folder: Path, needs: Path) -> None:
    free, size = shutil.disk_usage(folder).free, needs.stat().st_size if needs.exists() else 0
    if free < size:
        raise OSError(28, f"No space left on device ({free / 1e6:.0f} MB are free, about {size / 1e6:.0f} are needed)")


def _check_graph(engine: Engine, made: Path, description: Description) -> None:
    """Raise GTPError for a file that would be refused as contradicting itself when it is read."""
    problem = description.refusal(engine.open(made).graph())
    if problem is not None:
        raise GTPError(f"the exported file is not what it says: {problem}; nothing was written")


def _check(model: Any, made: Path, precision: str, images: Tensor | None) -> tuple[Checked, ...]:
    """Run the file in its engine on several batches and compare; raises GTPError if it is not the model."""
    inputs = host_of(model).inputs
    if images is None:
        shape = (sum(BATCHES), inputs.channels, *inputs.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    images = images.float().cpu()
    images = images.repeat(-(-sum(BATCHES) // len(images)), 1, 1, 1)[: sum(BATCHES)]
    parts = dict(zip(map(str, BATCHES), images.split(list(BATCHES)), strict=True))
    found = outputs_of(made, precision, {name: part.contiguous().numpy() for name, part in parts.items()})
    kind = output_of(model).kind
    checks = []
    with torch.inference_mode(), eval_mode(model):
        for name, part in parts.items():
            wanted = main_output(model(part), kind)
            checks.append(compare(wanted, torch.from_numpy(found[name]), kind == "classes"))
    problem = _problem(checks, precision)
    if problem:
        raise GTPError(f"the exported file is not what torch computes: {problem}; nothing was written")
    return tuple(checks)


def compare(wanted: Tensor, found: Tensor, classes: bool) -> Checked:
    """Outputs of an engine against those of torch for the same images."""
    if wanted.shape != found.shape:
        raise GTPError(f"the engine's output is {list(found.shape)}, torch's {list(wanted.shape)}; nothing was written")
    one, other = wanted.flatten(1).double(), found.flatten(1).double()
    difference, largest = (one - other).abs().amax(dim=1), float(one.abs().max())
    same = kl = None
    if classes:
        same = 100 * float((one.argmax(dim=1) == other.argmax(dim=1)).double().mean())
        kl = float(kl_per_image(one, other).mean())
    cosine = torch.nn.functional.cosine_similarity(rescaled(one), rescaled(other), dim=1)
    exact = int((difference <= EXACT * max(largest, 1.0)).sum())
    return Checked(len(one), float(difference.max()), largest, exact, float(cosine.min()), same, kl)


def _problem(checks: Sequence[Checked], precision: str) -> str | None:
    """Why a file is refused; None if it is good."""
    images = sum(check.batch for check in checks)
    if not np.isfinite([check.difference for check in checks]).all():
        return "its outputs are not finite"
    exact = sum(check.exact for check in checks)
    if precision == "f32" and exact < 0.75 * images:
        worst = max(check.difference for check in checks)
        return f"only {exact} of {images} images are within {EXACT:g} of it, the largest difference is {worst:.2g}"
    for check in checks:
        if check.kl is not None and check.kl > LARGEST_KL[precision]:
            return f"KL is {check.kl:.3g} at batch {check.batch}, more than {LARGEST_KL[precision]}"
        if check.kl is None and check.cosine < LEAST_COSINE[precision]:
            return f"the cosine is {check.cosine:.3g} at batch {check.batch}, less than {LEAST_COSINE[precision]}"
    return None
