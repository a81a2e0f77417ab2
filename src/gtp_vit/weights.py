"""Reading weights from a file, safely, whatever container they come in."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.errors import GTPError, first_line, short_repr

# Keys under which training scripts store the weights in a checkpoint; the first one present is used.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")


# Added to the names of weights by torch.compile, FSDP and activation checkpointing.
WRAPPER_PREFIXES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def read_weights(path: Path) -> dict[str, Tensor]:
    """name -> tensor, from safetensors or from torch's own format; code in the file is never run."""
    _check_file(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            stored: Any = load_file(path)
        else:
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise GTPError(
            f"{path} is not a torch file, or contains pickled Python objects, which could run code; they "
            "are not read: save its state_dict alone"
        ) from error
    except Exception as error:  # zip and safetensors raise errors of many classes
        raise GTPError(f"{path} is not a file of weights (safetensors or torch's .pth): {first_line(error)}") from error
    for container in CONTAINERS:
        if isinstance(stored, dict) and isinstance(stored.get(container), dict) and stored[container]:
            stored = stored[container]
            break
    whole = isinstance(stored, dict) and bool(stored)
    if not whole or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in stored.items()):
        raise GTPError(f"{path} has no weights: expected a dictionary of tensors, or one in {', '.join(CONTAINERS)}")
    plain = {strip_wrapper_prefixes(key): value for key, value in stored.items()}
    if len(plain) < len(stored):
        raise GTPError(f"{path} has some weights twice, with and without a wrapper's prefix; save them once")
    return plain


def strip_wrapper_prefixes(key: str) -> str:
    """A weight's name in the model, without the names of the wrappers it was saved in.

    >>> strip_wrapper_prefixes("_orig_mod.module.blocks.0._orig_mod.norm1.weight")
    'blocks.0.norm1.weight'
    """
    parts = [part for part in key.split(".") if part not in WRAPPER_PREFIXES]
    while len(parts) > 1 and parts[0] == "module":  # only at the start: a model may have a module of this name
        parts = parts[1:]
    return ".".join(parts)


def _check_file(path: Path) -> None:
    try:
        if path.is_dir():
            raise GTPError(f"{path} is a folder; give the file of weights in it")
        if not path.exists():
            raise GTPError(f"there is no file {path}")
        if not path.is_file():  # reading a pipe would block for ever
            raise GTPError(f"{path} is not a regular file; give a file of weights")
    except (OSError, ValueError) as error:  # a name that no file can have
        if isinstance(error, GTPError):
            raise
        raise GTPError(f"there is no file {short_repr(str(path))}") from error


def load_weights(model: nn.Module, path: Path, name: str, *, resizable: bool = False) -> None:
    """Load weights from a file into a model; raises GTPError unless every name and shape fits.

    A model without a classifier, num_classes=0, leaves out the file's. `resizable`: can its positions be resampled?
    """
    stored, expected = read_weights(path), model.state_dict()
    if not any(map(_is_head_weight, expected)):
        stored = {key: value for key, value in stored.items() if not _is_head_weight(key)}
    missing, extra = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing or extra:
        hint = _classes_hint(missing, extra) or "is it a checkpoint of a different model?"
        raise GTPError(
            f"{path} does not fit {name}: {len(missing)} keys are missing{_first(missing)}, {len(extra)} are not "
            f"known{_first(extra)}; {hint}"
        )
    wrong = [key for key in expected if stored[key].shape != expected[key].shape]
    if wrong:
        key = "pos_embed" if "pos_embed" in wrong else wrong[0]
        if wrong == ["pos_embed"]:
            hint = "create the model with the img_size it was trained with"
            if resizable:
                hint += ", or if that is its own, resample: --resample-positions or resample_positions=True"
        elif all(map(_is_head_weight, wrong)):
            hint = (
                f"create the model with its {len(stored[key])} classes: --num-classes or num_classes={len(stored[key])}"
            )
        else:
            hint = "is it a checkpoint of a different size?"
        raise GTPError(
            f"{path} does not fit {name}: {len(wrong)} shapes differ, e.g. {key} is {tuple(stored[key].shape)} and "
            f"should be {tuple(expected[key].shape)}; {hint}"
        )
    for key, weight in expected.items():
        if (problem := why_no_weight(stored[key], weight)) is not None:
            raise GTPError(f"{path} does not fit {name}: {key} is {problem}")
    model.load_state_dict(stored)


def why_no_weight(stored: Tensor, expected: Tensor) -> str | None:
    """Why a stored tensor is no weight: copying would take the codes of quantised weights for the weights."""
    if stored.is_meta:
        return "on the meta device, where it has no numbers; save it from a CPU"
    if stored.is_quantized or (expected.is_floating_point() and not stored.is_floating_point()):
        return f"{stored.dtype}, and the model has {expected.dtype}; save it in floating point, dequantised"
    if stored.layout != torch.strided:
        return "sparse; save it as an ordinary tensor (to_dense)"
    return None


def _is_head_weight(key: str) -> bool:
    return key.split(".", maxsplit=1)[0] in ("head", "head_dist", "aux_head")


def _classes_hint(missing: list[str], extra: list[str]) -> str:
    """A hint for files that differ from the model in the classifier only; else empty."""
    if missing and not extra and all(map(_is_head_weight, missing)):
        return "the file has no classifier: create the model without one, num_classes=0"
    return ""


def _first(keys: list[str]) -> str:
    return f" ({', '.join(keys[:2])}{' ...' if len(keys) > 2 else ''})" if keys else ""
