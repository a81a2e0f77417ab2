"""macs: how many multiply-accumulates a forward pass takes, from what its parts cost and its schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gtp_vit.core.costs import TORCH_CONVENTION, Convention, Macs
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.loop import run
from gtp_vit.core.reducer import Method
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import LayerTokens
from gtp_vit.errors import SettingError, check_name
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import host_of, is_patched, patch, tower_of
from gtp_vit.profiling.torchprofile import TORCHPROFILE

ConventionName = Literal["torch", "torchprofile"]
CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in (TORCH_CONVENTION, TORCHPROFILE)}


def macs(
    model: nn.Module,
    method: Method | None = None,
    *,
    convention: ConventionName = "torch",
    include_overhead: bool = True,
    shorten_last_block: bool | None = None,
    grid: tuple[int, int] | None = None,
    images: Tensor | None = None,
) -> Macs:
    """Count the MACs of a forward pass of a ViT, head included, for one image; of a model around one, those of its ViT.

    Args:
        model: a patched or plain model.
        method: count as if the model were patched with this method; None = as the model is.
        convention: "torch" counts linear layers, convolutions and the two products of attention, which is what torch's
            FlopCounterMode sees. "torchprofile" also counts norms and scales, and takes the method's own work as the
            released code does it: this is how the paper counts.
        include_overhead: count the method's own work too.
        shorten_last_block: does the last block compute prefix tokens only? None = as the model is patched; for a plain
            model no.
        grid: rows and columns of the patch grid; None = the model's own.
        images: count for these: their size and, if a method keeps a different number of tokens in each, the mean.

    Returns:
        The MACs of the model's parts: `total`, `overhead` of the method, and others.

    Raises:
        GTPError: the model is not supported, or the method keeps a different number of tokens in each image and there
            are no `images`.

    >>> import timm
    >>> print(macs(timm.create_model("deit_small_patch16_224")))
    4.599 GMACs
    """
    check_name("convention", convention, CONVENTIONS)
    if method is not None and not isinstance(method, Method):
        raise SettingError(f"method is {method!r}; give settings, e.g. GTP(propagate=8)")
    whole = isinstance(grid, (tuple, list)) and len(grid) == 2 and all(isinstance(side, int) for side in grid)
    if grid is not None and not (whole and min(grid) > 0):
        raise SettingError(f"grid is {grid!r}; give rows and columns of the patch grid, e.g. (14, 14)")
    if is_patched(model):
        reduction = model.reduction
        method = reduction.method if method is None else method
        shorten_last_block = reduction.shorten_last_block if shorten_last_block is None else shorten_last_block
    host = host_of(model)
    if images is not None and grid is None:
        with torch.no_grad(), eval_mode(host.tower):
            grid = host.backbone.embed(host.tower, images[:1]).grid
    costs = host.costs(grid, CONVENTIONS[convention])
    reducer = (method or Identity()).build(host.vit)
    if images is not None and reducer.adaptive:
        assert method is not None
        every = layer_tokens_of_images(patch(host.model, method), images)
    else:
        every = [reducer.steps(costs.grid)]
    return _mean(
        [
            costs.macs(reducer, steps, shorten_last_block=bool(shorten_last_block), include_overhead=include_overhead)
            for steps in every
        ]
    )


@dataclass(frozen=True)
class LayerCosts:
    """MACs of a model and of the same model reduced, and how many tokens go into each layer of the latter."""

    unreduced: Macs
    reduced: Macs
    patches: int  # of the image
    prefix: int  # class token and registers
    tokens: tuple[float, ...]  # into each layer, prefix tokens included; the mean over images where they differ


def layer_costs(
    model: nn.Module, fast: nn.Module, *, convention: ConventionName = "torch", images: Tensor | None = None
) -> LayerCosts:
    """The cost of each layer of a model, and of the same model patched; with `images` as in `macs`."""
    tower = tower_of(fast)
    vit = tower.reduction.vit
    by_image = images is not None and tower.reducer.adaptive
    every = [tower.reducer.steps(vit.grid)] if images is None or not by_image else layer_tokens_of_images(fast, images)
    tokens = [vit.prefix + sum(step.keys for step in layer) / len(every) for layer in zip(*every, strict=True)]
    reduced = macs(fast, convention=convention, images=images)
    return LayerCosts(macs(model, convention=convention), reduced, vit.image_tokens, vit.prefix, tuple(tokens))


def layer_tokens_of_images(model: nn.Module, images: Tensor) -> list[tuple[LayerTokens, ...]]:
    """For each image the tokens of each layer, for models whose number of tokens depends on the image."""
    observed: list[Tokens] = []
    with torch.no_grad(), eval_mode(model):
        run(tower_of(model), images, observe=observed.append)
    counts = [(tokens.sizes > 0).sum(dim=1).tolist() for tokens in observed]
    layers = [
        [LayerTokens(b, a, a, a) for b, a in zip(before, after, strict=True)]
        for before, after in itertools.pairwise(counts)
    ]
    return list(zip(*layers, strict=True))


def _mean(counts: list[Macs]) -> Macs:
    def mean(values: Iterable[int]) -> int:
        return round(sum(values) / len(counts))

    layers = zip(*(count.layers for count in counts), strict=True)
    return Macs(
        embed=mean(count.embed for count in counts),
        layers=tuple(mean(layer) for layer in layers),
        head=mean(count.head for count in counts),
        overhead=mean(count.overhead for count in counts),
    )
