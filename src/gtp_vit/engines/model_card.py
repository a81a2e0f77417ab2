"""The model card beside an exported file: what is in it, how to prepare images, how it was checked."""

from __future__ import annotations

from collections.abc import Sequence

from gtp_vit.engines.engine import INPUT, Engine, UsageExample
from gtp_vit.engines.metadata import ExportMetadata, output_name
from gtp_vit.engines.output_check import OutputCheck

CHECK_COLUMNS = ["batch", "largest difference", "largest output", "agreement %", "KL"]


def model_card(
    file: str, metadata: ExportMetadata, engine: Engine, checks: Sequence[OutputCheck], checked_on: str
) -> str:
    """The card as Markdown."""
    method, (height, width) = metadata.method, metadata.size
    reduced = "unreduced" if method is None else f"reduced by {method.name}"
    settings = {} if method is None else {key: value for key, value in method.to_dict().items() if key != "method"}
    lines = [
        f"# {file}",
        "",
        f"{metadata.model}, {reduced}, {metadata.precision}, for {engine.title}. "
        f"{metadata.exported_macs / 1e9:.3f} GMACs per image, {metadata.macs_ratio:.0%} of the unreduced model's.",
        "",
        "## Input and output",
        f"- input `{INPUT}`: float32 [batch, {metadata.channels}, {height}, {width}], {metadata.batch_text}",
        f"- output `{output_name(metadata.output)}`: float32, {metadata.output.width} numbers ({metadata.output.kind})",
        f"- preprocessing: {'; '.join(_preprocessing_steps(metadata))}",
        "",
        "## Use",
        *(line for example in engine.examples(file, metadata.precision) for line in _example(example)),
        f"The file says what is in it, as JSON {engine.metadata_place}: preparation, names of the",
        "classes, settings and versions.",
        "",
        "## Checked",
        *_checked(engine, checks, checked_on),
        "",
        "## Made from",
        f"- weights: {metadata.weights or 'not named'}, fingerprint {metadata.fingerprint}",
        *([f"- settings: {', '.join(f'{key} = {value}' for key, value in settings.items())}"] if settings else []),
        "- " + ", ".join(f"{name} {version}" for name, version in metadata.versions.items()),
    ]
    return "\n".join(lines) + "\n"


def _checked(engine: Engine, checks: Sequence[OutputCheck], checked_on: str) -> list[str]:
    if not checks:
        return [f"Converted and checked as a program, and not run: {checked_on}. Compare it with torch there first."]
    return [
        f"In {engine.title} against torch with the same method, on {checked_on}:",
        "",
        f"| {' | '.join(CHECK_COLUMNS)} |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(check_row(check)) + " |" for check in checks),
    ]


def check_row(check: OutputCheck) -> list[str]:
    """The cells of one check: batch, difference, largest output, agreement, KL."""
    agreement = "-" if check.agreement is None else f"{check.agreement:.0f}"
    kl = f"cosine {check.cosine:.4f}" if check.kl is None else f"{check.kl:.2g}"
    return [str(check.batch), f"{check.max_difference:.2g}", f"{check.max_output:.3g}", agreement, kl]


def _preprocessing_steps(metadata: ExportMetadata) -> list[str]:
    """The preprocessing, step by step."""
    words, (height, width) = metadata.preprocessing, metadata.size
    how = words.interpolation or "bilinear"
    steps = ["turn the picture upright as its EXIF data say"]
    if words.crop_mode == "squash":
        steps.append(f"resize to {height} x {width}, whatever its shape ({how})")
    elif words.crop_pct is not None:
        steps.append(f"resize the short side to {round(min(height, width) / words.crop_pct)} ({how})")
        steps.append(f"cut {height} x {width} out of the middle")
    else:
        steps.append(f"resize and crop to {height} x {width}")
    steps.append("divide by 255")
    if words.mean is not None and words.std is not None:
        steps.append(f"subtract {_numbers(words.mean)}, divide by {_numbers(words.std)} (per channel)")
    return steps


def _example(example: UsageExample) -> list[str]:
    note = [f"{example.note}:"] if example.note else []
    return [*note, f"```{example.language}", example.code, "```"]


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
