"""Writes docs/comparison.md from what `gtp-vit compare` found (docs/results): python docs/make_comparison.py"""

# ruff: noqa: E501  (the texts of the pages have long lines)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gtp_vit.report.plot import line_plot

FOLDER = Path(__file__).parent
MODELS = {
    "deit_tiny_patch16_224": "DeiT-Ti, its LayerNorms rounded",
    "vit_tiny_patch16_224": "ViT-Ti (AugReg)",
}
NUMBERS = (4, 8, 11, 14, 16)
FIGURES = ("kl", "agreement", "top1")
TUNED = ", tuned"
SHOWN = (8, 11, 14)  # of these the page for readers has tables
PAGE = """\
# All methods at equal cost

For readers who choose a method, and for researchers who compare them. Every method is set to the same number of MACs and runs on the same
images; the schedules are either the published ones or tuned with the same effort.

![KL over GMACs, DeiT-Ti](compared-deit_tiny_patch16_224.svg)
![KL over GMACs, ViT-Ti](compared-vit_tiny_patch16_224.svg)

*KL divergence to the unreduced model over GMACs; published schedules, and the default schedule of GTP+. The figures are those of the first tables below.*

## Published schedules

KL to the unreduced model with 95 % intervals; lower is better. GTP+ has its default schedule, without calibration. MCTF,
ATC, ToFu and PiToMe are in the next tables.

{published}

*{published_origin}*

## Tuned schedules

Every method that has a schedule, with the better of its published and its tuned schedule. All searches had the same 100 training images and the same
number of passes over them; GTP+ also calibrates on these images, as `tune` always does.

{tuned}

*{tuned_origin}*

By KL, GTP+ is first in each of the {cases} cases measured (two models, five costs), and no 95 % interval of the paired difference to the
next method includes zero. {ahead}

## How it was measured

- Two ImageNet classifiers: {models}. Top-1 unreduced: {top1}.
- The same {images:,} ImageNet validation images for all, two of each class, none of which took part in a search; no finetuning; images read without EXIF
  orientation (`--ignore-exif`).
- P is the number of tokens that GTP removes per layer; every other method is set to the MACs of GTP at this P. Each method's own work is counted, and
  all methods have the shortened last block.
- DynamicViT has untrained predictors here and prunes about as well as random; do not use it that way. ATS has a fixed budget.
- The default schedule of GTP+ was found on training images of these two models ([how](research/gtp-plus.md)), so a third model may gain less. These are
  Ti models: they neither confirm nor refute the accuracies that the paper prints for DeiT-S, DeiT-B and larger models.

Top-1, agreement, five costs, paired differences and the commands: [all tables](research/comparison.md).
"""
ALL = """\
# Notebook: all tables of the comparison

For researchers. The full tables behind [all methods at equal cost](../comparison.md). Written by `python docs/make_comparison.py` from `docs/results`.

{tuned}

## Published schedules

Two ImageNet classifiers, the same 2,000 ImageNet validation images (two of each class), no finetuning. The images were read as they are stored
(`--ignore-exif`), as timm and torchvision do; none of these files asks to be turned. Each method is at its defaults, with the one setting that says how much
is removed chosen to meet the MACs of GTP at P = 4, 8, 11, 14 and 16. Each method's own work is counted, and all have the shortened last block. Brackets are
95 % intervals over images. A single accuracy on 2,000 images has a standard error of about one point.

{tables}

## GTP+ against ToMe and GTP, paired

The same images on both sides of each difference; brackets are 95 % intervals. "tuned" are the recipes that the package had before calibration
([how they were found](gtp-plus.md#the-schedule-and-the-search)).

{paired}

## How it was made

{commands}
"""


RESULTS = json.loads((FOLDER / "results/comparison.json").read_text())


def load(model: str, part: str = "published") -> list[dict[str, Any]]:
    """The rows of one run of `gtp-vit compare`; the unreduced model is the first."""
    return RESULTS[part]["rows"][model]


def origin(part: str) -> str:
    """What a caption says of a run."""
    run = RESULTS[part]
    return f"`{run['script']}`, {run['date']}, commit {run['commit']}, [comparison.json](results/comparison.json)."


