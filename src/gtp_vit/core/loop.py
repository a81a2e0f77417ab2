"""The loop over the blocks: the whole library in one screen. Start reading here.

Nothing is written to a module: `tokens` is a value, made anew in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_vit import kernels
from gtp_vit.core.attention import Ask, Projections, attend, first_look
from gtp_vit.core.reducer import Reducer, VitInfo
from gtp_vit.core.tokens import Tokens


class Backbone(Protocol):
    """What the library must know of a family of models; see backbones/timm_vit.py."""

    @property
    def forwards(self) -> type:
        """Mixed into the class of a patched model: the model's own entry points, running `run`."""

    def matches(self, model: nn.Module) -> bool:
        """Is this model of the family at all?"""

    def refusal(self, model: nn.Module) -> str | None:
        """None if every module of it is understood, else what is in the way."""

    def describe(self, model: nn.Module) -> VitInfo: ...

    def head_reads_image_tokens(self, model: nn.Module) -> bool:
        """False if pooling and head read prefix tokens only, as the model is now."""

    def embed(self, model: nn.Module, images: Tensor) -> Tokens: ...

    def project(self, block: nn.Module, x: Tensor, queries: int | None) -> Projections:
        """Queries, keys and values of a block's attention; queries of the first `queries` tokens if given."""

    def output(self, block: nn.Module, out: Tensor) -> Tensor:
        """The attention branch, scaled, ready to be added, from what attention put out."""

    def mlp_norm(self, block: nn.Module) -> nn.LayerNorm | None:
        """The norm in front of the MLP, if it is a plain LayerNorm that a kernel may compute."""

    def mlp(self, block: nn.Module, x: Tensor, normed: Tensor | None) -> Tensor:
        """The MLP branch, scaled, ready to be added; `normed` is x after the norm, if it has been computed already."""


Observer = Callable[[Tokens], None]


def run(
    model: Any,
    images: Tensor,
    *,
    prefix_only: bool = False,
    layers: int | None = None,
    observe: Observer | None = None,
    follow: bool = False,
) -> Tokens:
    """Embed the images and run the blocks, reducing tokens on the way.

    Args:
        model: a patched model.
        images: [B, channels, height, width].
        prefix_only: the caller reads prefix tokens only; the last block computes nothing else (exact).
        layers: stop after so many blocks.
        observe: called with the embedded tokens and then with those after each layer.
        follow: fill `Tokens.source` in every layer, for the trace.
    """
    backbone, reducer = model.reduction.backbone, model.reducer
    tokens = backbone.embed(model, images)
    tokens = reducer.start(tokens.but(native=kernels.choose(model.reduction.kernels, tokens.x)))
    if observe is not None:
        observe(tokens)
    blocks = list(model.blocks)[:layers]
    for layer, block in enumerate(blocks):
        if follow:
            tokens = _with_identity_source(tokens)
        last = prefix_only and layer == len(blocks) - 1
        if model.grad_checkpointing and torch.is_grad_enabled():
            tokens = checkpoint(run_layer, backbone, reducer, block, layer, tokens, last, use_reentrant=False)
        else:
            # In pieces, so that what the layer began with is free while the MLP, the largest part, is computed.
            tokens = reducer.before(layer, tokens)
            if is_left_alone(reducer, layer, tokens, last):
                tokens = tokens.but(x=block(tokens.x))
            else:
                tokens, normed = run_attention(backbone, reducer, block, layer, tokens, last)
                tokens = tokens.add(backbone.mlp(block, tokens.x, normed))
            tokens = tokens if last else reducer.after(layer, tokens)
        if observe is not None:
            observe(tokens)
    return tokens


def run_layer(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, prefix_only: bool
) -> Tokens:
    """One layer as a function of the tokens alone, for gradient checkpointing."""
    tokens = reducer.before(layer, tokens)
    if is_left_alone(reducer, layer, tokens, prefix_only):
        tokens = tokens.but(x=block(tokens.x))
    else:
        tokens, normed = run_attention(backbone, reducer, block, layer, tokens, prefix_only)
        tokens = tokens.add(backbone.mlp(block, tokens.x, normed))
    return tokens if prefix_only else reducer.after(layer, tokens)


def is_left_alone(reducer: Reducer, layer: int, tokens: Tokens, prefix_only: bool) -> bool:
    """Does this layer run the model's own block, with its fused attention and its hooks?"""
    return reducer.ask(layer, tokens) is None and tokens.size is None and not prefix_only


def run_attention(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, prefix_only: bool
) -> tuple[Tokens, Tensor | None]:
    """Attention and reduction, which sits between the two branches of a block; the tokens, and maybe their norm."""
    ask = reducer.ask(layer, tokens) or Ask()
    prefix, size, native = tokens.prefix, tokens.size, tokens.native
    if size is not None and reducer.size_power != 1:
        size = size.pow(reducer.size_power)
    if prefix_only:
        # Tokens removed here could not reach the prefix tokens any more, so nothing is removed. The map's statistics
        # are not needed then; an edit still is, for it changes what the prefix tokens see.
        projections = backbone.project(block, tokens.x, prefix if ask.edit is None else None)
        mask = None if ask.mask is None else ask.mask[:, :prefix]
        out, _ = attend(projections, ask=Ask(edit=ask.edit, mask=mask), size=size, queries=prefix, native=native)
        return tokens.prefix_only().add(backbone.output(block, out)), None
    projections = backbone.project(block, tokens.x, None)
    if ask.choose:
        kept, tokens = reducer.choose(layer, tokens, first_look(projections, ask, size, prefix))
        q, k, v, scale, dropout = projections
        projections = Projections(_rows_of(q, kept, prefix), k, v, scale, dropout)
        out, _ = attend(projections, ask=Ask(), size=size, native=native)
        return tokens.add(backbone.output(block, out)), None
    out, stats = attend(projections, ask=ask, size=size, first=prefix, native=native)
    return reducer.reduce(layer, tokens, backbone.output(block, out), stats, backbone.mlp_norm(block))


def _rows_of(q: Tensor, kept: Tensor, prefix: int) -> Tensor:
    """Queries [B, H, N, D] of the prefix tokens and of the image tokens `kept` [B, K]."""
    rows = torch.cat([torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1), kept + prefix], dim=1)
    return q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))


def _with_identity_source(tokens: Tokens) -> Tokens:
    batch, count = tokens.position.shape
    identity = torch.eye(count, dtype=torch.float32, device=tokens.x.device)
    return tokens.but(source=identity.expand(batch, -1, -1))
