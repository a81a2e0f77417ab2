"""gtp-vit models: which models can be patched."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from gtp_vit import embedded
from gtp_vit.cli.flags import parse
from gtp_vit.cli.output import OutputFlags, command, show
from gtp_vit.errors import GTPError
from gtp_vit.tools.macs import macs
from gtp_vit.tools.models import create_model, names


@dataclass(frozen=True)
class Models(OutputFlags):
    """List models that can be patched: timm's plain vision transformers, and those inside the package.

    examples:
      gtp-vit models
      gtp-vit models "deit*"
      gtp-vit models "vit_tiny*" --details
    """

    pattern: tyro.conf.Positional[str] = "*"
    """Which names, with * and ?."""
    details: bool = False
    """Also tokens, channels, layers and GMACs of each; makes each model without weights."""


def main(words: Sequence[str]) -> None:
    flags = parse(Models, words)
    found = names(flags.pattern)
    if not found:
        near = difflib.get_close_matches(flags.pattern.strip("*?"), names("*"), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; e.g. gtp-vit models 'deit*' or {embedded.NAME}"
        raise GTPError(f"no model is called {flags.pattern!r}{hint}")
    if not flags.details and not flags.json and flags.report is None:
        print("\n".join(found))  # a plain list, for pipes
        return
    if not flags.details:
        show(flags, command("models", words), "models", ["model"], [[name] for name in found], found)
        return
    columns = ["model", "patches", "prefix", "channels", "layers", "heads", "GMACs", "supported"]
    rows = [_details(name) for name in found]
    show(flags, command("models", words), "models", columns, rows)


def _details(name: str) -> list[str]:
    from gtp_vit import backbones

    try:
        model = create_model(name, meta=True)
        vit = backbones.find(model).describe(model)
    except GTPError as error:
        return [name, "-", "-", "-", "-", "-", "-", f"no: {error}"]
    sizes = [f"{vit.grid[0]} x {vit.grid[1]}", *(str(n) for n in (vit.prefix, vit.dim, vit.depth, vit.heads))]
    return [name, *sizes, f"{macs(model).total / 1e9:.2f}", "yes"]
