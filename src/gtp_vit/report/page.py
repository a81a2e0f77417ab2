"""page: one self-contained HTML page: tables, plots, pictures, and how it was made."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gtp_vit.errors import printable
from gtp_vit.report import interactive
from gtp_vit.runs.files import write_atomically

STYLE = """
:root { --ink: #1d2433; --soft: #5b6577; --line: #dfe3ea; --wash: #f6f7f9; --accent: #00798c; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 24px 16px 64px; color: var(--ink); background: white;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 1.2rem; margin: 40px 0 8px; border-top: 1px solid var(--line); padding-top: 24px; }
p, li { max-width: 75ch; } .lead { color: var(--soft); margin-top: 0; }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; min-width: 100%; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.best td { background: #eef7f8; font-weight: 600; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--ink); }
svg .grid { stroke: var(--line); }
figure { margin: 16px 0; } figure img { max-width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
figcaption { color: var(--soft); font-size: .9rem; }
code, pre { font: .85rem ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--wash); }
pre { padding: 12px; overflow-x: auto; border-radius: 6px; }
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  body { max-width: none; padding: 0; font-size: 10pt; } h2 { margin-top: 16px; padding-top: 12px; break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } tr, svg, figure { break-inside: avoid; }
  th, td { padding: 3px 4px; white-space: normal; } tr.best td { print-color-adjust: exact; }
  svg { max-height: 150mm; } figure img { max-width: 75%; }
}
"""


def escape(text: str, *, quote: bool = True) -> str:
    """A text, which may be the name of a file, as HTML."""
    return html.escape(printable(text), quote)


@dataclass(frozen=True)
class Section:
    """A heading, and HTML under it."""

    title: str
    html: str


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None, *, sortable: bool = True
) -> str:
    """A table that scrolls by itself on a narrow screen, and sorts by a click on a column; `best` is highlighted."""
    kind = ' class="sortable"' if sortable and len(rows) > 1 else ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f"<tr{' class=best' if index == best else ''}>{cells}</tr>")
    parts = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="wide"><table{kind}>{parts}</table></div>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def picture(png: bytes, caption: str) -> str:
    """A picture inside the page."""
    data = base64.b64encode(png).decode()
    image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}"/>'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def write_report(
    path: Path, title: str, lead: str, sections: Sequence[Section], how_made: Mapping[str, object]
) -> None:
    """Write the page, with how it was made at its end; all in one file, so that it can be sent and kept."""
    rows = [[key.replace("_", " "), str(value)] for key, value in how_made.items()]
    parts = [*sections, Section("How this was made", table(["what", "value"], rows, sortable=False))]
    body = "\n".join(f"<h2>{escape(section.title)}</h2>\n{section.html}" for section in parts)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{interactive.STYLE}</style></head>\n"
        f'<body><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>\n{body}\n'
        f"<script>{interactive.SCRIPT}</script>\n</body></html>\n"
    )
    write_atomically(path, page)