def by_budget(rows: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    found: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"]:
            found.setdefault(row["budget_gmacs"], []).append(row)
    return dict(sorted(found.items(), reverse=True))


def shown(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The rows of the costs on the page for readers, by P."""
    by_number = dict(zip(NUMBERS, by_budget(rows).values(), strict=True))
    return {number: by_number[number] for number in SHOWN}


def ranking(title: str, groups: dict[int, list[dict[str, Any]]]) -> str:
    """KL of each method at the costs on the page, best method at the largest cut first."""
    budgets = [f"P = {number}, {group[0]['budget_gmacs']:.3f} GMACs" for number, group in groups.items()]
    lines = [f"| {title} | {' | '.join(budgets)} |", f"|{'---|' * (len(groups) + 1)}"]
    last = {name_of(row): row["kl"] for row in groups[SHOWN[-1]]}
    for name in sorted(last, key=lambda name: last[name]):
        cells = [
            next((_cell("kl", [row], row["method"]) for row in group if name_of(row) == name), "out of its reach")
            for group in groups.values()
        ]
        lines.append(
            f"| {'**' if name == 'gtp_plus' else ''}{name}{'**' if name == 'gtp_plus' else ''} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> str:
    """The method of a row, tuned or not."""
    return row["method"].removesuffix(TUNED)


def better(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method the better of its rows, published and tuned."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if name_of(row) not in best or row["kl"] < best[name_of(row)]["kl"]:
            best[name_of(row)] = row
    return list(best.values())


def tuned_groups(model: str) -> dict[int, list[dict[str, Any]]]:
    """The rows where everybody is tuned, by P."""
    numbers = dict(zip(by_budget(load(model)), NUMBERS, strict=True))
    return {
        min(numbers.items(), key=lambda item: abs(item[0] - budget))[1]: group
        for budget, group in by_budget(load(model, "tuned")).items()
    }


def tables() -> str:
    parts = []
    for model, title in MODELS.items():
        rows = load(model)
        whole = rows[0]
        budgets = by_budget(rows)
        parts.append(
            f"### {title}\n\nUnreduced: {whole['gmacs']:.3f} GMACs, top-1 {whole['top1']:.2f} %, "
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


def tuned() -> str:
    """Who is first when everybody is tuned; each method as published and as tuned; what is missing as long as it is."""
    parts, verdicts, ahead, measured = [], [], [], set()
    for model, title in MODELS.items():
        for number, group in tuned_groups(model).items():
            budget = group[0]["budget_gmacs"]
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
    left = [
        f"{MODELS[model]}, P = {number}" for number in NUMBERS for model in MODELS if (model, number) not in measured
    ]
    missing = f"\n\nNot measured yet in this way: {'; '.join(left)}." if left else ""
    lead = (
        "## Tuned schedules\n\nEvery method that has a schedule, as published and with one that was searched "
        "on the same training images, with as many passes over them (`python benchmarks/comparison.py`); GTP+ also "
        "learns on these images which tokens matter, as `tune` always does. 100 images and 20 passes are few: "
        "some schedules did best on them and are worse than the published ones on these. The verdicts take the better "
        "row of each rival.\n\n"
    )
    if ahead:
        lead += "**Where another method has higher agreement or accuracy than GTP+**, the better row of each, and whether their 95 % "
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
        for row in load(model):
            if row["method"]:
                lines.setdefault(row["method"], []).append((row["gmacs"], row["kl"]))
        drawn = line_plot(lines, f"GMACs ({title})", "KL to the unreduced model", log_y=True)
        head, rest = drawn.split(">", 1)
        found[f"compared-{model}.svg"] = f"{head}>{style}{paper}{rest}\n"
    return found


def paired() -> str:
    """Differences to the method with the least KL at the budgets where all three were measured in one run."""
    parts = []
    for model, title in MODELS.items():
        lines = [
            f"| {title} | GMACs | KL | KL minus the best's | agreement minus the best's | top-1 minus the best's |",
            "|---|---|---|---|---|---|",
        ]
        for row in load(model, "paired")[1:]:
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
    """The page for readers; refuses to be written where its sentence about GTP+ would be false."""
    tuned_rows = {model: tuned_groups(model) for model in MODELS}
    ahead, cases = [], 0
    for model, title in MODELS.items():
        for number, group in tuned_rows[model].items():
            cases += 1
            ranked = sorted(group, key=lambda row: row["kl"])
            rival = next(row for row in ranked if name_of(row) != "gtp_plus")
            if name_of(ranked[0]) != "gtp_plus" or rival["kl_minus_best_low"] <= 0:
                raise SystemExit(f"{title}, P = {number}: GTP+ is not clearly first; rewrite the sentence of the page")
            ahead += rivals_ahead(f"{title}, P = {number}", group)
    first = {model: load(model)[0] for model in MODELS}
    return PAGE.format(
        published="\n\n".join(ranking(title, shown(load(model))) for model, title in MODELS.items()),
        tuned="\n\n".join(
            ranking(title, {number: better(tuned_rows[model][number]) for number in SHOWN})
            for model, title in MODELS.items()
        ),
        published_origin=origin("published"),
        tuned_origin=origin("tuned"),
        cases=cases,
        ahead="Another method has higher agreement or accuracy here; all intervals overlap:\n\n" + "\n".join(ahead)
        if ahead and not any("no overlap" in line for line in ahead)
        else "Another method has higher agreement or accuracy here:\n\n" + "\n".join(ahead),
        models=" and ".join(MODELS.values()),
        top1=" and ".join(f"{row['top1']:.1f} %" for row in first.values()),
        images=next(iter(first.values()))["images"],
    )


def all_tables() -> str:
    start = "    gtp-vit compare {} --checkpoint FILE --data-dir imagenet/val --ignore-exif --rounds 0 --gtp-budgets"
    commands = "\n".join(
        f"{start.format(model)} 4 8 11 14 16\n"
        f"{start.format(model)} 8 14 --methods gtp tome gtp_plus --recipes {model}-0.8 {model}-0.65 {model}-0.55\n"
        f"{start.format(model)} 4 11 16 --methods gtp_plus"
        for model in MODELS
    )
    return ALL.format(tuned=tuned(), tables=tables(), paired=paired(), commands=commands)


def pages() -> dict[str, str]:
    return {"comparison.md": page(), "research/comparison.md": all_tables(), **plots()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
