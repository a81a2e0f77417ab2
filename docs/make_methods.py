"""Writes docs/reference/methods.md from the registries: python docs/make_methods.py"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import timm
import torch

from gtp_vit import METHODS, Identity, Method, macs
from gtp_vit.errors import GTPError

sys.path.insert(0, str(Path(__file__).parents[1]))  # reproduction is not installed
from reproduction.experiments import EXPERIMENTS

PAGE = """\
# Methods

For readers who want to know what a method needs of a model, and where it comes from. Written by
`python docs/make_methods.py` from the registries; a test compares it with them.

All of them run through the same call, `gtp_vit.patch(model, METHOD)`, on the same models, and are Apache-2.0: none
contains code of the original implementations, whose outputs they reproduce (`tests/methods/test_goldens*.py`).

{properties}

"From attention" is what a method needs to see of it. Only where that is the map itself is the map written to memory.
DynamicViT's predictors must be trained; without a file of trained ones they prune about as well as random, and `patch`
says so. ATS keeps as many tokens as each image asks for: such a model cannot be exported, and its batches are
padded; `ATS(budget=...)` keeps a fixed number. Evo-ViT's other tokens wait and come back, so
its saving is in the layers, not in the number of tokens at the end.

MCTF merges before the attention of a block, by the map of that block, so its last layer merges even where that block is
shortened; at a given cost (`compare`, `tune`) we leave the last layer out, where merging costs more than it saves. ToFu
has no released code: `ToFu()` is what the paper describes, `ToFu(variant="pitome")` is what PiToMe's repository calls
by that name, and only the latter could be compared with outputs. ATC joins clusters one after the other, a loop that
engines do not have. Off the shelf the original removes r - 1 tokens where ToMe removes r; `ATC(variant="original")`
does so, too.

## The paper's settings

Which settings the paper compares at which cost (its appendix), and the GMACs that we count for them: without the
shortened last block, the method's own work included. The comparison is at equal cost to about 3 %, but Evo-ViT is up to
7 % more expensive than its column says. ATS's cost depends on the images: `gtp_vit.macs(model, images=...)` counts it.

{settings}
"""


def properties() -> str:
    head = [
        "method",
        "from attention",
        "class token",
        "fixed shapes",
        "exportable",
        "learned parts",
        "paper",
        "original",
    ]
    rows = [head, ["---"] * len(head)]
    for method in METHODS.values():
        if method is Identity:
            continue
        source = method.source
        exportable = method.fixed_shapes if method.not_exported is None else "no"
        rows.append(
            [
                *(
                    f"`{method.__name__}`",
                    method.attention_inputs,
                    "needed" if method.needs_class_token else "not needed",
                ),
                *(
                    method.fixed_shapes,
                    exportable,
                    method.trained_parts,
                    source.paper,
                    f"{source.code} ({source.licence})",
                ),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def settings() -> str:
    parts = []
    for name, of_model in groupby(EXPERIMENTS["hyperparameters"].cells, key=lambda cell: cell.model):
        with torch.device("meta"):
            model = timm.create_model(name)
        by_row = {row: list(cells) for row, cells in groupby(of_model, key=lambda cell: cell.row)}
        first = next(iter(by_row))
        columns = [first.split(", ")[0], *(f"{cell.gmacs} printed" for cell in by_row[first])]
        rows = [columns, ["---"] * len(columns)]
        for row, cells in by_row.items():
            methods = [cell.method for cell in cells]
            said = [f"{text}: {_gmacs(model, m)}" for text, m in zip(_differing(methods), methods, strict=True)]
            rows.append([row.split(", ")[1], *said])
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def _differing(methods: Sequence[Method]) -> list[str]:
    """The settings of each method in which they are not all alike."""
    names = [field.name for field in dataclasses.fields(methods[0])]
    differing = [name for name in names if len({getattr(method, name) for method in methods}) > 1]
    return [", ".join(f"{name} {_shown(getattr(method, name))}" for name in differing) for method in methods]


def _shown(value: object) -> str:
    return f"{value[0]} to {value[-1]}" if isinstance(value, tuple) else str(value)


def _gmacs(model: torch.nn.Module, method: Method) -> str:
    try:
        return f"{macs(model, method).total / 1e9:.2f}"
    except GTPError:
        return "by image"


def pages() -> dict[str, str]:
    return {"reference/methods.md": PAGE.format(properties=properties(), settings=settings())}


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(__file__).parent / name).write_text(text)
