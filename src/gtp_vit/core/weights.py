"""Reading weights from a file, safely, whatever container they come in."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.errors import GTPError

# Where training scripts put the weights in a checkpoint; the first that is there is taken.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def read_weights(path: Path) -> dict[str, Tensor]:
    """name -> tensor, from safetensors or from torch's own format, of which no code is ever run."""
    if not path.is_file():
        raise GTPError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            stored: Any = load_file(path)
        else:
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise GTPError(
            f"{path} holds Python objects beside its weights, or is no torch file; such objects can run code, so they "
            "are not read: save its state_dict alone"
        ) from error
    except Exception as error:  # zip and safetensors raise what they like
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GTPError(f"{path} is not a file of weights (safetensors or torch's .pth): {reason[0]}") from error
    for container in CONTAINERS:
        if isinstance(stored, dict) and isinstance(stored.get(container), dict) and stored[container]:
            stored = stored[container]
            break
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise GTPError(f"{path} has no weights: expected a dictionary of tensors, or one in {', '.join(CONTAINERS)}")
    return {key.removeprefix("module."): value for key, value in stored.items()}


def load_weights(model: nn.Module, path: Path, name: str) -> None:
    """Weights from a file into a model, refused unless every name and shape fits."""
    stored, wanted = read_weights(path), model.state_dict()
    missing, extra = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing or extra:
        raise GTPError(
            f"{path} does not fit {name}: {len(missing)} keys are missing{_first(missing)}, {len(extra)} are not "
            f"known{_first(extra)}; is it a checkpoint of another model?"
        )
    wrong = [key for key in wanted if stored[key].shape != wanted[key].shape]
    if wrong:
        key = "pos_embed" if "pos_embed" in wrong else wrong[0]
        hint = "create the model with the img_size it was trained with" if wrong == ["pos_embed"] else "another size?"
        raise GTPError(
            f"{path} does not fit {name}: {len(wrong)} shapes differ, e.g. {key} is {tuple(stored[key].shape)} and "
            f"should be {tuple(wanted[key].shape)}; {hint}"
        )
    model.load_state_dict(stored)


def _first(keys: list[str]) -> str:
    return f" ({', '.join(keys[:2])}{' ...' if len(keys) > 2 else ''})" if keys else ""
