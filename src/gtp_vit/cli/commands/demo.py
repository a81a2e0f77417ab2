"""gtp-vit demo: a web page on this machine to play with a model and the methods."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import exported_file_of, flags_of_source
from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.model_flags import ModelFlags, check_weights, make_model
from gtp_vit.data.preview import preview_transform
from gtp_vit.demo import page, serve
from gtp_vit.demo.demo_model import DemoModel, Example, bundled_examples, make_demo_model, read_examples
from gtp_vit.demo.exported_model import ExportedSubject, make_exported_subject
from gtp_vit.engines import is_exported
from gtp_vit.engines.file_images import check_processor
from gtp_vit.errors import GTPError
from gtp_vit.models import bundled
from gtp_vit.models.sources import public_name, transform_of


@dataclass(frozen=True)
class Demo(ModelFlags):
    """A web page on this machine: choose a picture, a method and a share of the MACs, and see what happens.

    It shows what is left of the picture after each layer and where every patch went, the classes before and after,
    MACs, the speed-up here, and gives the settings as a recipe. Of models without classes it shows the nearest examples
    and restored features. It needs gradio: pip install 'gtp-vit[demo]'.

    Only this machine can open the page, and nothing is loaded from outside or sent there. A file that gtp-vit export
    has written can be given instead of a model; where its patches went cannot be seen.

    examples:
      gtp-vit demo
      gtp-vit demo vit_tiny_patch16_224 --pretrained --examples photos
      gtp-vit demo vit_small_patch14_dinov2 --pretrained --img-size 224 --examples photos
      gtp-vit demo exported/vit_tiny_patch16_224-gtp_plus-f32.onnx
    """

    examples: Path | None = None
    """A folder of pictures to start with, and to find neighbours among; fashion_vit has its own."""
    port: int = serve.PORT
    """Port of the page; if it is in use, the next free one."""
    host: str = serve.LOCAL
    """Address to listen on; any other than 127.0.0.1 lets other machines in."""
    open: bool = False
    """Open the page in the browser."""


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(Demo, arguments)
    serve.check_extra()
    listening = serve.listen(flags.host, flags.port)
    with serve.gradio_without_telemetry(), listening:
        server = serve.server_of(page.build(_page_subject(flags, arguments)), flags.host)
        port, address = listening.getsockname()[1], serve.address_of(flags.host, listening)
        if port != flags.port:
            render.print_text(f"Port {flags.port} is in use; {port} is the next free one.")
        if not serve.is_local(flags.host):
            render.print_text(f"Everyone who can reach {flags.host} can use this page and its processor time.")
        render.print_text(f"{flags.model}: {address}  (Ctrl+C to stop)")
        sys.stdout.flush()  # into a pipe as well
        if flags.open:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
        render.print_text("Stopped.")


def _page_subject(flags: Demo, arguments: Sequence[str]) -> DemoModel | ExportedSubject:
    return _exported_subject(flags, arguments) if is_exported(flags.model) else _demo_model(flags)


def _demo_model(flags: Demo) -> DemoModel:
    check_weights(flags)
    model = make_model(flags)
    return make_demo_model(flags.model, model, _examples(flags), _python(flags), flags.img_size)


def _examples(flags: Demo) -> list[Example]:
    if flags.examples is not None:
        return read_examples(flags.examples)
    return bundled_examples() if flags.model == bundled.NAME else []


def _python(flags: Demo) -> str:
    """The line that makes the model; of files only the name, as the page may be seen by others."""
    settings: dict[str, Any] = {
        "pretrained": flags.pretrained,
        "checkpoint": None if flags.checkpoint is None else flags.checkpoint.name,
        "img_size": flags.img_size,
        "num_classes": flags.num_classes,
    }
    more = "".join(f", {key}={value!r}" for key, value in settings.items() if value is not None and value is not False)
    return f"gtp_vit.create_model({public_name(flags.model)!r}{more})"


def _exported_subject(flags: Demo, arguments: Sequence[str]) -> ExportedSubject:
    """An exported file, with the model it was made from if its weights are here."""
    file = exported_file_of(flags, None, arguments)
    examples = _examples(dataclasses.replace(flags, model=file.metadata.model))
    try:
        settings = flags_of_source(flags, file)
        check_weights(settings)
        model = make_model(settings)
    except GTPError as error:
        if flags.checkpoint is not None or flags.pretrained:  # asked for
            raise
        return make_exported_subject(file, file.load(flags.threads), examples, None, str(error))
    file.check_model(model)
    view = None
    if file.metadata.preprocessing.processor is not None:  # in no words that timm knows
        check_processor(file, settings.model)
        view = preview_transform(model, transform_of(settings.model, model), img_size=settings.img_size)
    return make_exported_subject(file, file.load(flags.threads), examples, model, view=view)
