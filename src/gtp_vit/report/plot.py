"""plot: curves with dots as SVG, written as text, so that it needs no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e", "#66a182", "#8d5a97", "#c77d3f", "#4a4e69", "#7a9e2f", "#b56576")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 420, 76, 48, 16


class Point(NamedTuple):
    """A dot, and what is shown of it under the pointer; without a text, its name and place."""

    x: float
    y: float
    text: str = ""


def line_plot(
    series: Mapping[str, Sequence[Point | tuple[float, float]]], x_label: str, y_label: str, *, log_y: bool = False
) -> str:
    """One line with dots for each name; points in the order of x. What cannot be drawn is named below."""

    def can_be_drawn(point: Point | tuple[float, float]) -> bool:
        return all(map(math.isfinite, point[:2])) and not (log_y and point[1] <= 0)

    missing = [name for name, line in series.items() if not all(map(can_be_drawn, line))]
    why = "its value is not finite" + (", or it is 0, which no logarithmic axis has" if log_y else "")
    note = f"<p>Not drawn, at least in part, because {why}: {escape(', '.join(missing))}.</p>" if missing else ""
    lines = {name: sorted(Point(*point) for point in line if can_be_drawn(point)) for name, line in series.items()}
    points = [point for line in lines.values() for point in line]
    if not points:
        return f"<p>Nothing to draw.</p>{note}"
    right = 40 + 7 * max(13, *map(len, lines))  # room for the names
    to_y = math.log10 if log_y else float
    x_low, x_high = _pad_range([point.x for point in points])
    y_low, y_high = _pad_range([to_y(point.y) for point in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - right)
        up = HEIGHT - BOTTOM - (to_y(y) - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)
        return round(across, 1), round(up, 1)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for tick in _ticks(x_low, x_high):
        across = place(tick, points[0].y)[0]
        parts.append(f'<line class="grid" x1="{across}" x2="{across}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(y_low, y_high):
        value = 10**tick if log_y else tick
        up = place(points[0].x, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - right}" y1="{up}" y2="{up}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up + 4}" text-anchor="end">{value:.3g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if index >= len(COLOURS) else ""  # as many again, in the same colours
        spots = [place(point.x, point.y) for point in line]
        path = " ".join(f"{across},{up}" for across, up in spots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dashes} points="{path}"/>')
        for (across, up), point in zip(spots, line, strict=True):
            label = point.text or f"{name}: {point.x:.4g}, {point.y:.4g}"
            parts.append(
                f'<circle cx="{across}" cy="{up}" r="4" fill="{colour}"><title>{escape(label)}</title></circle>'
            )
        down = TOP + 12 + 20 * index
        filled = f'fill="none" stroke="{colour}" stroke-dasharray="3 2"' if dashes else f'fill="{colour}"'
        parts.append(f'<rect x="{WIDTH - right + 14}" y="{down - 9}" width="12" height="12" {filled}/>')
        parts.append(f'<text x="{WIDTH - right + 32}" y="{down + 2}">{escape(name)}</text>')
    middle = LEFT + (WIDTH - LEFT - right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    half = TOP + (HEIGHT - BOTTOM - TOP) / 2
    parts.append(
        f'<text transform="translate(14 {half}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text></svg>'
    )
    return "\n".join(parts) + note


def _pad_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = max(0.05 * (high - low), 0.02 * max(abs(high), abs(low))) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between the ends."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step) + 1)]
