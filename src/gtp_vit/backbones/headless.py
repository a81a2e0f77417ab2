"""A classifier without its last layer: it then returns the pooled features that the layer read."""

from __future__ import annotations

from typing import Any

from torch import nn

from gtp_vit.backbones import find
from gtp_vit.errors import UnsupportedBackbone


def remove_classifier(model: Any) -> None:
    """Let a model that scores classes return pooled features instead; others are left as they are."""
    host = find(model)
    if host.output is None or host.output.kind != "classes":
        return
    tower: Any = host.tower
    named = [name for name, _ in host.around.named_children() if "classifier" in name]
    if host.root is not None and named:  # Hugging Face's
        for name in named:
            setattr(host.around, name, nn.Identity())
    elif hasattr(tower, "reset_classifier"):  # timm's
        tower.reset_classifier(0)
    elif hasattr(tower, "heads"):  # torchvision's
        tower.heads = nn.Identity()
    else:
        raise UnsupportedBackbone(
            f"{type(tower).__name__} cannot do without its classifier; ask for its class scores instead"
        )
