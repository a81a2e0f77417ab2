"""gtp-vit models: which models can be patched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.backbones import known_backbones
from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import OutputFlags, print_table_result
from gtp_vit.cli.parser import Positional
from gtp_vit.core.backbone import Backbone
from gtp_vit.errors import GTPError, short_repr
from gtp_vit.models import bundled
from gtp_vit.models.factory import create_model, names, suggest_names, unsupported_reason
from gtp_vit.patching import host_of
from gtp_vit.profiling.macs import macs


def _unlisted() -> str:
    """The families whose models are not in the list."""
    classes: dict[tuple[str, str], list[str]] = {}
    for family in known_backbones().values():
        if type(family).model_names is Backbone.model_names:
            library = family.library()
            classes.setdefault((library.title, library.prefix), []).extend(family.classes)
    return " ".join(
        f"{title}'s models cannot be listed: {prefix}:NAME takes {', '.join(names)}."
        for (title, prefix), names in classes.items()
    )


@dataclass(frozen=True)
class Models(OutputFlags):
    __doc__ = f"""List models that can be patched: timm's, those inside the package, and other libraries'.

    Each model is built without weights and checked, so the whole list takes some seconds. {_unlisted()}

    examples:
      gtp-vit models
      gtp-vit models "deit*"
      gtp-vit models "open_clip:*"
      gtp-vit models "vit_tiny*" --details
    """

    pattern: Positional[str] = "*"
    """Which names, with * and ?."""
    details: bool = False
    """Also show tokens, channels, layers and GMACs of each."""


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(Models, arguments)
    if not flags.details and not flags.json and flags.html is None:
        _print_names(flags.pattern)
        return
    alike = list(names(flags.pattern))
    refused = {}
    with render.progress("checking each model") as progress:
        for index, name in enumerate(alike):
            if (reason := unsupported_reason(name)) is not None:
                refused[name] = reason
            progress(index + 1, len(alike))
    supported = [name for name in alike if name not in refused]
    if not supported:
        raise GTPError(_no_model_error(flags.pattern, refused))
    if not flags.details:
        print_table_result(flags, arguments, "models", ["model"], [[name] for name in supported], supported)
        return
    columns = ["model", "patches", "prefix", "channels", "layers", "heads", "GMACs"]
    with render.progress("counting") as progress:
        rows = []
        for index, name in enumerate(supported):
            rows.append(_details(name))
            progress(index + 1, len(supported))
    print_table_result(flags, arguments, "models", columns, rows)


def _print_names(pattern: str) -> None:
    """A plain list, for pipes: each name as soon as its model has been checked, about 30 ms each."""
    refused, printed = {}, False
    for name in names(pattern):
        # The package's own model is known to work; checking it first would import timm, which takes two seconds.
        reason = None if name == bundled.NAME else unsupported_reason(name)
        if reason is None:
            print(name, flush=True)
            printed = True
        else:
            refused[name] = reason
    if not printed:
        raise GTPError(_no_model_error(pattern, refused))


def _no_model_error(pattern: str, refused: dict[str, str]) -> str:
    if refused:
        name, reason = next(iter(refused.items()))
        return f"no model called {short_repr(pattern)} can be patched; {name}: {reason}"
    near = suggest_names(pattern.strip("*?"), 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"e.g. gtp-vit models 'deit*' or {bundled.NAME}"
    return f"no model is called {short_repr(pattern)}; {hint}"


def _details(name: str) -> list[str]:
    model = create_model(name, meta=True)
    vit = host_of(model).vit
    sizes = [f"{vit.grid[0]} x {vit.grid[1]}", *(str(n) for n in (vit.prefix, vit.dim, vit.depth, vit.heads))]
    return [name, *sizes, f"{macs(model).total / 1e9:.2f}"]
