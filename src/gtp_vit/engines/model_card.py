"""The model card beside an exported file: what is in it, how to prepare images, how it was checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gtp_vit.engines.description import Description
from gtp_vit.engines.engine import INPUT

if TYPE_CHECKING:
    from gtp_vit.engines.export import Checked

CHECK_COLUMNS = ["batch", "largest difference", "largest output", "agreement %", "KL"]
_RUN = {
    "onnxruntime": """\
```python
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
outputs = session.run(None, {{"images": images}})[0]
```""",
    "openvino": """\
```python
import openvino

model = openvino.Core().compile_model("{file}", "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
outputs = model([images])[0]
```""",
}


def card(file: str, about: Description, checks: Sequence[Checked], images: str) -> str:
    """The card as Markdown."""
    method, given = about.method, about.preparation
    reduced = "unreduced" if method is None else f"reduced by {method['method']}"
    height, width = about.size
    settings = (
        "" if method is None else ", ".join(f"{key} = {value}" for key, value in method.items() if key != "method")
    )
    prepare = [f"resize and crop to {height} x {width}"]
    if given.get("crop_mode") == "squash":
        prepare = [f"resize to {height} x {width}, whatever its shape ({given.get('interpolation', 'bilinear')})"]
    elif "crop_pct" in given:
        side = round(min(height, width) / given["crop_pct"])
        prepare = [f"resize the short side to {side} ({given.get('interpolation', 'bilinear')})"]
        prepare.append(f"cut {height} x {width} out of the middle")
    prepare.append("divide by 255")
    if "mean" in given:
        prepare.append(f"subtract {_numbers(given['mean'])}, divide by {_numbers(given['std'])} (per channel)")
    prepare[0] = f"turn the picture upright as its EXIF data say; {prepare[0]}"
    lines = [
        f"# {file}",
        "",
        f"{about.model}, {reduced}, {about.precision}, for {about.engine}. "
        f"{about.exported / 1e9:.3f} GMACs an image, {about.share:.0%} of the unreduced model's.",
        "",
        "## Input and output",
        f"- input `{INPUT}`: float32 [batch, {about.channels}, {height}, {width}], any batch",
        f"- output `{about.output}`: float32, {about.width} numbers ({about.kind})",
        f"- preparation: {'; '.join(prepare)}",
        "",
        "## Use",
        _run(file, about),
        "The file holds standard operators only, and its description as JSON in the metadata, under the key `gtp_vit`:",
        "preparation, names of the classes, settings and versions.",
        "",
        "## Checked",
        f"In {about.engine} against torch with the same method, on {images}:",
        "",
        f"| {' | '.join(CHECK_COLUMNS)} |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(check_row(check)) + " |" for check in checks),
        "",
        "## Made from",
        f"- weights: {about.weights or 'not named'}, fingerprint {about.fingerprint}",
        *([f"- settings: {settings}"] if settings else []),
        f"- ONNX opset {about.opset}; " + ", ".join(f"{name} {version}" for name, version in about.versions.items()),
    ]
    return "\n".join(lines) + "\n"


def run_lines(file: str, about: Description) -> str:
    """The lines of Python that run a file in its engine."""
    return _run(file, about).removeprefix("```python\n").removesuffix("\n```")


def _run(file: str, about: Description) -> str:
    return _RUN[about.engine].format(file=file, hint="bf16" if about.precision == "bf16" else "f32")


def check_row(check: Checked) -> list[str]:
    """The cells of one check: batch, difference, largest output, agreement, KL."""
    agreement = "-" if check.agreement is None else f"{check.agreement:.0f}"
    kl = f"cosine {check.cosine:.4f}" if check.kl is None else f"{check.kl:.2g}"
    return [str(check.batch), f"{check.difference:.2g}", f"{check.largest:.3g}", agreement, kl]


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)
