"""verification: the report of `gtp-vit benchmark --verify` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gtp_vit.profiling.operator_equality import Equality
from gtp_vit.profiling.verify import Speed, Verification

Rows = Sequence[Sequence[str]]
STATES = {True: "passed", False: "FAILED", None: "not here"}


def markdown(report: Verification, operators: Sequence[Equality], gains: Mapping[tuple[int, str], float]) -> str:
    """The whole report; `operators` are its comparisons, summed up, and `gains` the share of slicing's gain."""
    parts = [
        "# gtp-vit on a GPU",
        report.line,
        "## Machine",
        _table(["what", "value"], [[name, value] for name, value in report.machine.items()]),
        "## Checks",
        _table(
            ["check", "result", "detail"], [[check.name, STATES[check.passed], check.detail] for check in report.checks]
        ),
        "## Operators",
        _table(
            ["operator", "dtype", "against", "other tokens", "largest error", "same bits", "result"], _rows(operators)
        ),
    ]
    if report.speeds:
        columns = [
            "batch",
            "mode",
            "model",
            "ms",
            "middle half",
            "img/s",
            "speed-up",
            "middle half",
            "of slicing's gain",
        ]
        parts += ["## Speed", _table([*columns, "peak MB"], [_speed(row, gains) for row in report.speeds])]
    return "\n\n".join(parts) + "\n"


def _rows(operators: Sequence[Equality]) -> Rows:
    return [
        [
            *(row.operator, row.dtype, row.against, f"{row.different_tokens:.2%}", f"{row.largest_error:.0e}"),
            *("yes" if row.same_bits else "no", STATES[row.passed]),
        ]
        for row in operators
    ]


def _speed(row: Speed, gains: Mapping[tuple[int, str], float]) -> list[str]:
    timing = row.timing
    share = gains.get((row.batch_size, row.mode)) if row.model not in ("unreduced", "slicing") else None
    return [
        *(str(row.batch_size), row.mode, row.model, f"{timing.milliseconds:.2f}"),
        f"{timing.quartiles[0]:.2f} .. {timing.quartiles[1]:.2f}",
        *(f"{1000 * row.batch_size / timing.milliseconds:.0f}", f"{timing.speedup:.2f}"),
        f"{timing.speedup_quartiles[0]:.2f} .. {timing.speedup_quartiles[1]:.2f}",
        "" if share is None else f"{share:.0%}",
        "" if row.peak_megabytes is None else f"{row.peak_megabytes:.0f}",
    ]


def _table(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )
