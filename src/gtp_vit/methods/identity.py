"""Identity: remove nothing. Only the last block is shortened, so the model is exact and still a little cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.vit import ViTInfo


@dataclass(frozen=True, kw_only=True, repr=False)
class Identity(Method):
    """Keep all tokens.

    >>> from gtp_vit import Identity, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), Identity()))
    1.254 GMACs
    """

    name: ClassVar[str] = "identity"
    source: ClassVar[Source] = Source("none", "none", "none")

    def build(self, vit: ViTInfo) -> Reducer:
        reducer = Reducer(vit)
        reducer.drops_patches = False
        return reducer

    def scaled(self, vit: ViTInfo, fraction: float) -> Identity:
        return self
