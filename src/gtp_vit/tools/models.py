"""Models by name: timm's, and the networks of our own that timm does not have."""

from __future__ import annotations

import difflib
import fnmatch
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from gtp_vit import embedded
from gtp_vit.core.weights import load_weights
from gtp_vit.errors import GTPError, UnknownName


def names(pattern: str) -> list[str]:
    """Names of models that can be patched, timm's and ours, that match a pattern with * and ?."""
    import timm

    known = [embedded.NAME, "lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l"]
    known += timm.list_models(module=["vision_transformer", "deit"])
    return fnmatch.filter(known, pattern)


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    img_size: int | None = None,
    num_classes: int | None = None,
    meta: bool = False,
) -> nn.Module:
    """A model in eval mode, by name.

    Args:
        name: timm's name, or one of lvvit_t, lvvit_s, lvvit_m, lvvit_l, or fashion_vit, the small one in the package.
        pretrained: load timm's pre-trained weights.
        checkpoint: load the weights of this file, safetensors or torch's own format; no code in it is run.
        img_size: height and width of the images, if not the model's own.
        num_classes: of the model, if not its own number.
        meta: without weights, for counting.

    >>> sum(p.numel() for p in create_model("lvvit_s", meta=True).parameters())
    26151824
    """
    if meta and (pretrained or checkpoint is not None):
        raise GTPError("a model on the meta device has no weights; leave out pretrained and checkpoint")
    wanted = {"img_size": img_size, "num_classes": num_classes}
    sizes = {key: value for key, value in wanted.items() if value is not None}
    if name == embedded.NAME:
        if sizes:
            raise GTPError(f"{name} has its own size and classes; leave out {' and '.join(sizes)}")
        model = embedded.create(pretrained=checkpoint is None, meta=meta)
        if checkpoint is not None:
            load_weights(model, Path(checkpoint), name)
        return model
    if name.startswith("lvvit"):
        from gtp_vit.models import lvvit

        if pretrained:
            raise GTPError(f"pre-trained weights of {name} are not in timm; download them and give their file")
        with torch.device("meta") if meta else nullcontext():
            return lvvit.create(name, checkpoint_path=checkpoint, **sizes)
    import timm

    base = name.split(".", 1)[0]
    if ":" not in base and not timm.is_model(base):
        near = difflib.get_close_matches(base, names("*"), n=5, cutoff=0.0)
        raise UnknownName(f"unknown model {base!r}; the nearest are {', '.join(near)}; gtp-vit models lists all")
    try:
        with torch.device("meta") if meta else nullcontext():
            model = timm.create_model(name, pretrained=pretrained and checkpoint is None, **sizes).eval()
    except Exception as error:  # timm, the hub and the network raise what they like
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GTPError(f"timm cannot create {name!r}: {reason[0]}") from error
    if checkpoint is not None:
        load_weights(model, Path(checkpoint), name)
    return model
