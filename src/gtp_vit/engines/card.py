"""The model card beside an exported file: what is in it, how to prepare images, how it was checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def card(file: str, about: dict[str, Any], checks: Sequence[Checked], images: str) -> str:
    """The card as Markdown."""
    method, given, output = about["method"], about["input"], about["output"]
    reduced = "unreduced" if method is None else f"reduced by {method['method']}"
    height, width = given["size"]
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
        f"{about['model']}, {reduced}, {about['precision']}, for {about['engine']}. "
        f"{about['macs']['exported'] / 1e9:.3f} GMACs an image, {about['macs']['share']:.0%} of the unreduced model's.",
        "",
        "## Input and output",
        f"- input `{given['name']}`: float32 [batch, {given['channels']}, {height}, {width}], any batch",
        f"- output `{output['name']}`: float32, {output['width']} numbers ({output['kind']})",
        f"- preparation: {'; '.join(prepare)}",
        "",
        "## Use",
        _RUN[about["engine"]].format(file=file, hint="bf16" if about["precision"] == "bf16" else "f32"),
        "The file holds standard operators only, and its description as JSON in the metadata, under the key `gtp_vit`:",
        "preparation, names of the classes, settings and versions.",
        "",
        "## Checked",
        f"In {about['engine']} against torch with the same method, on {images}:",
        "",
        f"| {' | '.join(CHECK_COLUMNS)} |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(check_row(check)) + " |" for check in checks),
        "",
        "## Made from",
        f"- weights: {about['weights']['from'] or 'not named'}, fingerprint {about['weights']['fingerprint']}",
        *([f"- settings: {settings}"] if settings else []),
        f"- ONNX opset {about['opset']}; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    ]
    return "\n".join(lines) + "\n"


def run_lines(file: str, about: dict[str, Any]) -> str:
    """The lines of Python that run a file in its engine."""
    code = _RUN[about["engine"]].format(file=file, hint="bf16" if about["precision"] == "bf16" else "f32")
    return code.removeprefix("```python\n").removesuffix("\n```")


def check_row(check: Checked) -> list[str]:
    """The cells of one check: batch, difference, largest output, agreement, KL."""
    agreement = "-" if check.agreement is None else f"{check.agreement:.0f}"
    kl = f"cosine {check.cosine:.4f}" if check.kl is None else f"{check.kl:.2g}"
    return [str(check.batch), f"{check.difference:.2g}", f"{check.largest:.3g}", agreement, kl]


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)
