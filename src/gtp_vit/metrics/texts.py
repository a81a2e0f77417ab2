"""Embeddings of texts, of which an image gets the nearest: read from a file and checked.

Shapes: T texts, C channels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gtp_vit.errors import GTPError, SettingError, first_line

FORMAT_HINT = "give a .safetensors file with one tensor, or an .npy file: [texts, channels]"


def read_texts(path: Path) -> Tensor:
    """Embeddings of texts in a file, [T, C]."""
    if path.suffix not in (".safetensors", ".npy"):
        raise GTPError(f"text_embeddings is {path}; {FORMAT_HINT}")
    try:
        if path.suffix == ".npy":
            tensors = [torch.from_numpy(np.load(path, allow_pickle=False))]
        else:
            from safetensors.torch import load_file

            tensors = list(load_file(path).values())
    except Exception as error:  # safetensors and numpy raise errors of many classes
        raise GTPError(f"{path} cannot be read: {first_line(error)}; {FORMAT_HINT}") from error
    if len(tensors) != 1 or tensors[0].ndim != 2 or not tensors[0].is_floating_point() or not len(tensors[0]):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "nothing"
        raise GTPError(f"{path} has {shapes}; {FORMAT_HINT}")
    if not bool(tensors[0].isfinite().all()):
        raise GTPError(f"{path} has numbers that are not finite; make the embeddings again, in float32")
    return tensors[0].float()


def check_texts(texts: Tensor) -> None:
    """Refuse embeddings of texts that say nothing."""
    if texts.ndim != 2 or len(texts) == 0:
        raise SettingError(
            f"the embeddings of texts are {list(texts.shape)}; give a vector for each text: [texts, channels]"
        )
    useless = int((~(texts.isfinite().all(dim=1) & (texts != 0).any(dim=1))).sum())
    if useless:
        raise SettingError(
            f"the embeddings of texts are zero or not finite for {useless} of {len(texts)} texts; compute them again"
        )
