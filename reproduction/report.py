"""reproduced: a table or figure of the paper beside our values, as a table, records, and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtp_vit.report.page import paragraph
from gtp_vit.report.plot import line_plot
from reproduction.experiments import EXTRA_MMACS
from reproduction.measure import Reproduced, complexity_table


@dataclass(frozen=True)
class Reproduction:
    """A table or figure as text for people, and as records for programs."""

    columns: list[str]
    rows: list[list[str]]
    records: list[dict[str, Any]]
    html: str = ""
    unreadable: Sequence[str] = ()


def show_cells(found: Sequence[Reproduced], unreadable: Sequence[str]) -> Reproduction:
    """A row for each cell, and accuracy over GMACs as far as both are there."""
    columns = ["row", "column", "GMACs printed", "GMACs ours", "deviation", "top-1 printed", "top-1 ours", "difference"]
    sources = any(one.cell.source for one in found)
    columns += ["method", "source"] if sources else ["method"]
    rows = [_row(one) + ([one.cell.source] if sources else []) for one in found]
    return Reproduction(columns, rows, [_record(one) for one in found], _plot(found), unreadable)


def _record(found: Reproduced) -> dict[str, Any]:
    """Numbers as numbers, null where the paper prints none; a text says what is missing."""
    cell = found.cell
    return {
        "model": cell.model,
        "row": cell.row,
        "column": cell.column,
        "gmacs_printed": cell.gmacs,
        "gmacs": found.gmacs,
        "gmacs_deviation": found.gmacs_deviation,
        "top1_printed": cell.top1,
        "top1": found.top1,
        "top1_difference": found.top1_deviation,
        "method": None if cell.method is None else str(cell.method),
        **({"source": cell.source} if cell.source else {}),
    }


def _row(found: Reproduced) -> list[str]:
    cell = found.cell
    return [
        cell.row,
        cell.column,
        "not printed" if cell.gmacs is None else _printed(cell.gmacs),
        found.gmacs if isinstance(found.gmacs, str) else f"{found.gmacs:.3f}",
        "" if found.gmacs_deviation is None else f"{found.gmacs_deviation:+.1%}",
        "not printed" if cell.top1 is None else _printed(cell.top1),
        found.top1 if isinstance(found.top1, str) else f"{found.top1:.2f}",
        "" if found.top1_deviation is None else f"{found.top1_deviation:+.2f}",
        str(cell.method) if cell.method is not None else "none here" if cell.absent else "unreduced",
    ]


def _printed(figure: float) -> str:
    """A figure with the digits that are printed, one behind the point at least."""
    return str(float(figure))


def _plot(found: Sequence[Reproduced]) -> str:
    """Accuracy over GMACs, printed and ours."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        if isinstance(one.gmacs, str):
            continue
        if one.cell.top1 is not None:
            lines.setdefault(f"{one.cell.row}, printed", []).append((one.gmacs, one.cell.top1))
        if not isinstance(one.top1, str):
            lines.setdefault(f"{one.cell.row}, ours", []).append((one.gmacs, one.top1))
    return line_plot(lines, "GMACs", "top-1 accuracy, %") if lines and len(lines) <= 20 else ""


def show_complexity() -> Reproduction:
    """What the appendix's formulas give for the extra work of GTP and ToMe, beside what it prints."""
    records, rows = [], []
    for name, gtp, tome, on_keys in complexity_table():
        for method, ours, really in (("GTP", gtp, None), ("ToMe", tome, on_keys)):
            printed = EXTRA_MMACS[name][method]
            record = {"backbone": name, "method": method, "printed": printed, "by the formula": ours}
            records.append(record | {"deviation": ours / printed - 1, "on its keys": really})
            last = "" if really is None else f"{really:.1f}"
            rows.append([name, method, str(printed), f"{ours:.1f}", f"{ours / printed - 1:+.1%}", last])
    text = (
        "Extra MMACs at 8 tokens a layer. The paper's sum for ToMe takes all channels; ToMe compares keys averaged "
        "over heads, 64 channels of these models, so its real figure is the last column."
    )
    return Reproduction(list(records[0]), rows, records, paragraph(text))


def show_oversmoothing(found: Mapping[str, Sequence[float]], model: str, images: int) -> Reproduction:
    """Mean cosine similarity of the tokens after each layer, by method."""
    layers = range(len(next(iter(found.values()))))
    rows = [[str(layer), *(f"{values[layer]:.4f}" for values in found.values())] for layer in layers]
    records = [{"layer": layer} | {name: values[layer] for name, values in found.items()} for layer in layers]
    lines = {name: [(float(layer), value) for layer, value in enumerate(values)] for name, values in found.items()}
    text = f"{model} without finetuning, {images} images; the paper's figure is of finetuned DeiT-S models."
    drawn = line_plot(lines, "layer", "mean cosine similarity") + paragraph(text)
    return Reproduction(["layer", *found], rows, records, drawn)
