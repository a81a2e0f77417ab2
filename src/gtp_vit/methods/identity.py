"""Identity: remove nothing. Only the last block is shortened, so the model is exact and still a little cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.vit import ViTInfo


@dataclass(frozen=True, kw_only=True, repr=False)
class Identity(Method):
    """Keep all tokens."""

    name: ClassVar[str] = "identity"
    source: ClassVar[Source] = Source("none", "none", "none")

    def build(self, vit: ViTInfo) -> Reducer:
        reducer = Reducer(vit)
        reducer.drops_patches = False
        return reducer

    def scaled(self, vit: ViTInfo, fraction: float) -> Identity:
        return self
