"""class output: does a model score classes? Agreement, KL and accuracy mean nothing for anything else.

A softmax over features ranks methods by accident, and over one output it is always 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.errors import BadSetting, UnsupportedBackbone
from gtp_vit.patch import describe, unpatch
from gtp_vit.tools.eval_mode import eval_mode

NEEDED = "agreement, KL and accuracy need one score for each class"
CLIP = ("clip", "_mci_", "_pe_core_")  # in timm's names of models whose output is compared with texts
FINETUNED = "_ft_in"  # in timm's names of weights that were trained on classes afterwards


def check_class_output(model: nn.Module) -> None:
    """Refuse a supported ViT without classes, from its head alone: no image is run.

    Of other modules nothing is known before they run; `check_logits` then looks at what they return.
    """
    plain: Any = unpatch(model)
    try:
        vit = describe(plain)
    except UnsupportedBackbone:
        return
    weight = next(plain.parameters())
    tokens = torch.zeros(1, vit.prefix + vit.image_tokens, vit.dim, dtype=weight.dtype, device=weight.device)
    with eval_mode(plain), torch.no_grad():
        output = plain.forward_head(tokens)
    shape = list(output.shape)
    if len(shape) == 3:
        raise BadSetting(
            f"the model has logits of every token, {shape[1:]}; {NEEDED}: create it with pooling, e.g. "
            "global_pool='token'"
        )
    if isinstance(plain.head, nn.Identity) or shape[1] == 0:
        raise BadSetting(
            f"the model has no classifier: its output is {vit.dim} features; {NEEDED}: create it with num_classes and "
            "weights that have them"
        )
    if shape[1] == 1:
        raise BadSetting(f"the model has one output, whose softmax is always 1; {NEEDED}: give two or more classes")
    if _is_projection(plain, shape[1]):
        raise BadSetting(
            f"the model's output is an embedding of {shape[1]} numbers, to be compared with those of texts; {NEEDED}: "
            f"give weights that were finetuned on classes (timm has them as ...{FINETUNED}1k)"
        )


def check_logits(name: str, output: Any, images: int) -> Tensor:
    """What a model returned, if it is one score for each class of each image."""
    if isinstance(output, Tensor) and output.ndim == 2 and len(output) == images and output.shape[1] > 1:
        return output
    found = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise BadSetting(f"{name} returns {found} for {images} images; {NEEDED}: [images, classes], two classes or more")


def _is_projection(model: Any, outputs: int) -> bool:
    """Is the head CLIP's projection, which timm keeps where others have classes? It is linear and has no bias."""
    config = getattr(model, "pretrained_cfg", None) or {}
    known = config if isinstance(config, dict) else vars(config)
    name = f"{known.get('architecture')}.{known.get('tag')}"
    bias = getattr(model.head, "bias", None)
    return (
        any(part in name for part in CLIP)
        and FINETUNED not in name
        and outputs == known.get("num_classes")
        and (bias is None or bias.is_meta or not bool(bias.any()))
    )
