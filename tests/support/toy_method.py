"""All that a new method is: one file like this one, and one line in METHODS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo


@dataclass(frozen=True, kw_only=True, repr=False)
class Toy(Method):
    """Drop the tokens with the smallest norm, weighted by channel."""

    name: ClassVar[str] = "toy"
    source: ClassVar[Source] = Source("none", "tests/support/toy_method.py", "Apache-2.0")
    trained_parts: ClassVar[str] = "a weight for each channel"
    schedule_field: ClassVar[str | None] = "dropped"
    weight_file_fields: ClassVar[tuple[str, ...]] = ("channels",)

    dropped: Schedule = 4
    """Tokens dropped in each layer."""
    channels: str | None = None
    """A file with the weights of the channels; all are 1 without one."""

    def build(self, vit: ViTInfo) -> ToyReducer:
        return ToyReducer(self, vit)


class ToyReducer(Reducer):
    """The toy in a forward pass."""

    def __init__(self, method: Toy, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.channels = torch.nn.ParameterDict({"weight": torch.ones(vit.dim)})
        if method.channels is not None:
            from safetensors.torch import load_file

            self.load_state_dict(load_file(method.channels))
        self.plan = self.removals(vit.grid)

    def reduce(self, attention: LayerAttention) -> Tokens:
        tokens = attention.add()
        weighted = tokens.image * self.channels["weight"]
        norms = weighted.norm(dim=-1)
        left = norms.shape[1] - self.removals_of(tokens)[attention.layer]
        kept = norms.sort(dim=1, descending=True, stable=True).indices[:, :left].sort(dim=1).values
        # Gates of 1 through which the weights get a gradient.
        gates = norms / norms.detach().clamp(min=1e-9)
        prefix = torch.ones_like(tokens.x[:, : tokens.prefix, 0])
        return tokens.replace(x=tokens.x * torch.cat([prefix, gates], dim=1).unsqueeze(2)).keep(kept)
