"""Writes docs/comparison.md from what `gtp-vit compare` found (docs/results): python docs/make_comparison.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gtp_vit.report.plot import curves

FOLDER = Path(__file__).parent
MODELS = {
    "deit_tiny_patch16_224": "DeiT-Ti, its LayerNorms rounded",
    "vit_tiny_patch16_224": "ViT-Ti (AugReg)",
}
NUMBERS = (4, 8, 11, 14, 16)
FIGURES = ("kl", "agreement", "top1")
TUNED = ", tuned"
PAGE = """\
# All methods at equal cost

Written by `python docs/make_comparison.py` from `docs/results`; a test compares it with them.

{tuned}

Two real ImageNet classifiers, the same 2,000 ImageNet validation images (two of each class), no finetuning. The images
were read as they are stored (`--ignore-exif`), as timm and torchvision do; none of these files asks to be turned. Each
method at its defaults, with the one setting that says how much is removed chosen to meet the MACs of GTP at P = 4, 8,
11, 14 and 16. Each method's own work is counted, and all have the shortened last block. KL is the
divergence of the class probabilities from the unreduced model's, the most sensitive figure here; brackets are 95 %
intervals over images. A single accuracy on 2,000 images has a standard error of about one point, so differences of less
mean little. These are Ti models: they neither confirm nor refute the paper's accuracies for DeiT-S, DeiT-B and larger.

DynamicViT has untrained predictors here, which prune about as well as random; do not use it that way. ATS has a
fixed budget here (`ATS(budget=...)`). GTP's defaults (theta 1, alpha 0.2, M 8) were chosen on other, training images.
GTP+ is ours; its default schedule has a shape that was found on training images of these two models
([how](gtp-plus.md)), so a third model may gain less.

![KL over GMACs, DeiT-Ti](compared-deit_tiny_patch16_224.svg)
![KL over GMACs, ViT-Ti](compared-vit_tiny_patch16_224.svg)

{tables}

## What it shows

{findings}

## GTP+ against ToMe and GTP, paired

The same images for both sides of each difference; brackets are 95 % intervals. "tuned" are the recipes that the
package had before calibration ([docs/gtp-plus.md](gtp-plus.md)), found on training images.

{paired}

## How it was made

