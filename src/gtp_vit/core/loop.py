"""The loop over the blocks: the whole library in one screen. Start reading here.

Nothing is written to a module: `tokens` is a value, made anew in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_vit import kernels
from gtp_vit.core.attention import Ask, Projections, attend, first_look
from gtp_vit.core.reducer import Method, Reducer, VitInfo
from gtp_vit.core.tokens import Tokens
from gtp_vit.kernels import Kernels


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

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]: ...

    def saves_memory(self, model: nn.Module) -> bool:
        """Is gradient checkpointing on: is each layer computed a second time in the backward pass?"""

    def run_block(self, block: nn.Module, layer: int, tokens: Tokens) -> Tensor:
        """The features after one of the model's own blocks, for layers that a method leaves alone."""

    def project(self, block: nn.Module, layer: int, tokens: Tokens, queries: int | None) -> Projections:
        """Queries, keys and values of a block's attention; queries of the first `queries` tokens if given."""

    def output(self, block: nn.Module, out: Tensor) -> Tensor:
        """The attention branch, scaled, ready to be added, from what attention put out."""

    def mlp_norm(self, block: nn.Module) -> nn.LayerNorm | None:
        """The norm in front of the MLP, if it is a plain LayerNorm that a kernel may compute."""

    def mlp(self, block: nn.Module, x: Tensor, normed: Tensor | None) -> Tensor:
        """The MLP branch, scaled, ready to be added; `normed` is x after the norm, if it has been computed already."""


@dataclass(frozen=True)
class Reduction:
    """What `patch` decided; every patched model carries it as `model.reduction`."""

    backbone: Backbone
    method: Method
    vit: VitInfo
    lossless: bool
    kernels: Kernels  # as asked for; the model's attribute `kernels` says what that means now

    def may_skip_image_tokens(self, model: Any) -> bool:
        """Does nobody read image tokens behind the last block, as `model` is now?"""
        reads = self.backbone.head_reads_image_tokens(model) or model.reducer.reads_image_tokens
        return self.lossless and not reads


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
    reduction: Reduction = model.reduction
    backbone, reducer = reduction.backbone, model.reducer
    tokens = backbone.embed(model, images)
    tokens = reducer.start(tokens.but(ops=kernels.choose(reduction.kernels, tokens.x)))
    if observe is not None:
        observe(tokens)
    blocks = list(backbone.blocks(model))[:layers]
    again = torch.is_grad_enabled() and backbone.saves_memory(model)
    call: Any = functools.partial(checkpoint, use_reentrant=False) if again else _call
    for layer, block in enumerate(blocks):
        if follow:
            tokens = _with_identity_source(tokens)
        last = prefix_only and layer == len(blocks) - 1
        half = call(attention_part, backbone, reducer, block, layer, tokens, last)
        # Rebound, so that what the layer began with is free while the MLP, the largest part, is computed.
        tokens = half.tokens
        tokens = call(mlp_part, backbone, reducer, block, layer, half, last)
        if observe is not None:
            observe(tokens)
    return tokens


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class Half(NamedTuple):
    """A layer after its attention."""

    tokens: Tokens
    normed: Tensor | None = None  # their features after the MLP's norm, if these have been computed on the way
    whole: bool = False  # did the model's own block run, which includes the MLP?


def attention_part(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, last: bool
) -> Half:
    """Attention and reduction, which sits between the two branches of a block.

    `last`: nobody reads the image tokens that this layer would make.
    """
    tokens = reducer.before(layer, tokens)
    ask = reducer.ask(layer, tokens)
    if ask is None and tokens.size is None and not last:
        # The model's own block, with its fused attention and its hooks.
        return Half(tokens.but(x=backbone.run_block(block, layer, tokens)), whole=True)
    ask = ask or Ask()
    prefix, size, ops = tokens.prefix, tokens.size, tokens.ops
    if size is not None and reducer.size_power != 1:
        size = size.pow(reducer.size_power)
    if last:
        # Tokens removed here could not reach the prefix tokens any more, so nothing is removed. The map's statistics
        # are not needed then; an edit still is, for it changes what the prefix tokens see.
        projections = backbone.project(block, layer, tokens, prefix if ask.edit is None else None)
        mask = None if ask.mask is None else ask.mask[:, :prefix]
        out, _ = attend(projections, ask=Ask(edit=ask.edit, mask=mask), size=size, queries=prefix, ops=ops)
        return Half(tokens.prefix_only().add(backbone.output(block, out)))
    projections = backbone.project(block, layer, tokens, None)
    if ask.choose:
        kept, tokens = reducer.choose(layer, tokens, first_look(projections, ask, size, prefix))
        q, k, v, scale, dropout = projections
        projections = Projections(_rows_of(q, kept, prefix), k, v, scale, dropout)
        out, _ = attend(projections, ask=Ask(), size=size, ops=ops)
        return Half(tokens.add(backbone.output(block, out)))
    out, stats = attend(projections, ask=ask, size=size, first=prefix, ops=ops)
    return Half(*reducer.fused(layer, tokens, backbone.output(block, out), stats, backbone.mlp_norm(block)))


def mlp_part(backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, half: Half, last: bool) -> Tokens:
    """The MLP, if it has not run yet, and what the method does behind the layer."""
    tokens = half.tokens if half.whole else half.tokens.add(backbone.mlp(block, half.tokens.x, half.normed))
    return tokens if last else reducer.after(layer, tokens)


def _rows_of(q: Tensor, kept: Tensor, prefix: int) -> Tensor:
    """Queries [B, H, N, D] of the prefix tokens and of the image tokens `kept` [B, K]."""
    rows = torch.cat([torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1), kept + prefix], dim=1)
    return q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))


def _with_identity_source(tokens: Tokens) -> Tokens:
    batch, count = tokens.position.shape
    identity = torch.eye(count, dtype=torch.float32, device=tokens.x.device)
    return tokens.but(source=identity.expand(batch, -1, -1))
