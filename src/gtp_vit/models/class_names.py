"""The names of a model's classes."""

from __future__ import annotations

from torch import nn

from gtp_vit.models import bundled
from gtp_vit.patching import host_of, unpatch


def class_names(model: nn.Module) -> list[str] | None:
    """Class names of the bundled model, of models that know them, and of models with ImageNet's classes; else None."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    host = host_of(model)
    if host.inputs.name == bundled.NAME:
        return list(bundled.CLASSES)
    if host.inputs.labels is not None:
        return list(host.inputs.labels)
    subset = infer_imagenet_subset(unpatch(model))  # by their number
    if subset is None or host.output is None or host.output.kind != "classes":
        return None
    info = ImageNetInfo(subset)
    return [info.index_to_description(index) for index in range(host.output.width)]
