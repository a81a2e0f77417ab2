"""markup: a study as HTML. page.js draws the patches from the numbers in it; everything that is text is escaped."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gtp_vit.demo.demo_model import Subject
from gtp_vit.demo.exported_model import Filed, FileStudy
from gtp_vit.demo.inspection import Column, Likely, Neighbour, Study
from gtp_vit.profiling.benchmark import Timing
from gtp_vit.profiling.trace import Trace
from gtp_vit.report.page import escape

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 32  # pixels of a patch, if the picture has that many
NEAR = 0.015  # a share this far from what was asked for needs no remark


def study_html(
    subject: Subject, study: Study, notes: Sequence[str], timings: Sequence[Timing] | None, rounds: int = 0
) -> str:
    """Everything that is shown of one study; without timings it says that they are being measured."""
    times: Sequence[Timing | None] = [None] * len(study.columns) if timings is None else timings
    cards = [_card(subject, study, column, timing, rounds) for column, timing in zip(study.columns, times, strict=True)]
    return f"{_notes(notes)}{_bar(subject)}{_picture(subject, study)}<div class='gtp-columns'>{''.join(cards)}</div>"


def file_html(filed: Filed, study: FileStudy, notes: Sequence[str]) -> str:
    """Everything that is shown of a file."""
    metadata, name = filed.file.metadata, escape(filed.name)
    rows = [("MACs", _of(metadata.exported_macs, metadata.unreduced_macs))]
    rows.append(("Method", str(metadata.method or "none")))
    rows.append(("Runs in", f"{filed.file.engine.title}, {metadata.precision}"))
    if filed.original is None:
        rows.append(("Compared with", f"nothing, so there is no speed-up and no damage: {filed.why_alone}"))
    else:
        speed = "measuring…" if study.timing is None else speed_text(study.timing, study.rounds)
        rows.append(("Against torch", f"{speed}. The file runs in a process of its own, and copying is counted."))
        rows.append((filed.measure.figure(filed.measure.damage).title, f"{study.damage:.4f}"))
    rows.append(
        (
            "Patches",
            "An exported file shows its output only. Where patches went is not in it; start the demo with "
            "the model itself to see that.",
        )
    )
    seen = f"<img class='gtp-seen' alt='what the file sees' src='{data_url(study.seen.picture)}'>"
    classes = _classes(study.before or study.after, study.after, "before" if study.before else "")
    return (
        f"{_notes(notes)}<div class='gtp-columns'><section class='gtp-card' aria-label='{name}'><h3>{name}</h3>"
        f"{seen}{_terms(rows)}{classes}</section></div>"
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


def _bar(subject: Subject) -> str:
    """Which layer is drawn, and how."""
    depth = subject.host.vit.depth
    return (
        "<div class='gtp-bar'>"
        f"<label>Layers done <input type='range' class='gtp-layer' min='0' max='{depth}' value='{depth}' step='1'>"
        f"<output class='gtp-layer-name'>{depth} of {depth}</output></label>"
        "<label><input type='checkbox' class='gtp-groups'> Colour the groups</label></div>"
    )


def _picture(subject: Subject, study: Study) -> str:
    """What the model sees, from which the patches are drawn; hidden, with a height that all patches share."""
    rows, columns = subject.host.vit.grid
    picture = study.seen.picture
    side = min(max(picture.width // columns, 1), CELL)
    small = picture.resize((columns * side, rows * side)) if picture.size != (columns * side, rows * side) else picture
    return f"<img class='gtp-picture' hidden alt='' src='{data_url(small)}'>"


def _card(subject: Subject, study: Study, column: Column, timing: Timing | None, rounds: int) -> str:
    name = escape(column.name)
    data = escape(json.dumps(trace_data(column.trace), separators=(",", ":")), quote=True)
    parts = [
        f"<section class='gtp-card' aria-label='{name}' data-trace='{data}'>",
        f"<h3>{name}</h3>",
        f"<canvas class='gtp-map' tabindex='0' role='img' aria-label='Patches that {name} keeps; arrow keys choose "
        "one'></canvas>",
        "<p class='gtp-patch' aria-live='polite'></p>",
        f"<div class='gtp-strip' role='group' aria-label='All layers of {name}'></div>",
        _figures(subject, study, column, timing, rounds),
        _classes(study.classes, column.classes),
        _neighbours(subject, study.neighbours, column.neighbours),
        _features(column),
        f"<details><summary>Settings</summary><code>{escape(str(column.method))}</code></details></section>",
    ]
    return "".join(parts)


def trace_data(found: Trace) -> dict[str, Any]:
    """The numbers that page.js draws, of the first image of a trace."""
    return {
        "grid": list(found.grid),
        "layers": [
            {
                "kept": layer.kept[0].tolist(),
                "owner": layer.owner[0].tolist(),
                "size": None if layer.size is None else [round(size, 2) for size in layer.size[0].tolist()],
            }
            for layer in found.layers
        ],
    }


def _figures(subject: Subject, study: Study, column: Column, timing: Timing | None, rounds: int) -> str:
    """Cost, speed and damage of a column, as a list of terms."""
    left, patches = column.trace.layers[-1].kept.shape[1], subject.host.vit.image_tokens
    title = subject.measure.figure(subject.measure.damage).title
    rows = [
        ("MACs", macs_text(column, study.whole)),
        ("Speed-up here", "measuring…" if timing is None else speed_text(timing, rounds)),
        (title, f"{column.damage:.4f}"),
        ("Tokens left", f"{left} of {patches}"),
        ("Lost", f"{float(column.trace.lost()[0]):.0%} of the removed tokens reached no other one"),
    ]
    caution = column.method.caution()
    if caution:
        rows.append(("Careful", caution))
    return _terms(rows)


def _terms(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in rows) + "</dl>"


def macs_text(column: Column, whole: int) -> str:
    """What it costs, and where that is not what was asked for."""
    text = _of(column.macs, whole)
    if column.of_this_picture:
        return f"{text} for this picture; its number of tokens depends on what is seen"
    if abs(column.share - column.asked) > NEAR:
        return f"{text}, the nearest it can get to {column.asked:.0%}"
    return text


def _of(macs: int, whole: int) -> str:
    """A part of the MACs, in one unit."""
    unit, name = (1e9, "GMACs") if whole >= 1e9 else (1e6, "MMACs")
    return f"{macs / unit:.3g} of {whole / unit:.3g} {name}: {macs / whole:.1%}"


def speed_text(timing: Timing, rounds: int) -> str:
    """The speed-up with its spread, and what it means."""
    low, high = timing.speedup_quartiles
    verdict = {True: "faster", False: "slower", None: "the noise here is larger than the difference"}[timing.faster]
    spread = f"{timing.speedup:.2f} x ({low:.2f} to {high:.2f}, the middle half of {rounds} rounds in turns)"
    return f"{spread}: {verdict}; {timing.milliseconds:.1f} ms for one picture"


def _classes(before: Sequence[Likely], after: Sequence[Likely], first: str = "before") -> str:
    """The first classes before and after; without a name for the first column only those after."""
    if not after:
        return ""
    titles = [first, "after"] if first else ["class"]
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_bar_of(each)}</td>" for each in pair[-len(titles) :]) + "</tr>"
        for pair in zip(before, after, strict=True)
    )
    return f"<table class='gtp-classes'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _bar_of(likely: Likely) -> str:
    return (
        f"<span class='gtp-name'>{escape(likely.name)}</span> <b>{likely.probability:.1%}</b>"
        f"<span class='gtp-share' style='width:{100 * likely.probability:.1f}%'></span>"
    )


def _neighbours(subject: Subject, before: Sequence[Neighbour], after: Sequence[Neighbour]) -> str:
    """The nearest examples without and with a method, in order."""
    if not subject.embeds:
        return ""
    if not before:
        return "<p>No examples to find neighbours among: start the demo with --examples FOLDER.</p>"
    same = len({each.place for each in before} & {each.place for each in after})
    rows = "".join(
        f"<tr><td>{_thumbnail(subject, one)}</td><td>{_thumbnail(subject, other)}</td></tr>"
        for one, other in zip(before, after, strict=True)
    )
    return (
        f"<p>Nearest examples: {same} of {len(before)} are the same.</p><table class='gtp-classes'><thead><tr>"
        f"<th>before</th><th>after</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _thumbnail(subject: Subject, near: Neighbour) -> str:
    example = subject.examples[near.place]
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
