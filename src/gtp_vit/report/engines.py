"""engines: one model in every engine, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from gtp_vit.engines.comparison import EngineRow
from gtp_vit.report.results import Table

COLUMNS = [
    *("engine", "precision", "MB", "largest difference", "agreement %", "KL", "ms", "speed-up", "middle half"),
    "peak MB",
]
ENGINE_NOTE = (
    "Largest difference: to torch with the same method. Agreement and KL: with the unreduced model in torch, on the "
    "images given. Speed-up: over the unreduced model in the same engine and precision. Peak: of the process that runs "
    "the file, with Python."
)


def engine_table(rows: Sequence[EngineRow]) -> Table:
    """A row for each engine and precision; where there are no figures, the reason."""
    return COLUMNS, [_cells(row) for row in rows]


def _cells(row: EngineRow) -> list[str]:
    figures = row.figures
    if figures is None:
        return [f"{row.engine}: {row.problem}", row.precision, *["-"] * (len(COLUMNS) - 2)]
    low, high = figures.time.speedup_quartiles
    return [
        row.engine,
        row.precision,
        _number(figures.megabytes, ".1f"),
        f"{figures.max_difference:.2g}",
        _number(figures.agreement, ".1f"),
        _number(figures.kl, ".2g"),
        f"{figures.time.milliseconds:.1f}",
        f"{figures.time.speedup:.2f}",
        f"{low:.2f} .. {high:.2f}",
        _number(figures.peak_megabytes, ".0f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
