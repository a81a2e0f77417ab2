"""gtp-vit visualise: see what a method does to your images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gtp_vit.cli.flags import MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import ModelFlags, check_weights, make_model
from gtp_vit.cli.output import JsonFlags, check_is_folder, print_result, write_page
from gtp_vit.cli.parser import Positional
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.reducer import Method
from gtp_vit.data.image_file import IMAGE_EXTENSIONS, open_picture
from gtp_vit.data.preview import preview_transform
from gtp_vit.engines import is_exported
from gtp_vit.errors import GTPError, plural
from gtp_vit.metrics.dense import patch_errors, patch_features
from gtp_vit.models import bundled
from gtp_vit.models.sources import transform_of
from gtp_vit.patching import host_of, patch
from gtp_vit.profiling.trace import trace
from gtp_vit.report.page import Section, paragraph, picture, table
from gtp_vit.report.patch_features import feature_panels, same_segment_percent
from gtp_vit.report.tokens import default_layers, lost_fraction_text, panels, png, token_table
from gtp_vit.runs.files import check_writable, write_atomically


@dataclass(frozen=True)
class Visualise(JsonFlags, MethodFlags, ModelFlags):
    """Draw which patches are left after each layer and where the others went: a PNG for each image, and one HTML page.

    examples:
      gtp-vit visualise --remove 14
      gtp-vit visualise vit_tiny_patch16_224 cat.jpg dog.jpg --pretrained --method tome --r 14 --output pictures
      gtp-vit visualise vit_small_patch14_dinov2 cat.jpg --pretrained --img-size 224 --features
    """

    images: Positional[tuple[Path, ...]] = ()
    """Pictures; without any, fashion_vit shows some of its own."""
    layers: tuple[int, ...] = ()
    """Which layers to draw, counted from 0; four of them by default."""
    features: bool = False
    """Draw features of the patches instead, unreduced and restored: principal components as colours, and segments."""
    ignore_exif: bool = False
    """Take pictures as they are stored, not upright as their EXIF data say."""
    output: Path = Path("visualised")
    """Folder for the pictures and index.html."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Visualise, arguments)
    _check_model_first(flags)
    check_weights(flags)
    check_is_folder(flags.output)
    check_writable(flags.output / "index.html")
    model = make_model(flags)
    method = chosen.for_model(model)
    if flags.features:
        _draw_features(flags, arguments, model, method)
        return
    fast = patch(model, method)
    depth = host_of(model).vit.depth
    layers = flags.layers or default_layers(depth)
    wrong = [layer for layer in layers if not 0 <= layer < depth]
    if wrong:
        raise GTPError(f"--layers has {wrong[0]}; this model has layers 0 to {depth - 1}")
    sections, drawn = [], {}
    caption = "Above: what is left, with the sizes of tokens. Below: which patches share one."
    for name, image, tensor in _pictures(flags, model):
        traced, path = trace(fast, tensor[None]), flags.output / f"{name}.png"
        data = png(panels(image, traced, layers))
        write_atomically(path, data)
        tokens_left = [layer.kept.shape[1] for layer in traced.layers]
        drawn[str(path)] = {"kept": tokens_left, "lost": round(float(traced.lost()[0]), 4)}
        sections.append(Section(name, picture(data, caption)))
        text = table(*token_table(traced)) + paragraph(lost_fraction_text(traced))
        sections.append(Section(f"{name}, layer by layer", text))
    page = flags.output / "index.html"
    lead = "A patch in colour shares its token with all of the same colour; grey ones are alone, white ones lost."
    write_page(flags, arguments, page, f"{flags.model} with {method}", lead, sections)
    result = {"page": page, "pictures": drawn, "settings": method.to_dict()}
    print_result(flags, result, text=f"Written: {page} and {plural(len(drawn), 'picture', 'pictures')}")


def _check_model_first(flags: Visualise) -> None:
    """Everybody writes the picture first."""
    if Path(flags.model).suffix.lower() in IMAGE_EXTENSIONS:
        more = " ".join(map(str, (flags.model, *flags.images)))
        raise GTPError(
            f"{flags.model} is a picture, and the model comes first: gtp-vit visualise {bundled.NAME} {more}, or "
            "any other model with --pretrained or --checkpoint"
        )
    if is_exported(flags.model):
        raise GTPError(f"{flags.model} does not show where its patches go; give the model that it was made from")


def _draw_features(flags: Visualise, arguments: Sequence[str], model: nn.Module, method: Method) -> None:
    """Pictures of patch features, unreduced and restored, and how near they are."""
    if flags.layers:
        raise GTPError("--features draws what the last layer gives; remove --layers")
    fast = patch(model, method, restore=True)
    sections, drawn = [], {}
    for name, image, tensor in _pictures(flags, model):
        with torch.inference_mode(), eval_mode(model, fast):
            one, other = (patch_features(m, tensor[None])[0].float() for m in (model, fast))
        data = png(feature_panels(image, one, other, host_of(model).vit.grid))
        path = flags.output / f"{name}-features.png"
        write_atomically(path, data)
        error, same = float(patch_errors(one, other).mean()), same_segment_percent(one, other)
        drawn[str(path)] = {"patch_error": round(error, 4), "same_segment_percent": round(same, 2)}
        caption = f"Relative error per patch {error:.3f}; {same:.1f} % of the patches are in the same segment."
        sections.append(Section(name, picture(data, caption)))
    page = flags.output / "index.html"
    lead = (
        "Above: the first three principal components of the unreduced features as red, green and blue. Below: segments."
    )
    write_page(flags, arguments, page, f"Features of {flags.model} with {method}", lead, sections)
    result = {"page": page, "pictures": drawn, "settings": method.to_dict()}
    print_result(flags, result, text=f"Written: {page} and {plural(len(drawn), 'picture', 'pictures')}")


def _pictures(flags: Visualise, model: nn.Module) -> list[tuple[str, Any, Any]]:
    """Each image's name, and what the model sees of it as a picture and as a tensor."""
    from PIL import Image

    if not flags.images:
        if flags.model != bundled.NAME:
            raise GTPError(
                f"{flags.model} has no pictures of its own; give some: gtp-vit visualise {flags.model} cat.jpg"
            )
        images, labels = bundled.sample_images()
        return [
            (
                f"{index}-{bundled.CLASSES[int(labels[index])]}",
                Image.fromarray(images[index].numpy()),
                bundled.normalise(images[index : index + 1])[0],
            )
            for index in range(3)
        ]
    view = preview_transform(model, transform_of(flags.model, model), img_size=flags.img_size)
    pictures = []
    for index, path in enumerate(flags.images):
        picture, tensor = view(open_picture(path, ignore_exif=flags.ignore_exif))
        pictures.append((f"{index}-{path.stem}", picture, tensor))
    return pictures
