"""The loop over the blocks: the whole library on one screen. Start reading here.

Nothing is stored on a module: every step returns a new `Tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_vit import kernels
from gtp_vit.core.attention import Ask, Projections, attend, attention_map, first_look
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.reducer import Method, Reducer, VitInfo
from gtp_vit.core.restoring import followed, remembered, restored
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import BadInput
from gtp_vit.kernels import Kernels
from gtp_vit.tensors import behind_prefix


@dataclass(frozen=True, eq=False)
class Origin:
    """The recipe that settings are from: how they were found, and what was measured with them on which weights."""

    found: Mapping[str, Any]
    measured: Mapping[str, Any]
    weights: Tensor  # fingerprint


@dataclass(frozen=True)
class Reduction:
    """What `patch` decided; every patched model carries it as `model.reduction`."""

    backbone: Backbone
    method: Method
    vit: VitInfo
    lossless: bool
    kernels: Kernels  # as passed to `patch`; the model's attribute `kernels` says what runs now
    restore: bool  # do callers who want all tokens get the full grid?
    # Does a model around the ViT read its image tokens? None: the ViT's own head counts.
    root_reads: bool | None = None
    origin: Origin | None = field(default=None, compare=False)  # None if no recipe was given

    def may_skip_image_tokens(self, model: Any) -> bool:
        """Are image tokens unused after the last block, as `model` is set now?"""
        reads = self.backbone.head_reads_image_tokens(model) if self.root_reads is None else self.root_reads
        return self.lossless and not (reads or model.reducer.reads_image_tokens)


Observer = Callable[[Tokens], None]


def run(
    model: Any,
    images: Tensor | Tokens,
    *,
    prefix_only: bool = False,
    layers: int | None = None,
    observe: Observer | None = None,
    follow: bool = False,
    restore: bool = False,
) -> Tokens:
    """Embed the images and run the blocks, reducing tokens on the way.

    Args:
        model: a patched model.
        images: [B, channels, height, width], or the tokens that a family's own entry point has made of them.
        prefix_only: the caller reads prefix tokens only; the last block computes nothing else (exact).
        layers: stop after this many blocks; None = after those that are used.
        observe: called with the embedded tokens, then with the tokens after each layer.
        follow: keep `Tokens.owner`: which token stands for each patch.
        restore: keep what `restored` needs to give every patch a feature of its own.
    """
    reduction: Reduction = model.reduction
    backbone, reducer = reduction.backbone, model.reducer
    if backbone.grid(model) != reduction.vit.grid:
        raise BadInput("the original model's input size was changed after patching; patch it again")
    tokens = images if isinstance(images, Tokens) else backbone.embed(model, images)
    owner = (tokens.cell if tokens.owner is None else tokens.owner) if follow or restore else None
    tokens = tokens.but(ops=kernels.choose(reduction.kernels, tokens.x), owner=owner)
    tokens = reducer.start(remembered(tokens) if restore else tokens)
    if observe is not None:
        observe(tokens)
    blocks = list(backbone.blocks(model))[: reduction.vit.depth if layers is None else layers]
    again = torch.is_grad_enabled() and backbone.saves_memory(model)
    call: Any = functools.partial(checkpoint, use_reentrant=False) if again else _call
    for layer, block in enumerate(blocks):
        last = prefix_only and layer == len(blocks) - 1
        half = call(attention_part, backbone, reducer, block, layer, tokens, last)
        # Rebound to free the layer's input before the MLP, which needs the most memory.
        tokens = half.tokens
        tokens = call(mlp_part, backbone, reducer, block, layer, half, last)
        del half
        if observe is not None:
            observe(tokens)
    return tokens


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def all_features(model: Any, images: Tensor) -> Tensor:
    """The normed features of all tokens of a patched ViT: those that remain, or with `restore` the whole grid."""
    reduction: Reduction = model.reduction
    return reduction.backbone.norm(model)(restored(run(model, images, restore=reduction.restore)))


class Half(NamedTuple):
    """A layer after its attention."""

    tokens: Tokens
    normed: Tensor | None = None  # features after the MLP's norm, if a kernel has computed them
    whole: bool = False  # did the model's own block run, which includes the MLP?


def attention_part(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, last: bool
) -> Half:
    """Attention and reduction, which sits between the two branches of a block.

    `last`: the image tokens this layer would output are not used.
    """
    tokens = followed(reducer, layer, tokens, reducer.before(layer, tokens))
    ask = reducer.ask(layer, tokens)
    weights = reducer.key_weights(tokens)
    if ask is None and weights is None and not last:
        # The model's own block, with its fused attention and its hooks.
        return Half(tokens.but(x=backbone.run_block(block, layer, tokens)), whole=True)
    ask = ask or Ask()
    prefix, ops = tokens.prefix, tokens.ops
    if ask.look:
        merged, seen = reducer.look(layer, tokens, attention_map(backbone.looks(block, layer, tokens), weights))
        tokens = followed(reducer, layer, tokens, merged)
        if seen is not None:
            out = reducer.weigh(seen, backbone.values(block, layer, tokens), prefix if last else None)
            return Half((tokens.prefix_only() if last else tokens).add(backbone.attention_branch(block, out)))
        ask, weights = Ask(), reducer.key_weights(tokens)
    if last:
        # Removing tokens here could not change the prefix tokens, so none are removed and no statistics are needed. An
        # edit of the map still is: it changes what the prefix tokens see.
        projections = backbone.project(block, layer, tokens, prefix if ask.edit is None else None)
        mask = None if ask.mask is None else ask.mask[:, :prefix]
        out, _ = attend(projections, ask=Ask(edit=ask.edit, mask=mask), size=weights, queries=prefix, ops=ops)
        return Half(tokens.prefix_only().add(backbone.attention_branch(block, out)))
    projections = backbone.project(block, layer, tokens, None)
    if ask.choose:
        kept, chosen = reducer.choose(layer, tokens, first_look(projections, ask, weights, prefix))
        tokens = followed(reducer, layer, tokens, chosen)
        out, _ = attend(_queries_of(projections, kept, prefix), ask=Ask(), size=weights, ops=ops)
        return Half(tokens.add(backbone.attention_branch(block, out)))
    out, stats = attend(projections, ask=ask, size=weights, first=prefix, ops=ops)
    branch = backbone.attention_branch(block, out)
    reduced, normed = reducer.fused(layer, tokens, branch, stats, backbone.mlp_norm(block))
    return Half(followed(reducer, layer, tokens, reduced, branch), normed)


def mlp_part(backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, half: Half, last: bool) -> Tokens:
    """The MLP, if it has not run yet, and what the method does after the layer."""
    tokens = half.tokens if half.whole else half.tokens.add(backbone.mlp_branch(block, half.tokens.x, half.normed))
    if last:
        return tokens
    tokens = followed(reducer, layer, tokens, reducer.after(layer, tokens))
    return tokens if tokens.detail is None else tokens.but(layers=layer + 1)


def _queries_of(projections: Projections, kept: Tensor, prefix: int) -> Projections:
    """The same with queries of the prefix tokens and of the image tokens `kept` [B, K] only."""
    q, k, v, scale, dropout, bias, metric = projections
    rows = behind_prefix(kept, prefix)[:, None, :, None]
    if bias is not None:
        bias = bias.expand(q.shape[0], -1, -1, -1).gather(2, rows.expand(-1, q.shape[1], -1, k.shape[2]))
    q = q.gather(2, rows.expand(-1, q.shape[1], -1, q.shape[3]))
    return Projections(q, k, v, scale, dropout, bias, metric)
