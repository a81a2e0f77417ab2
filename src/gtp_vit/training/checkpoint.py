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

import torch

from gtp_vit.core.loop import PatchedModel
from gtp_vit.errors import GTPError
from gtp_vit.models.checkpoint import save_checkpoint
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.runs.files import Lock, folder_kept_if_used, write_atomically
from gtp_vit.runs.identity import differences
from gtp_vit.training.log import LogLine
from gtp_vit.training.trainer import TrainerState

STATE, WEIGHTS = "state.pt", "weights.safetensors"


class RunState(TrainerState):
    """Everything that a run needs to resume."""

    run: dict[str, object]  # its identity
    step: int
    log: list[LogLine]


def write_state(folder: Path, state: RunState) -> None:
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(folder / STATE, content.getvalue())


def read_state(folder: Path, run: dict[str, object]) -> RunState | None:
    """The state that `write_state` wrote, or None; raises GTPError if it is of a different run than `run`.

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
        state: RunState = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        stored = state["run"]
    except Exception as error:  # zip, pickle and torch have errors of many classes
        raise GTPError(f"{path} is damaged, or not a checkpoint of a finetuning run; {RESTART_HINT}") from error
    if stored != run:
        raise GTPError(f"{path} is of a different run: {differences(stored, run)}; {RESTART_HINT}")
    return state


RESTART_HINT = "use --restart to discard it, or choose another --output"


def write_weights(folder: Path, model: PatchedModel, recipe: Recipe) -> None:
    """Write weights under timm's keys; learned parts of a method get their own files, as timm refuses extra keys."""
    from safetensors.torch import save

    learned, files = (
        model.reducer.state_dict(),
        {part: f"{part}.safetensors" for part in recipe.method.weight_file_fields},
    )
    lost = [key for key in learned if key.split(".")[0] not in files]
    if lost:
        raise GTPError(f"{recipe.method.name} has learned {lost[0]}, and none of its settings names a file for that")
    for part, file in files.items():
        own = {key: value.contiguous() for key, value in learned.items() if key.startswith(f"{part}.")}
        write_atomically(folder / file, save(own))
    method = dataclasses.replace(recipe.method, **files)
    save_checkpoint(model, folder / WEIGHTS, dataclasses.replace(recipe, method=method))


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no second run writes into it; a run that fails before it writes leaves none behind."""
    with folder_kept_if_used(folder), Lock(folder / ".lock"):
        yield
