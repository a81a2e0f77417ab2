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
from gtp_vit.core.attention import Ask, Stats
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

    def attention(self, block: nn.Module, tokens: Tokens, ask: Ask, queries: int | None) -> tuple[Tensor, Stats]:
        """The attention branch, scaled, ready to be added; of the first `queries` tokens if given."""

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
        elif is_left_alone(reducer, layer, tokens, last):
            tokens = tokens.but(x=block(tokens.x))
        else:
            # Two calls, so that what the layer began with is free while the MLP, the largest part, is computed.
            tokens, normed = run_attention(backbone, reducer, block, layer, tokens, last)
            tokens = tokens.add(backbone.mlp(block, tokens.x, normed))
        if observe is not None:
            observe(tokens)
    return tokens


def run_layer(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, prefix_only: bool
) -> Tokens:
    """One layer as a function of the tokens alone, for gradient checkpointing."""
    if is_left_alone(reducer, layer, tokens, prefix_only):
        return tokens.but(x=block(tokens.x))
    tokens, normed = run_attention(backbone, reducer, block, layer, tokens, prefix_only)
    return tokens.add(backbone.mlp(block, tokens.x, normed))


def is_left_alone(reducer: Reducer, layer: int, tokens: Tokens, prefix_only: bool) -> bool:
    """Does this layer run the model's own block, with its fused attention and its hooks?"""
    return reducer.ask(layer, tokens) is None and tokens.size is None and not prefix_only


def run_attention(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, prefix_only: bool
) -> tuple[Tokens, Tensor | None]:
    """Attention and reduction, which sits between the two branches of a block; the tokens, and maybe their norm."""
    ask = reducer.ask(layer, tokens) or Ask()
    if prefix_only:
        # Tokens removed here could not reach the prefix tokens any more, so nothing is removed. The map's statistics
        # are not needed then; an edit still is, for it changes what the prefix tokens see.
        branch, _ = backbone.attention(block, tokens, Ask(edit=ask.edit), queries=tokens.prefix)
        return tokens.prefix_only().add(branch), None
    branch, stats = backbone.attention(block, tokens, ask, queries=None)
    return reducer.reduce(layer, tokens, branch, stats, backbone.mlp_norm(block))


def _with_identity_source(tokens: Tokens) -> Tokens:
    batch, count = tokens.position.shape
    identity = torch.eye(count, dtype=torch.float32, device=tokens.x.device)
    return tokens.but(source=identity.expand(batch, -1, -1))
