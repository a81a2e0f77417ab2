"""markup: a study as HTML. page.js draws the patches from the numbers in it; everything that is text is escaped."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gtp_vit.demo.demo_model import DemoModel
from gtp_vit.demo.exported_model import ExportedSubject, FileInspection
from gtp_vit.demo.inspection import ClassProbability, Column, Inspection, Neighbour
from gtp_vit.profiling.benchmark import Timing
from gtp_vit.profiling.trace import Trace
from gtp_vit.report.page import escape

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 32  # pixels of a patch, if the picture has that many
TIE_TOLERANCE = 0.015  # a share this far from what was asked for needs no remark


def inspection_html(
    demo_model: DemoModel,
    inspection: Inspection,
    notes: Sequence[str],
    timings: Sequence[Timing] | None,
    rounds: int = 0,
) -> str:
    """Everything that is shown of one study; without timings it says that they are being measured."""
    times: Sequence[Timing | None] = [None] * len(inspection.columns) if timings is None else timings
    cards = [
        _card(demo_model, inspection, column, timing, rounds)
        for column, timing in zip(inspection.columns, times, strict=True)
    ]
    picture = f"{_bar(demo_model)}{_picture(demo_model, inspection)}"
    return f"{_notes(notes)}{picture}<div class='gtp-columns'>{''.join(cards)}</div>"


def file_html(exported: ExportedSubject, inspection: FileInspection, notes: Sequence[str]) -> str:
    """Everything that is shown of a file."""
    metadata, name = exported.file.metadata, escape(exported.name)
    rows = [("MACs", _fraction_of(metadata.exported_macs, metadata.unreduced_macs))]
    rows.append(("Method", str(metadata.method or "none")))
    rows.append(("Runs in", f"{exported.file.engine.title}, {metadata.precision}"))
    if exported.original_model is None:
        rows.append(("Compared with", f"nothing, so there is no speed-up and no damage: {exported.why_no_original}"))
    else:
        speed = "measuring…" if inspection.timing is None else speed_text(inspection.timing, inspection.rounds)
        rows.append(("Against torch", f"{speed}. The file runs in a process of its own, and copying is counted."))
        rows.append((exported.measure.metric(exported.measure.damage).title, f"{inspection.damage:.4f}"))
    rows.append(
        (
            "Patches",
            "An exported file shows its output only. Where patches went is not in it; start the demo with "
            "the model itself to see that.",
        )
    )
    image = f"<img class='gtp-seen' alt='what the file sees' src='{data_url(inspection.preview.picture)}'>"
    classes = _classes(inspection.before or inspection.after, inspection.after, "before" if inspection.before else "")
    return (
        f"{_notes(notes)}<div class='gtp-columns'><section class='gtp-card' aria-label='{name}'><h3>{name}</h3>"
        f"{image}{_terms(rows)}{classes}</section></div>"
    )


def message_html(text: str) -> str:
    """One sentence instead of a study."""
    return f"<p class='gtp-message' role='status'>{escape(text)}</p>"


def data_url(picture: Image, kind: str = "PNG") -> str:
    """A picture inside HTML."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _notes(notes: Sequence[str]) -> str:
    return f"<p class='gtp-notes' role='status'>{escape(' '.join(notes))}</p>" if notes else ""


def _bar(demo_model: DemoModel) -> str:
    """The controls that choose the layer and how it is drawn."""
    depth = demo_model.host.vit.depth
    return (
        "<div class='gtp-bar'>"
        f"<label>Layers done <input type='range' class='gtp-layer' min='0' max='{depth}' value='{depth}' step='1'>"
        f"<output class='gtp-layer-name'>{depth} of {depth}</output></label>"
        "<label><input type='checkbox' class='gtp-groups'> Colour the groups</label></div>"
    )


