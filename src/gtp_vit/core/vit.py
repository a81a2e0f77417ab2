"""A ViT in numbers: its sizes, the tokens of each layer, and what these cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ViTInfo:
    """Sizes of a ViT: all that a method knows of it."""

    depth: int
    dim: int  # channels of a token
    heads: int
    head_dim: int
    grid: tuple[int, int]
    prefix: int
    class_token: bool  # is the first prefix token a class token?
    head_reads_image_tokens: bool  # False: pooling and head read prefix tokens only
    head_averages_image_tokens: bool  # is the pooled feature their plain mean?
    # Are images of different sizes in one call? A schedule is made for `grid`; the same share leaves any other.
    mixed_sizes: bool = False

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1]


class LayerTokens(NamedTuple):
    """The number of image tokens that each part of one layer computes."""

    keys: int  # have keys and values
    queries: int  # get an output of attention
    mlp: int  # go through the MLP
    out: int  # are left after the layer
    map_tokens: int = 0  # have queries and keys, if the map is computed of more tokens than have values


class BlockCosts(NamedTuple):
    """MACs of one block for one token, part by part."""

    keys: int  # norm, key and value
    queries: int  # query
    pairs: int  # both products of attention, for one pair of query and key
    output: int  # projection of the output of attention
    mlp: int  # MLP and its norm
    map_only: int  # norm, query and key, where values are of other tokens
    values_only: int  # norm and value, of those

    def map_of(self, tokens: int) -> int:
        """A map of this many tokens, computed before anything else."""
        return tokens * self.map_only + tokens * tokens * self.pairs // 2


class ForwardPass(NamedTuple):
    """The quantities that a method's own work is counted from."""

    grid: tuple[int, int]
    steps: tuple[LayerTokens, ...]
    blocks: tuple[BlockCosts, ...]
    shortened: bool  # does the last block compute prefix tokens only?

    @property
    def reducing(self) -> tuple[LayerTokens, ...]:
        """The layers in which tokens can leave after attention: all but a shortened one."""
        return self.steps[: len(self.steps) - self.shortened]
