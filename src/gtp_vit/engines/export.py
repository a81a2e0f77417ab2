"""export: a model as a file that an engine runs, checked against torch before it is kept."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Inputs
from gtp_vit.engines import check_precision, engine_of
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.metadata import ExportMetadata
from gtp_vit.engines.model_card import model_card
from gtp_vit.engines.output_check import OutputCheck, check_outputs
from gtp_vit.engines.preprocessing import Preprocessing
from gtp_vit.engines.program import Program, check_exportable, output_spec
from gtp_vit.errors import GTPError, InputError, SettingError, first_line
from gtp_vit.models.class_names import class_names
from gtp_vit.patching import host_of, is_patched, tower_of, unpatch
from gtp_vit.profiling.macs import macs
from gtp_vit.runs.files import Lock, folder_kept_if_used, friendly_write_errors, is_locked
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.version import __version__

LOCK = ".lock"  # in the folder of an export that is running
MAX_IMAGES = 300  # more do not change the ranges of 8-bit numbers


@dataclass(frozen=True)
class ExportInfo:
    """A file's statements about its model that the model itself does not make, or makes otherwise."""

    name: str = ""
    """Of the model."""
    weights: str = ""
    """Where its weights are from."""
    classes: Sequence[str] | None = None
    """Names of the classes; None = as the model's own weights have them, if that is known."""
    preprocessing: Mapping[str, object] | None = None
    """Of images, in timm's words; None = as the model itself says."""


NO_INFO = ExportInfo()


@dataclass(frozen=True)
class ExportResult:
    """The result of `export`: files, metadata and checks."""

    path: Path
    files: tuple[Path, ...]
    metadata: ExportMetadata
    checks: tuple[OutputCheck, ...]  # none where the engine cannot run
    images: str  # what the checks were made on, or why there are none


