"""The loop over the blocks: the whole library on one screen. Start reading here.

Nothing is stored on a module: every step returns a new `Tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_vit import kernels
from gtp_vit.core.attention import PLAIN
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer
from gtp_vit.core.restoring import begin_restoring, record_losses, restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import InputError
from gtp_vit.kernels import Kernels


@dataclass(frozen=True)
class Reduction:
    """The decisions of `patch`; every patched model carries them as `model.reduction`."""

    backbone: Backbone
    method: Method
    vit: ViTInfo
    shorten_last_block: bool
    kernels: Kernels  # as passed to `patch`; the model's attribute `kernels` says what runs now
    restore: bool  # does `all_features` restore a feature for every patch?
    # Does the model that contains this ViT read its image tokens? None: there is no such model; the ViT's head decides.
    wrapper_reads_image_tokens: bool | None = None
    origin: object = field(default=None, compare=False)  # the recipe with these settings, or None

    def may_skip_image_tokens(self, model: PatchedModel) -> bool:
        """May the last block skip the image tokens? Only if nothing after it reads them, as `model` is set now."""
        head_reads_them = (
            self.backbone.head_reads_image_tokens(model)
            if self.wrapper_reads_image_tokens is None
            else self.wrapper_reads_image_tokens
        )
        return self.shorten_last_block and not (head_reads_them or model.reducer.reads_image_tokens)


class PatchedModel(nn.Module):
    """The attributes that `patch` adds to every model, for type checkers."""

    reduction: Reduction
    reducer: Reducer


Observer = Callable[[Tokens], None]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(
    model: PatchedModel,
    images: Tensor | Tokens,
    *,
    prefix_only: bool = False,
    layers: int | None = None,
    observe: Observer | None = None,
    track_owners: bool = False,
    restore: bool = False,
) -> Tokens:
    """Embed the images and run the blocks, reducing tokens on the way.

    Args:
        model: a patched model.
        images: [B, channels, height, width], or tokens that a model family's own forward has embedded.
        prefix_only: the caller reads prefix tokens only; the last block skips the others, with the same result.
        layers: number of blocks to run; None = `reduction.vit.depth`, all that the model uses.
        observe: called with the embedded tokens, then with the tokens after each layer.
        track_owners: keep `Tokens.owner`: which token stands for each patch.
        restore: keep what `restore_patches` needs to give every patch a feature of its own.
    """
    reduction = model.reduction
    backbone, reducer = reduction.backbone, model.reducer
    if backbone.grid(model) != reduction.vit.grid:
        raise InputError("the original model's input size was changed after patching; patch it again")
    tokens = images if isinstance(images, Tokens) else backbone.embed(model, images)
    owner = (tokens.cell if tokens.owner is None else tokens.owner) if track_owners or restore else None
    tokens = tokens.replace(ops=kernels.select_ops(reduction.kernels, tokens.x, tokens.prefix), owner=owner)
    tokens = reducer.start(begin_restoring(tokens) if restore else tokens)
    if observe is not None:
        observe(tokens)
    blocks = list(backbone.blocks(model))[: reduction.vit.depth if layers is None else layers]
    checkpointing = torch.is_grad_enabled() and backbone.uses_grad_checkpointing(model)
    call = _call_with_checkpoint if checkpointing else _call
    for layer, block in enumerate(blocks):
        last = prefix_only and layer == len(blocks) - 1
        output = call(attention_part, backbone, reducer, block, layer, tokens, last)
        # Assigning `tokens` frees the layer's input before the MLP, which needs the most memory.
        tokens = output.tokens
        tokens = call(mlp_part, backbone, reducer, block, layer, output, last)
        del output
        if observe is not None:
            observe(tokens)
    return tokens


def _call(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    return function(*args, **kwargs)


def _call_with_checkpoint(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call with gradient checkpointing: activations are computed again in the backward pass, to save memory."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]


def all_features(model: PatchedModel, images: Tensor) -> Tensor:
    """The normed features of the tokens that are left; with `reduction.restore`, of all patches of the grid."""
    reduction = model.reduction
    return reduction.backbone.norm(model)(restore_patches(run(model, images, restore=reduction.restore)))


class AttentionOutput(NamedTuple):
    """The tokens after a layer's attention, and whether its MLP has run as well."""

    tokens: Tokens
    block_done: bool  # has the model's own block run, which includes the MLP?


def attention_part(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, tokens: Tokens, prefix_only: bool
) -> AttentionOutput:
    """Run attention and then the reduction, which comes before the MLP.

    `prefix_only`: nothing reads the image tokens that this layer would output, so it computes none.
    """
    tokens = record_losses(reducer.drops_patches, layer, tokens, reducer.before(layer, tokens))
    adjustments = reducer.adjust(layer, tokens)
    if adjustments is None and not prefix_only:
        # The model's own block, with its fused attention and its hooks.
        return AttentionOutput(tokens.replace(x=backbone.run_block(block, layer, tokens)), block_done=True)
    attention = LayerAttention(
        *(backbone, block, layer, tokens, adjustments or PLAIN),
        prefix_only=prefix_only,
        drops_patches=reducer.drops_patches,
    )
    return AttentionOutput(attention.finish(reducer.add_and_reduce(attention)), block_done=False)


def mlp_part(
    backbone: Backbone, reducer: Reducer, block: nn.Module, layer: int, output: AttentionOutput, prefix_only: bool
) -> Tokens:
    """Run the MLP, unless the model's own block has, and then the method's `after`."""
    tokens = output.tokens
    if not output.block_done:
        tokens = tokens.add(backbone.mlp_branch(block, tokens.x, tokens.normed))
    if prefix_only:
        return tokens
    tokens = record_losses(reducer.drops_patches, layer, tokens, reducer.after(layer, tokens))
    return tokens if tokens.restore_residual is None else tokens.replace(num_layers_run=layer + 1)
