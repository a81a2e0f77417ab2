"""Where models come from: a library creates them by name, and knows how their weights want images prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gtp_vit.errors import GTPError

Transform = Callable[[Any], Tensor]  # from a picture


class Library:
    """A library of models. It is imported only when one of its models is asked for."""

    title: str  # as people call it
    prefix = ""  # of the names of its models, as hf in hf:NAME; those of timm and of this package have none
    has_weights = False  # does a name mean weights, too?

    def knows(self, name: str) -> bool:
        """Has the library a model of this name, as far as that can be known?"""
        return False

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        """A model in eval mode; `sizes` may have img_size and num_classes."""
        raise GTPError(f"models of {self.title} cannot be created by name")

    def outline(self, name: str) -> nn.Module:
        """The model without weights and perhaps with fewer blocks, to see what it is made of."""
        return self.create(name, pretrained=False, checkpoint=None, meta=True, sizes={})

    def transform(self, name: str, model: nn.Module) -> Transform | None:
        """From a picture to a tensor as the model's weights want it; None: as its `inputs.preparation` says."""
        return None

    def preparation(self, name: str) -> dict[str, Any] | None:
        """The same in timm's words, for people and other programs; None: the model's own `inputs.preparation`."""
        return None

    def public_name(self, name: str) -> str:
        """The name without a folder of this machine."""
        return name
