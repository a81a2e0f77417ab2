"""Flags that say how outputs are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from gtp_vit.cli.parser import Short
from gtp_vit.errors import GTPError, first_line
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.registry import NEIGHBOURS, Wanted, measure_of


@dataclass(frozen=True)
class MeasureFlags:
    """By what measure a reduced model is compared with the unreduced one."""

    measure: Annotated[Wanted, Short("--for")] = "auto"
    """How outputs are compared. classes: KL and agreement; embedding: cosine and nearest neighbours; numbers: relative
    error; dense: features of all patches, restored. auto chooses by what the model returns."""


@dataclass(frozen=True)
class EmbeddingFlags(MeasureFlags):
    """And settings of the measure for embeddings."""

    nearest: int = NEIGHBOURS
    """For embeddings: how many nearest images of each are compared, and vote where there are labels."""
    text_embeddings: Path | None = None
    """For embeddings: those of one text for each class, [classes, channels], for zero-shot agreement; .safetensors with
    one tensor, or .npy."""


def chosen_measure(flags: EmbeddingFlags, model: nn.Module) -> Measure:
    """The measure of the flags for this model."""
    texts = None if flags.text_embeddings is None else read_texts(flags.text_embeddings)
    return measure_of(model, flags.measure, neighbours=flags.nearest, texts=texts)


def read_texts(path: Path) -> Tensor:
    """Embeddings of texts in a file, [T, C]."""
    wanted = "give a .safetensors file with one tensor, or an .npy file: [texts, channels]"
    if path.suffix not in (".safetensors", ".npy"):
        raise GTPError(f"--text-embeddings is {path}; {wanted}")
    try:
        if path.suffix == ".npy":
            found = [torch.from_numpy(np.load(path, allow_pickle=False))]
        else:
            from safetensors.torch import load_file

            found = list(load_file(path).values())
    except Exception as error:  # safetensors and numpy raise errors of many classes
        raise GTPError(f"{path} cannot be read: {first_line(error)}; {wanted}") from error
    if len(found) != 1 or found[0].ndim != 2 or not found[0].is_floating_point() or not len(found[0]):
        shapes = ", ".join(str(list(each.shape)) for each in found) or "nothing"
        raise GTPError(f"{path} has {shapes}; {wanted}")
    if not bool(found[0].isfinite().all()):
        raise GTPError(f"{path} has numbers that are not finite; make the embeddings again, in float32")
    return found[0].float()
