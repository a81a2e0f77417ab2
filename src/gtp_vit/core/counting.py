"""MACs from a description of a model and the tokens of its layers; neither model nor weights are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.core.reducer import Convention, Elementwise, Reducer, Step, VitInfo


@dataclass(frozen=True)
class Macs:
    """MACs for one image, part by part."""

    embed: int
    layers: tuple[int, ...]
    head: int
    method: int  # the method's own work; 0 if it was not counted

    @property
    def total(self) -> int:
        return self.embed + sum(self.layers) + self.head + self.method

    def __int__(self) -> int:
        return self.total

    def __str__(self) -> str:
        return f"{self.total / 1e9:.3f} GMACs"


def count_macs(
    vit: VitInfo,
    reducer: Reducer,
    steps: Sequence[Step],
    grid: tuple[int, int],
    convention: Convention,
    include_method: bool,
    lossless: bool,
) -> Macs:
    """MACs of a forward pass that returns logits, for one image.

    Args:
        vit: sizes of the model.
        reducer: what reduces its tokens.
        steps: the tokens of its layers.
        grid: rows and columns of the patch grid.
        convention: "model", or "torchprofile" as the paper counts.
        include_method: count the method's own work too.
        lossless: does the last block compute prefix tokens only?
    """
    official = convention == "torchprofile"
    extra = vit.elementwise_macs if official else Elementwise(0, 0, 0, 0)
    width = vit.heads * vit.head_dim
    qkv = 3 * vit.dim * width + extra.keys + extra.queries
    output = vit.linear_macs[0] - 3 * vit.dim * width + extra.output
    mlp = vit.linear_macs[1] + extra.mlp
    embed = grid[0] * grid[1] * (vit.embed_macs_per_patch + official * vit.embed_elementwise_macs_per_patch)
    layers = []
    tokens = vit.prefix if lossless else vit.prefix + steps[-1].after
    for layer, step in enumerate(steps):
        keys, rows = vit.prefix + step.keys, vit.prefix + step.rows
        if lossless and layer == vit.depth - 1:
            layers.append(_prefix_only_layer(vit, reducer, keys, extra))
        else:
            layers.append(keys * qkv + 2 * rows * keys * width + rows * output + (vit.prefix + step.mlp) * mlp)
    head = vit.head_macs + vit.head_macs_per_token * (tokens if vit.head_reads_prefix_too else tokens - vit.prefix)
    if official:
        head += tokens * vit.final_elementwise_macs + vit.pooled_elementwise_macs
    own = reducer.own_macs(grid, steps, vit.depth - lossless, convention) if include_method else 0
    return Macs(embed, tuple(layers), head, own)


def _prefix_only_layer(vit: VitInfo, reducer: Reducer, tokens: int, extra: Elementwise) -> int:
    """The last block when only prefix tokens are read: keys and values of all, the rest of the prefix."""
    width, prefix = vit.heads * vit.head_dim, vit.prefix
    project = vit.dim * width
    # An edit of the map has to see the whole map, so queries of all tokens are needed then.
    queries = tokens if reducer.edits_map else prefix
    total = queries * (project + extra.queries) + tokens * (2 * project + extra.keys)
    total += (queries + prefix) * tokens * width
    return total + prefix * (project + extra.output + vit.linear_macs[1] + extra.mlp)
