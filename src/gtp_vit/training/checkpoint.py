"""Checkpoints of a run: one file to go on from, and the weights as timm reads them, each written whole or not at all.

`state.pt` alone decides where a run goes on; the weights beside it are for everybody else, with the method, the
schedule and what was measured in their metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gtp_vit.core.reducer import Method
from gtp_vit.errors import GTPError
from gtp_vit.patch import unpatch
from gtp_vit.recipes import Recipe
from gtp_vit.tools.checkpoint import save_checkpoint, sizes_of_model
from gtp_vit.tools.files import Lock, explained, write_atomically

STATE, WEIGHTS, PREDICTORS = "state.pt", "weights.safetensors", "predictors.safetensors"


def fingerprint(model: nn.Module) -> str:
    """Of all weights: a run must not go on from other ones than it began with."""
    digest = hashlib.sha256()
    for name, value in sorted(unpatch(model).state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def write_state(folder: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Everything that a run needs to go on."""
    content = io.BytesIO()
    torch.save({"run": run, **state}, content)
    write_atomically(folder / STATE, content.getvalue())


def read_state(folder: Path, run: dict[str, Any]) -> bytes | None:
    """The file's content if there is one, refused if it is of another run than `run`."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        content = path.read_bytes()
        stored = state_of(content)["run"]
    except Exception as error:  # zip, pickle and torch raise what they like
        raise GTPError(
            f"{path} is no checkpoint of a finetuning run, or is damaged; delete it to begin anew"
        ) from error
    wanted = json.loads(json.dumps(run))
    differ = sorted(key for key in {**wanted, **stored} if wanted.get(key) != stored.get(key))
    if differ:
        pairs = "; ".join(f"{key} was {_short(stored.get(key))}, now {_short(wanted.get(key))}" for key in differ[:2])
        raise GTPError(
            f"{path} is of another run (other {', '.join(differ)}): {pairs}; give another --output, or delete it to "
            "begin anew"
        )
    return content


def state_of(content: bytes) -> dict[str, Any]:
    """No code of the file is run."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _short(value: Any) -> str:
    text = ", ".join(f"{key}={own}" for key, own in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_weights(
    folder: Path, name: str, model: Any, method: Method, found: dict[str, Any], measured: dict[str, Any]
) -> None:
    """Under timm's keys; what a method has learned is in a file of its own, since timm would refuse more keys."""
    learned = model.reducer.state_dict()
    if learned:
        from safetensors.torch import save

        write_atomically(folder / PREDICTORS, save({key: value.contiguous() for key, value in learned.items()}))
        method = dataclasses.replace(method, predictors=PREDICTORS)  # type: ignore[call-arg]
    save_checkpoint(model, folder / WEIGHTS, Recipe(name, sizes_of_model(model), method, found, measured))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two runs must not write into one folder."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / ".lock")
    try:
        yield
    finally:
        lock.release()
