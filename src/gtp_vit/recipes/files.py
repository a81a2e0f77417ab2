"""Reading the JSON of a recipe from an untrusted file: size, nesting and duplicate keys are checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gtp_vit.errors import GTPError, short_repr

METADATA = "gtp_vit_recipe"  # key in a checkpoint's metadata
RECIPE_FILENAME = "gtp_vit.json"  # name of a recipe beside the weights of a Hugging Face model
MAX_BYTES = 2**20  # characters; a recipe takes a few thousand


def read_json(path: Path) -> object:
    """The JSON in a file, or in the metadata of a safetensors checkpoint."""
    return parse(_metadata(path) if path.suffix == ".safetensors" else _text(path), str(path))


def parse(text: str, where: str) -> object:
    """JSON without duplicate keys, NaN or deep nesting; `where` is for errors."""
    if len(text) > MAX_BYTES:
        raise GTPError(f"{where} is not a recipe: it is larger than {MAX_BYTES // 2**20} MB, and recipes are small")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise GTPError(f"{where} is not a recipe: it has {short_repr(twice)} twice; remove one of them")
        return entries

    def refuse(word: str) -> object:
        raise GTPError(f"{where} is not a recipe: it has the number {word}, which is not finite")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except RecursionError:
        raise GTPError(f"{where} is not a recipe: its brackets are nested too deeply") from None
    except GTPError:
        raise
    except ValueError as error:
        raise GTPError(f"{where} is not a recipe: it is not JSON ({error}); make one with gtp-vit tune") from error


def _text(path: Path) -> str:
    try:
        if os.path.getsize(path) > 4 * MAX_BYTES:
            raise GTPError(
                f"{path} is not a recipe: it has {os.path.getsize(path) / 1e6:.0f} MB, and recipes are small"
            )
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError:
        raise GTPError(f"{path} is not a recipe: it is not text in UTF-8; make one with gtp-vit tune") from None
    except OSError as error:
        raise GTPError(f"{path} cannot be read: {error.strerror}") from error


def _metadata(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise GTPError(f"{path} is not a safetensors file that can be read: {error}") from error
    if METADATA not in metadata:
        raise GTPError(f"{path} has no recipe in its metadata; give a method, or a recipe file")
    return str(metadata[METADATA])