def export(
    model: nn.Module,
    path: str | Path,
    *,
    precision: str = "f32",
    images: Tensor | None = None,
    info: ExportInfo = NO_INFO,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> ExportResult:
    """Write a model, patched or not, to a file for an engine; with a card beside it that says how to use it.

    The file has standard operators only, and says in its metadata what is in it. It is run in its engine and compared
    with torch; if it fails that, nothing is left behind.

    Args:
        model: a supported ViT in float32 on a CPU, as `patch` returns it.
        path: its ending says for which engine: NAME.onnx for ONNX Runtime, .xml OpenVINO, .pt2 AOTInductor, .tflite
            LiteRT, .pte ExecuTorch, .mlpackage.zip Core ML.
        precision: f32, int8, or for OpenVINO bf16. The choice of tokens is in floating point in all of them.
        images: some dozens, prepared as the model expects them. int8 needs them to find the ranges of its numbers, and
            the file is checked on them; without any it is checked on noise.
        info: for the metadata.
        overwrite: replace files that exist.
        progress: called with what is being done.

    Returns:
        The files, the metadata in them, and the comparisons with torch.

    Raises:
        GTPError: the model cannot be exported, the engine is not installed, or the file fails the comparison.

    >>> import gtp_vit
    >>> fast = gtp_vit.patch(gtp_vit.create_model("test_vit"), gtp_vit.ToMe(r=4))
    >>> result = export(fast, getfixture("tmp_path") / "vit.onnx")
    >>> [file.name for file in result.files]
    ['vit.onnx', 'vit.onnx.md']
    """
    path = Path(path)
    engine = engine_of(path)
    check_precision(engine, precision)
    engine.check_converter()
    check_exportable(model)
    _check_images(images, host_of(model).inputs, engine, precision)
    with friendly_write_errors(path):
        for existing in (path, *engine.sidecars(path), model_card_path(path)):
            if existing.is_dir() or (existing.exists() and not overwrite):
                raise GTPError(f"{existing} exists; give overwrite=True (--overwrite), or a different name")
    with folder_kept_if_used(path.parent), _temporary(path) as folder, friendly_write_errors(path):
        metadata = _describe(model, engine, precision, info)
        made = folder / "made" / path.name
        _convert(model, engine, made, metadata, images, progress)
        problem = metadata.contradiction(engine.open(made).graph(), engine)
        if problem is not None:  # it would be refused when it is read
            raise GTPError(f"the exported file contradicts its metadata: {problem}; nothing was written")
        cannot_run = engine.cannot_run()
        checks: tuple[OutputCheck, ...] = ()
        if cannot_run is None:
            progress("comparing the file with torch at batch 1, 3 and 8 (some seconds)")
            checks = check_outputs(model, engine, made, precision, images)
        checked_on = cannot_run or ("noise" if images is None else "images that were given")
        model_card_path(made).write_text(model_card(path.name, metadata, engine, checks, checked_on), encoding="utf-8")
        files = _publish(made, path)
    return ExportResult(path, files, metadata, checks, checked_on)


def model_card_path(path: Path) -> Path:
    """Where the card of a file is."""
    return path.with_name(f"{path.name}.md")


def _check_images(images: Tensor | None, inputs: Inputs, engine: Engine, precision: str) -> None:
    if images is None:
        if engine.precisions[precision].needs_images:
            raise SettingError(
                f"{precision} needs images to find the ranges of its numbers; give some dozens (--data-dir)"
            )
        return
    expected = (inputs.channels, *inputs.size)
    if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != expected or not len(images):
        actual = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"images are {actual}; give a tensor [images, {', '.join(map(str, expected))}]")
    if not bool(images.isfinite().all()):
        raise InputError("some images are not finite; give images as the model takes them")


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A hidden folder beside a file that is being made; those of exports of it that were killed are deleted."""
    with friendly_write_errors(path):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
            if left.is_dir() and not is_locked(left / LOCK):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    lock = None
    try:
        lock = Lock(folder / LOCK)
        for name in ("forms", "made"):
            (folder / name).mkdir()
        yield folder
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _describe(model: nn.Module, engine: Engine, precision: str, info: ExportInfo) -> ExportMetadata:
    """The metadata of a model that is exported."""
    import timm

    plain, inputs, output = unpatch(model), host_of(model).inputs, output_spec(model)
    classes = class_names(model) if info.classes is None else list(info.classes)
    if output.kind == "classes" and classes is not None and len(classes) != output.width:
        raise SettingError(
            f"{len(classes)} class names are given, and the model has {output.width} classes; give one per class"
        )
    packages = {"gtp-vit": __version__, "torch": torch.__version__, "timm": timm.__version__}
    return ExportMetadata(
        model=info.name or inputs.name,
        weights=info.weights,
        fingerprint=tensors_fingerprint(plain.state_dict()),
        method=tower_of(model).reduction.method if is_patched(model) else None,
        unreduced_macs=int(macs(plain)),
        exported_macs=int(macs(model)),
        precision=precision,
        engine=engine.name,
        batch=engine.batch,
        channels=inputs.channels,
        size=inputs.size,
        preprocessing=_preprocessing_of(info.preprocessing, inputs),
        output=output,
        classes=tuple(classes) if output.kind == "classes" and classes is not None else None,
        versions={**packages, **engine.versions()},
    )


def _preprocessing_of(preprocessing: Mapping[str, object] | None, inputs: Inputs) -> Preprocessing:
    """The preparation that a file keeps."""
    known = {word: value for word, value in (preprocessing or inputs.preprocessing or {}).items() if value is not None}
    try:
        return Preprocessing.from_dict(
            json.loads(json.dumps(known, default=str)), inputs.channels
        )  # as it will be read back
    except GTPError as error:
        if preprocessing is not None:
            raise SettingError(f"preprocessing: {error}") from error
        return Preprocessing()  # e.g. three means of weights for colours, and a model that was made for grey images


def _convert(
    model: nn.Module,
    engine: Engine,
    made: Path,
    metadata: ExportMetadata,
    images: Tensor | None,
    progress: Callable[[str], None],
) -> None:
    """Let the engine write the file; other forms of the model are deleted again."""
    forms = made.parent.with_name("forms")
    eight_bits = engine.precisions[metadata.precision].eight_bits
    then = "finding the ranges of 8-bit numbers (a minute)" if eight_bits else "writing the file (some seconds)"
    program = Program(model, forms, engine.batch, on_trace=lambda: progress(then))
    some = None if images is None else images[:MAX_IMAGES].float().cpu().numpy()
    progress("tracing the model (half a minute for a small one)")
    try:
        engine.convert(program, made, metadata.precision, some, json.dumps(metadata.to_dict()))
    except GTPError:
        raise
    except Exception as error:  # engines raise errors of many classes; a full disk is one of them
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _check_space(forms)
        raise GTPError(f"{engine.name} cannot make {made.name}: {first_line(error)}") from error
    finally:
        shutil.rmtree(forms, ignore_errors=True)


def _check_space(forms: Path) -> None:
    """Raise OSError if there is no space for a file as large as the model is in another form."""
    free, size = shutil.disk_usage(forms).free, max((form.stat().st_size for form in forms.iterdir()), default=0)
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"No space left on device ({free / 1e6:.0f} MB are free, about {size / 1e6:.0f} are needed)",
        )


def _publish(made: Path, path: Path) -> tuple[Path, ...]:
    """Give the files that were made their names; what names others comes last, and first in the answer."""
    ready = sorted(made.parent.iterdir(), key=lambda source: source == made)
    if len(ready) > 2:  # weights of their own: old and new ones must never be mixed, not even by a kill
        path.unlink(missing_ok=True)
    for source in ready:
        with open(source, "rb") as file:
            os.fsync(file.fileno())
        os.replace(source, path.with_name(source.name))
    return tuple(path.with_name(source.name) for source in reversed(ready))
