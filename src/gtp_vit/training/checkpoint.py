"""Checkpoints of a run: one file to resume from, and the weights as timm reads them, each written whole or not at all.

A run resumes from `state.pt` alone; the weights are for everything else, with the method, its settings and what was
measured in their metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gtp_vit.core.reducer import Method
from gtp_vit.errors import GTPError
from gtp_vit.models.checkpoint import save_checkpoint, sizes_of_model
from gtp_vit.recipes import Recipe
from gtp_vit.runs.files import Lock, kept_if_used, write_atomically
from gtp_vit.runs.identity import differences

STATE, WEIGHTS = "state.pt", "weights.safetensors"


def write_state(folder: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Write everything that a run needs to resume."""
    content = io.BytesIO()
    torch.save({"run": run, **state}, content)
    write_atomically(folder / STATE, content.getvalue())


def read_state(folder: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """What `write_state` wrote, or None; raises GTPError if it is of a different run than `run`.

    Tensors stay in the file until they are copied from it.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch does not look at the checksums
        if damaged is not None:
            raise GTPError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        stored = state["run"]
    except Exception as error:  # zip, pickle and torch have errors of many classes
        raise GTPError(f"{path} is damaged, or no checkpoint of a finetuning run; {RESTART}") from error
    if stored != run:
        raise GTPError(f"{path} is of a different run: {differences(stored, run)}; {RESTART}")
    return state


RESTART = "--restart discards it and begins anew, or write to a different place with --output"


def write_weights(
    folder: Path, name: str, model: Any, method: Method, found: dict[str, Any], measured: dict[str, Any]
) -> None:
    """Write weights under timm's keys; learned parts of a method get their own files, as timm refuses extra keys."""
    from safetensors.torch import save

    learned, files = model.reducer.state_dict(), {part: f"{part}.safetensors" for part in method.files}
    lost = [key for key in learned if key.split(".")[0] not in files]
    if lost:
        raise GTPError(f"{method.name} has learned {lost[0]}, and none of its settings names a file for that")
    for part, file in files.items():
        own = {key: value.contiguous() for key, value in learned.items() if key.startswith(f"{part}.")}
        write_atomically(folder / file, save(own))
    method = dataclasses.replace(method, **files)
    save_checkpoint(model, folder / WEIGHTS, Recipe(name, sizes_of_model(model), method, found, measured))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no second run writes into it; a run that fails before it writes leaves none behind."""
    with kept_if_used(folder):
        lock = Lock(folder / ".lock")
        try:
            yield
        except BaseException:
            if [each.name for each in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
            raise
        finally:
            lock.release()
