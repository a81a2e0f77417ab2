"""A model that is being exported, in each form that an engine may convert from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_vit.core.backbone import Output, primary_output
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.engines.onnx_export import write_onnx
from gtp_vit.errors import GTPError, SettingError, first_line
from gtp_vit.patching import host_of, is_patched, tower_of

MIN_TORCH = "2.9"  # older ones translate some operators wrongly, or not at all


class Program:
    """A model, patched or not, that takes one tensor and returns one. Each form is made when it is first asked for."""

    def __init__(
        self, model: nn.Module, folder: Path, batch: int | None = None, on_trace: Callable[[], None] = lambda: None
    ) -> None:
        """Make no form yet.

        Args:
            model: one that `check_exportable` accepts.
            folder: for the files of forms; it must exist.
            batch: images that the program takes at a time; None = any number.
            on_trace: called when the model has been traced.
        """
        inputs, self.output = host_of(model).inputs, output_spec(model)
        self.module = PrimaryOutput(model, self.output.kind)
        self.images = torch.zeros(batch or 2, inputs.channels, *inputs.size)  # two: one would be taken as the only size
        self.folder, self.batch, self.on_trace = folder, batch, on_trace

    @property
    def dynamic_shapes(self) -> tuple[dict[int, torch.export.Dim]] | None:
        """The dimensions that may differ between calls, as torch.export takes them."""
        return ({0: torch.export.Dim("batch")},) if self.batch is None else None

    @functools.cached_property
    def onnx(self) -> Path:
        """A file of ONNX, with 32-bit floats and standard operators only."""
        path = self.folder / "float.onnx"
        write_onnx(self, path)
        self.on_trace()
        return path

    @functools.cached_property
    def exported(self) -> torch.export.ExportedProgram:
        """A program of torch.export."""
        try:
            with torch.no_grad(), eval_mode(self.module):
                program = torch.export.export(
                    self.module, (self.images,), dynamic_shapes=self.dynamic_shapes, strict=False
                )
        except Exception as error:  # the exporter raises errors of many classes
            raise GTPError(f"torch cannot export this model: {first_line(error)}") from error
        self.on_trace()
        return program

    @functools.cached_property
    def pt2(self) -> Path:
        """A file of the program of torch.export, for a converter that runs in another Python."""
        path = self.folder / "float.pt2"
        torch.export.save(self.exported, path)
        return path


class PrimaryOutput(nn.Module):
    """A model that returns one tensor, whatever else the original returns."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self.training = False  # only of this module; the model's own modules are as the caller left them

    def forward(self, images: Tensor) -> Tensor:
        return primary_output(self.model(images), self.kind)


def output_spec(model: nn.Module) -> Output:
    """The kind and width of a model's output; raises GTPError if that is not known."""
    output = host_of(model).output
    if output is None:
        raise GTPError("it is not known what this model returns, so a file could not be checked; export its ViT alone")
    return output


def torch_can_export() -> bool:
    """Is this torch new enough? Builds before a release, such as 2.9.0a0, count as the release."""
    have, need = ([int(number) for number in text.split(".")[:2]] for text in (torch.__version__, MIN_TORCH))
    return have >= need


def check_exportable(model: nn.Module) -> None:
    """Refuse models whose program depends on the image, on other devices, and in other precisions."""
    if not torch_can_export():
        raise GTPError(
            f"export needs torch {MIN_TORCH} or newer, and this is {torch.__version__}: pip install --upgrade torch"
        )
    output_spec(model)  # raises for models that are not supported
    if is_patched(model) and tower_of(model).reducer.adaptive:
        name = tower_of(model).reduction.method.name
        raise SettingError(
            f"{name} keeps a different number of tokens in each image, and a program has fixed shapes; give it a "
            "budget (ats: budget=...), or use gtp_plus"
        )
    if is_patched(model) and tower_of(model).reduction.method.not_exported is not None:
        raise SettingError(tower_of(model).reduction.method.not_exported)
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise SettingError(
            f"the model is in {dtype} on {weight.device.type}; export takes float32 on a CPU: model.float().cpu(), and "
            "choose the precision of the file with precision="
        )