{commands}
"""


def load(model: str, kind: str = "compare") -> list[dict[str, Any]]:
    return json.loads((FOLDER / "results" / f"{kind}-{model}.json").read_text())


def all_rows(model: str) -> list[dict[str, Any]]:
    """Rows of all methods; GTP+ was measured later, on the same images."""
    later = [*load(model, "plus"), *load(model, "more")]
    return [*load(model), *(row for row in later if row["method"] == "gtp_plus")]


def by_budget(rows: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    found: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"]:
            found.setdefault(row["budget_gmacs"], []).append(row)
    return dict(sorted(found.items(), reverse=True))


def tables() -> str:
    parts = []
    for model, title in MODELS.items():
        rows = all_rows(model)
        whole = rows[0]
        budgets = by_budget(rows)
        parts.append(
            f"## {title}\n\nUnreduced: {whole['gmacs']:.3f} GMACs, top-1 {whole['top1']:.2f} %, "
            f"top-5 {whole['top5']:.2f} %, {whole['images']} images."
        )
        for figure, name in (("kl", "KL to the unreduced model"), ("agreement", "agreement, %"), ("top1", "top-1, %")):
            columns = [f"P={n}, {g:.3f} GMACs" for n, g in zip(NUMBERS, budgets, strict=True)]
            lines = [f"| {name} | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
            for method in dict.fromkeys(row["method"] for row in rows[1:]):
                cells = [_cell(figure, group, method) for group in budgets.values()]
                lines.append(f"| {method} | {' | '.join(cells)} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(figure: str, group: list[dict[str, Any]], method: str) -> str:
    row = next((row for row in group if row["method"] == method), None)
    if row is None:
        return "out of its reach"
    if figure == "kl":
        return f"{row['kl']:.4f} [{row['kl_low']:.4f}, {row['kl_high']:.4f}]"
    if figure == "agreement":
        return f"{row['agreement']:.1f} [{row['agreement_low']:.1f}, {row['agreement_high']:.1f}]"
    return (
        f"{row['top1']:.1f} ({row['top1_change']:+.1f} [{row['top1_change_low']:+.1f}, {row['top1_change_high']:+.1f}])"
    )


NOT_YET = """\
**Not measured yet: MCTF, PiToMe, ToFu and ATC, and every method with a tuned schedule.** The tables below have the
methods with their published schedules, but for GTP+, whose default shape was searched; whether GTP+ is still first when
everybody is tuned, and against MCTF, they do not say. `python benchmarks/comparison.py` measures it, in hours."""


def tuned() -> str:
    """Who is first when everybody is tuned; each method as published and as tuned; what is missing as long as it is."""
    parts, verdicts, ahead, measured = [], [], [], set()
    for model, title in MODELS.items():
        if not (FOLDER / "results" / f"tuned-{model}.json").exists():
            continue
        numbers = dict(zip(by_budget(all_rows(model)), NUMBERS, strict=True))
        for budget, group in by_budget(load(model, "tuned")).items():
            number = min(numbers.items(), key=lambda each: abs(each[0] - budget))[1]
            measured.add((model, number))
            ranked = sorted(group, key=lambda row: row["kl"])
            verdicts.append(verdict(f"{title}, P = {number}", ranked))
            ahead += rivals_ahead(f"{title}, P = {number}", group)
            lines = [f"| {title}, {budget:.3f} GMACs | KL | agreement, % | top-1, % |", "|---|---|---|---|"]
            lines += [
                f"| {row['method']} | {' | '.join(_cell(figure, [row], row['method']) for figure in FIGURES)} |"
                for row in ranked
            ]
            parts.append("\n".join(lines))
            names = {row["method"] for row in group}
            short = [name for name in sorted(names) if name.endswith(TUNED) and name.removesuffix(TUNED) not in names]
            if short:
                named = ", ".join(name.removesuffix(TUNED) for name in short)
                parts.append(f"Out of reach with the published schedule: {named}.")
    if not parts:
        return NOT_YET
    left = [
        f"{MODELS[model]}, P = {number}" for number in NUMBERS for model in MODELS if (model, number) not in measured
    ]
    missing = f"\n\nNot measured yet in this way: {'; '.join(left)}." if left else ""
    lead = (
        "## When everybody is tuned\n\nEvery method that has a schedule, as published and with one that was searched "
        "on the same training images, with as many passes over them (`python benchmarks/comparison.py`); GTP+ also "
        "learns on these images which tokens matter, as `tune` always does. 100 images and 20 passes are few: "
        "some schedules did best on them and are worse than the published ones on these. The verdicts take the better "
        "row of each rival.\n\n"
    )
    if ahead:
        lead += "**Where a rival keeps more of the answers than GTP+**, the better row of each, and whether their 95 % "
        lead += "intervals overlap:\n\n" + "\n".join(ahead) + "\n\nBy KL:\n\n"
    return lead + "\n".join(verdicts) + missing + "\n\n" + "\n\n".join(parts)


def rivals_ahead(case: str, group: list[dict[str, Any]]) -> list[str]:
    """Where a rival keeps more of the answers than GTP+ does, the better row of each."""
    found = []
    for figure, name, spread in (("agreement", "agreement", "agreement"), ("top1", "top-1", "top1_change")):
        ranked = sorted(group, key=lambda row: row[figure], reverse=True)
        own = next(row for row in ranked if row["method"].startswith("gtp_plus"))
        other = next(row for row in ranked if not row["method"].startswith("gtp_plus"))
        if other[figure] > own[figure]:
            clear = "no overlap" if other[f"{spread}_low"] > own[f"{spread}_high"] else "overlap"
            found.append(
                f"- {case}: {name} {other[figure]:.2f} % ({other['method']}) against {own[figure]:.2f} % "
                f"({own['method']}); {clear}."
            )
    return found


def verdict(case: str, ranked: list[dict[str, Any]]) -> str:
    """Which method does the least damage, and how far the best rival is."""
    first = ranked[0]
    own = first["method"].startswith("gtp_plus")
    other = next(row for row in ranked if row["method"].startswith("gtp_plus") != own)
    low, high = (other[f"kl_minus_best_{end}"] for end in ("low", "high"))
    clear = "clearly" if low > 0 else "not clearly"
    who = "GTP+ is first" if own else "**A rival is first**"
    behind = f"{clear} behind: {other['kl_minus_best']:+.4f} [{low:+.4f}, {high:+.4f}]"
    return (
        f"- {case}: {who}, {first['method']} (KL {first['kl']:.4f}); the best {'rival' if own else 'of GTP+'} is "
        f"{other['method']} ({other['kl']:.4f}), {behind}."
    )


def plots() -> dict[str, str]:
    """Damage over cost, by the name of the file."""
    style = "<style>text { font: 12px sans-serif; fill: #1d2433 } .grid { stroke: #dfe3ea }</style>"
    paper = '<rect width="100%" height="100%" fill="white"/>'
    found = {}
    for model, title in MODELS.items():
        lines: dict[str, list[tuple[float, float]]] = {"gtp_plus": []}
        for row in all_rows(model):
            if row["method"]:
                lines.setdefault(row["method"], []).append((row["gmacs"], row["kl"]))
        drawn = curves(lines, f"GMACs ({title})", "KL to the unreduced model", log_y=True)
        head, rest = drawn.split(">", 1)
        found[f"compared-{model}.svg"] = f"{head}>{style}{paper}{rest}\n"
    return found


def findings() -> str:
    """Sentences that follow from the figures alone."""
    lines = []
    for model, title in MODELS.items():
        for number, group in zip(NUMBERS, by_budget(all_rows(model)).values(), strict=True):
            ranked = sorted(group, key=lambda row: row["kl"])
            place = [row["method"] for row in ranked].index("gtp") + 1
            first, second = ranked[0], ranked[1]
            lines.append(
                f"- {title}, P = {number}: least damage by {first['method']} (KL {first['kl']:.4f}), then "
                f"{second['method']} ({second['kl']:.4f}); GTP as published is number {place} of {len(ranked)} "
                f"({next(row['kl'] for row in group if row['method'] == 'gtp'):.4f})."
            )
    return "\n".join(lines)


def paired() -> str:
    """Differences to the method with the least KL at the budgets where all three were measured in one run."""
    parts = []
    for model, title in MODELS.items():
        lines = [
            f"| {title} | GMACs | KL | KL minus the best's | agreement minus the best's | top-1 minus the best's |",
            "|---|---|---|---|---|---|",
        ]
        for row in load(model, "plus")[1:]:
            cells = [f"{row['method']}", f"{row['gmacs']:.3f}", f"{row['kl']:.4f}"]
            for figure, form in (("kl", "+.4f"), ("agreement", "+.1f"), ("top1", "+.1f")):
                value, low, high = (row[f"{figure}_minus_best{end}"] for end in ("", "_low", "_high"))
                cells.append(
                    "0, the best" if value == low == high == 0 else f"{value:{form}} [{low:{form}}, {high:{form}}]"
                )
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def page() -> str:
    start = "    gtp-vit compare {} --checkpoint FILE --data-dir imagenet/val --ignore-exif --rounds 0 --at-propagate"
    commands = "\n".join(
        f"{start.format(model)} 4 8 11 14 16\n"
        f"{start.format(model)} 8 14 --methods gtp tome gtp_plus --recipes {model}-0.8 {model}-0.65 {model}-0.55\n"
        f"{start.format(model)} 4 11 16 --methods gtp_plus"
        for model in MODELS
    )
    return PAGE.format(tuned=tuned(), tables=tables(), findings=findings(), paired=paired(), commands=commands)


if __name__ == "__main__":
    for name, text in {"comparison.md": page(), **plots()}.items():
        (FOLDER / name).write_text(text)
