"""Does a model score classes? Agreement, KL and accuracy mean nothing otherwise.

A softmax over features ranks methods by accident, and over one output it is always 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gtp_vit.errors import BadSetting, UnsupportedBackbone
from gtp_vit.patch import host_of

NEEDED = "agreement, KL and accuracy need one score for each class"


def check_class_output(model: nn.Module) -> None:
    """Refuse a supported ViT without classes, from its head alone: no image is run.

    The output of other modules is checked by `check_logits` when they have run.
    """
    try:
        output = host_of(model).output
    except UnsupportedBackbone:
        return
    if output is None:
        return
    kind, width = output
    if kind == "tokens":
        raise BadSetting(
            f"the model has an output for every token, {width} numbers each; {NEEDED}: create it with pooling, e.g. "
            "global_pool='token'"
        )
    if kind == "features":
        raise BadSetting(
            f"the model has no classifier: its output is {width} features; {NEEDED}: create it with num_classes and "
            "weights that have them"
        )
    if kind == "embedding":
        raise BadSetting(
            f"the model's output is an embedding of {width} numbers, to be compared with those of texts; {NEEDED}: "
            "give weights that were finetuned on classes (timm has them as ..._ft_in1k)"
        )
    if width == 1:
        raise BadSetting(f"the model has one output, whose softmax is always 1; {NEEDED}: give two or more classes")


def check_logits(name: str, output: Any, images: int) -> Tensor:
    """`output`, checked to be one score for each class of each image."""
    if isinstance(output, Tensor) and output.ndim == 2 and len(output) == images and output.shape[1] > 1:
        return output
    found = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise BadSetting(f"{name} returns {found} for {images} images; {NEEDED}: [images, classes], two classes or more")
