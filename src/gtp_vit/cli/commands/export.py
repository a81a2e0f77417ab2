"""gtp-vit export: a model as a file for an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from gtp_vit.cli import render
from gtp_vit.cli.flags import MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import DataFlags, check_weights, make_model, read_images
from gtp_vit.cli.output import OutputFlags, check_is_folder, check_readable, print_result, write_page
from gtp_vit.cli.parser import Choices
from gtp_vit.core.ranges import Range
from gtp_vit.engines import check_precision, formats, precisions
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.export import ExportInfo, ExportResult, export
from gtp_vit.engines.model_card import CHECK_COLUMNS, check_row
from gtp_vit.errors import GTPError, plural
from gtp_vit.models import bundled
from gtp_vit.models.sources import library_of, preprocessing_of, public_name
from gtp_vit.patching import patch
from gtp_vit.recipes.recipe import DEPLOY
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.runs.files import check_writable

MIN_IMAGES = 8


@dataclass(frozen=True)
class Export(OutputFlags, MethodFlags, DataFlags):
    """Write a reduced model to a file that an engine runs without this package.

    The file says in its metadata how to prepare images and what the classes are, and has a card beside it. At the end
    it is run in its engine on 1, 3 and 8 images and compared with torch; a file that fails is not left behind. Files
    for phones (litert, executorch, coreml) take one image at a time, the others any number. 8-bit files for onnx and
    openvino need images (--data-dir): both are checked on them, and openvino takes the ranges of its numbers from them.
    Core ML runs on macOS only: elsewhere its files are converted, checked as programs, and not run.

    examples:
      gtp-vit export --format onnx --output out
      gtp-vit export vit_tiny_patch16_224 --pretrained --format onnx --output out
      gtp-vit export vit_tiny_patch16_224 --pretrained --format openvino --precision int8 --data-dir images --output out
      gtp-vit export vit_tiny_patch16_224 --pretrained --method identity --format onnx --output out
      gtp-vit export vit_tiny_patch16_224 --pretrained --format litert --install-converter --output out
    """

    method: str = DEPLOY
    """A method or a recipe; its settings are flags too. deploy is gtp_plus with a schedule for engines: few layers."""
    format: Annotated[str, Choices(formats)] = "onnx"
    """File format; each engine has its own. onnx is for ONNX Runtime, TensorRT and others."""
    precision: Annotated[str, Choices(precisions)] = "f32"
    """Precision of the products with weights; which tokens stay is decided in floating point in all of them."""
    output: Path = Path()
    """Folder to write to; the names of the files say what is in them."""
    images: Annotated[int, Range(MIN_IMAGES, 10**5)] = 128
    """Images to find the ranges of 8-bit numbers with, and to check the file on."""
    class_names: Path | None = None
    """A text file with the name of a class on each line, for the metadata; models with ImageNet's classes need none."""
    overwrite: bool = False
    """Replace files that exist."""
    converter_python: Path | None = None
    """The Python of an environment with the converter, for formats whose converter needs a different torch."""
    install_converter: bool = False
    """Make that environment first, if there is none: its size and time are said before."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Export, arguments)
    engine = formats()[flags.format]
    _prepare_converter(flags, engine)
    check_precision(engine, flags.precision)
    engine.check_converter()
    check_weights(flags)
    if flags.device != "cpu":
        raise GTPError(f"--device is {flags.device}; exporting runs on a CPU; remove it")
    if "--output" not in {word.partition("=")[0] for word in arguments}:
        raise GTPError("--output is missing; give the folder to write to")
    check_is_folder(flags.output)
    check_writable(flags.output / "file", flags.html)
    classes = _class_names(flags.class_names)
    model = make_model(flags)
    method = chosen.for_model(model)
    fast = patch(model, method)
    share = "" if method.name == "identity" else f"-{method.name}"
    name = public_name(flags.model)
    path = flags.output / f"{name.replace('/', '_').replace(':', '_')}{share}-{flags.precision}{engine.suffix}"
    info = ExportInfo(name, _weights(flags), classes, preprocessing_of(flags.model))
    images, unreadable = _images(flags, engine, model)
    with render.status("exporting") as step:
        exported = export(
            fast,
            path,
            precision=flags.precision,
            images=images,
            info=info,
            overwrite=flags.overwrite,
            progress=step,
        )
    title, text = f"{path.name} in {engine.title} against torch", _summary(exported)
    rows = [check_row(check) for check in exported.checks]
    write_page(
        flags, arguments, flags.html, title, "", [Section("Checked", table(CHECK_COLUMNS, rows) + paragraph(text))]
    )
    result = {
        "flags": flags,
        "files": exported.files,
        "metadata": exported.metadata.to_dict(),
        "checks": exported.checks,
    }
    print_result(flags, result, (title, CHECK_COLUMNS, rows), text=text)
    check_readable(unreadable)


def _prepare_converter(flags: Export, engine: Engine) -> None:
    """Tell the engine of its converter, or install it, as the flags say."""
    converter = engine.converter
    if converter is None:
        if flags.converter_python is not None or flags.install_converter:
            word = "--install-converter" if flags.install_converter else "--converter-python"
            raise GTPError(f"{engine.name} converts in this Python; remove {word}")
    elif flags.converter_python is not None:
        if flags.install_converter:
            raise GTPError("--converter-python names a converter and --install-converter makes one; give one of them")
        os.environ[converter.variable] = str(flags.converter_python.absolute())
    elif flags.install_converter:
        with render.status("installing") as step:
            converter.install(step)


def _summary(result: ExportResult) -> str:
    """A summary of the export, in sentences."""
    metadata, size = result.metadata, sum(path.stat().st_size for path in result.files) / 1e6
    unknown = metadata.classes is None and metadata.output.kind == "classes"
    checked = f"Checked on {result.images}" if result.checks else f"Converted, and not run: {result.images}"
    return (
        f"{checked}. {metadata.macs_ratio:.0%} of the MACs, {size:.1f} MB."
        f"{' The names of its classes are not known.' if unknown else ''}\n"
        f"Written: {', '.join(map(str, result.files))}"
    )


def _images(flags: Export, engine: Engine, model: nn.Module) -> tuple[torch.Tensor | None, list[str]]:
    """The images of the flags; None if there are none and none are needed."""
    if flags.data_dir is None and not flags.dataset and flags.model != bundled.NAME:
        if engine.precisions[flags.precision].needs_images:
            raise GTPError(
                f"{flags.precision} needs images to find the ranges of its numbers; give --data-dir, a folder of some "
                "dozens"
            )
        return None, []
    images, unreadable = read_images(flags, model, flags.images, MIN_IMAGES)
    if len(images) < MIN_IMAGES:
        count = plural(len(images), "image is", "images are")
        raise GTPError(f"{count} too few; give at least {MIN_IMAGES}, better {flags.images}")
    return images, unreadable


def _weights(flags: Export) -> str:
    """Where the weights are from, so that gtp-vit evaluate finds them again."""
    if flags.checkpoint is not None:
        return str(flags.checkpoint)
    library, _ = library_of(flags.model)
    return public_name(flags.model) if library.prefix else library.title


def _class_names(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GTPError(f"cannot read --class-names {path}: {getattr(error, 'strerror', None) or error}") from error