def _picture(demo_model: DemoModel, inspection: Inspection) -> str:
    """The picture that the patches are drawn from; hidden, with a height that all patches share."""
    rows, columns = demo_model.host.vit.grid
    picture = inspection.preview.picture
    side = min(max(picture.width // columns, 1), CELL)
    small = picture.resize((columns * side, rows * side)) if picture.size != (columns * side, rows * side) else picture
    return f"<img class='gtp-picture' hidden alt='' src='{data_url(small)}'>"


def _card(demo_model: DemoModel, inspection: Inspection, column: Column, timing: Timing | None, rounds: int) -> str:
    name = escape(column.name)
    data = escape(json.dumps(trace_data(column.trace), separators=(",", ":")), quote=True)
    parts = [
        f"<section class='gtp-card' aria-label='{name}' data-trace='{data}'>",
        f"<h3>{name}</h3>",
        f"<canvas class='gtp-map' tabindex='0' role='img' aria-label='Patches that {name} keeps; arrow keys choose "
        "one'></canvas>",
        "<p class='gtp-patch' aria-live='polite'></p>",
        f"<div class='gtp-strip' role='group' aria-label='All layers of {name}'></div>",
        _figures(demo_model, inspection, column, timing, rounds),
        _classes(inspection.classes, column.classes),
        _neighbours(demo_model, inspection.neighbours, column.neighbours),
        _features(column),
        f"<details><summary>Settings</summary><code>{escape(str(column.method))}</code></details></section>",
    ]
    return "".join(parts)


def trace_data(traced: Trace) -> dict[str, Any]:
    """The numbers that page.js draws, of the first image of a trace."""
    return {
        "grid": list(traced.grid),
        "layers": [
            {
                "kept": layer.kept[0].tolist(),
                "owner": layer.owners[0].tolist(),
                "size": None if layer.sizes is None else [round(size, 2) for size in layer.sizes[0].tolist()],
            }
            for layer in traced.layers
        ],
    }


def _figures(demo_model: DemoModel, inspection: Inspection, column: Column, timing: Timing | None, rounds: int) -> str:
    """Cost, speed and damage of a column, as a list of terms."""
    left, patches = column.trace.layers[-1].kept.shape[1], demo_model.host.vit.image_tokens
    title = demo_model.measure.metric(demo_model.measure.damage).title
    rows = [
        ("MACs", macs_text(column, inspection.unreduced_macs)),
        ("Speed-up here", "measuring…" if timing is None else speed_text(timing, rounds)),
        (title, f"{column.damage:.4f}"),
        ("Tokens left", f"{left} of {patches}"),
        ("Lost", f"{float(column.trace.lost()[0]):.0%} of the removed tokens reached no other one"),
    ]
    caution = column.method.warning()
    if caution:
        rows.append(("Careful", caution))
    return _terms(rows)


def _terms(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in rows) + "</dl>"


def macs_text(column: Column, whole: int) -> str:
    """The cost of a method, and where it differs from the requested one."""
    text = _fraction_of(column.macs, whole)
    if column.macs_of_this_picture:
        return f"{text} for this picture; its number of tokens depends on what is seen"
    if abs(column.fraction - column.requested) > TIE_TOLERANCE:
        return f"{text}, the nearest it can get to {column.requested:.0%}"
    return text


def _fraction_of(macs: int, whole: int) -> str:
    """A part of the MACs, in one unit."""
    unit, name = (1e9, "GMACs") if whole >= 1e9 else (1e6, "MMACs")
    return f"{macs / unit:.3g} of {whole / unit:.3g} {name}: {macs / whole:.1%}"


def speed_text(timing: Timing, rounds: int) -> str:
    """The speed-up with its spread, and what it means."""
    low, high = timing.speedup_quartiles
    verdict = {True: "faster", False: "slower", None: "the noise here is larger than the difference"}[timing.faster]
    spread = f"{timing.speedup:.2f} x ({low:.2f} to {high:.2f}, the middle half of {rounds} rounds in turns)"
    return f"{spread}: {verdict}; {timing.milliseconds:.1f} ms for one picture"


def _classes(before: Sequence[ClassProbability], after: Sequence[ClassProbability], first: str = "before") -> str:
    """The first classes before and after; without a name for the first column only those after."""
    if not after:
        return ""
    titles = [first, "after"] if first else ["class"]
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_probability_bar(entry)}</td>" for entry in pair[-len(titles) :]) + "</tr>"
        for pair in zip(before, after, strict=True)
    )
    return f"<table class='gtp-classes'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _probability_bar(likely: ClassProbability) -> str:
    return (
        f"<span class='gtp-name'>{escape(likely.name)}</span> <b>{likely.probability:.1%}</b>"
        f"<span class='gtp-share' style='width:{100 * likely.probability:.1f}%'></span>"
    )


def _neighbours(demo_model: DemoModel, before: Sequence[Neighbour], after: Sequence[Neighbour]) -> str:
    """The nearest examples without and with a method, in order."""
    if not demo_model.compares_neighbours:
        return ""
    if not before:
        return "<p>No examples to find neighbours among: start the demo with --examples FOLDER.</p>"
    same = len({n.example_index for n in before} & {n.example_index for n in after})
    rows = "".join(
        f"<tr><td>{_thumbnail(demo_model, one)}</td><td>{_thumbnail(demo_model, other)}</td></tr>"
        for one, other in zip(before, after, strict=True)
    )
    return (
        f"<p>Nearest examples: {same} of {len(before)} are the same.</p><table class='gtp-classes'><thead><tr>"
        f"<th>before</th><th>after</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _thumbnail(demo_model: DemoModel, near: Neighbour) -> str:
    example = demo_model.examples[near.example_index]
    small = example.picture.copy()
    small.thumbnail((48, 48))
    name = escape(example.name)
    return f"<img alt='' src='{data_url(small)}'> <span class='gtp-name'>{name}</span> <b>{near.cosine:.3f}</b>"


def _features(column: Column) -> str:
    if column.features is None:
        return ""
    text = (
        f"Restored features: relative error per patch {column.features.error:.3f}; {column.features.same:.0f} % of the "
        "patches stay in their segment. Above: principal components as colours. Below: segments."
    )
    image = f"<img alt='{escape(text)}' src='{data_url(column.features.picture)}'>"
    return f"<figure>{image}<figcaption>{escape(text)}</figcaption></figure>"
