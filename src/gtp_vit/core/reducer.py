"""The seam between methods and backbones: what a ViT looks like, what a method sets, what a reducer does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor, nn

from gtp_vit.core.attention import Ask, Stats
from gtp_vit.core.tokens import Tokens

Convention = Literal["model", "torchprofile"]
CONVENTIONS = get_args(Convention)


class Elementwise(NamedTuple):
    """MACs of one token in a block's norms and scales, which only the paper's tool counts."""

    keys: int  # in front of keys and values: of all tokens
    queries: int  # of the tokens that have a query
    output: int  # of the tokens that attention has an output for
    mlp: int  # of the tokens that reach the MLP


@dataclass(frozen=True)
class VitInfo:
    """Sizes of a ViT: all that a method or the MAC counter knows of it. MACs are for one image or one token."""

    depth: int
    dim: int  # channels of a token
    heads: int
    head_dim: int
    grid: tuple[int, int]
    prefix: int
    class_token: bool  # is the first prefix token a class token?
    head_reads_image_tokens: bool  # False: pooling and head read prefix tokens only
    embed_macs_per_patch: int
    linear_macs: tuple[int, int]  # of one token in a block's attention (qkv and projection) and MLP
    elementwise_macs: Elementwise
    final_elementwise_macs: int  # one token's, of norms before the first and after the last block
    head_macs: int  # pooling and classifier, apart from what follows
    head_macs_per_token: int  # what pooling or classifier spends on each token it reads
    head_reads_prefix_too: bool  # where it reads image tokens: does it read the prefix tokens as well?
    pooled_elementwise_macs: int  # norms of the pooled feature

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


class Reducer(nn.Module):
    """What a method does in a forward pass. A Module, so that its buffers and learned parts follow the model."""

    edits_map = False  # does `ask` ever edit the attention map?

    def __init__(self, vit: VitInfo) -> None:
        super().__init__()
        self.vit = vit

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """How many image tokens each layer removes on such a grid."""
        return (0,) * self.vit.depth

    def start(self, tokens: Tokens) -> Tokens:
        """Called once, with the embedded tokens."""
        return tokens

    def ask(self, layer: int, tokens: Tokens) -> Ask | None:
        """What `layer` needs from attention; None = the layer is left alone and runs the model's own block."""
        return None

    def reduce(
        self, layer: int, tokens: Tokens, branch: Tensor, stats: Stats, norm: nn.LayerNorm | None
    ) -> tuple[Tokens, Tensor | None]:
        """Add the attention branch and reduce; called in every layer that is not left alone.

        Returns the tokens and, if the method has computed that on the way, their features after `norm`.
        """
        return tokens.add(branch), None

    def own_macs(self, grid: tuple[int, int], layers: int, convention: Convention) -> int:
        """MACs of the method itself in the first `layers` layers."""
        return 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Method:
    """Settings of a method: frozen, comparable, hashable, and the only place where a default is written."""

    name: ClassVar[str]

    def build(self, vit: VitInfo) -> Reducer:
        """Check the settings against this ViT and make the reducer; raises GTPError."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        fields = dataclasses.fields(self)
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def off(self) -> Method:
        """The same settings, removing nothing: must then equal the untouched model."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON, with the method's name; `gtp_vit.method_from_dict` reads it back."""
        return {"method": self.name, **dataclasses.asdict(self)}
