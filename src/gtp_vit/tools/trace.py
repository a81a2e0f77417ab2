"""trace: which patches stay after each layer, where the removed ones went, and what was lost.

The forward pass itself is the ordinary one, by the same kernels: a trace only looks at the tokens between layers, and
carries along what each is made of. The last layer is not shortened, so that its tokens can be seen as well.

Shapes: B batch, M image tokens before a layer, K kept, P removed, M0 patches of the image.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit import backbones
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import BadSetting
from gtp_vit.patch import is_patched
from gtp_vit.tensors import full_precision
from gtp_vit.tools.eval_mode import eval_mode


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did. Patches are named by their grid cell in row-major order.

    A token that stands for others and no cell of its own, such as EViT's fused one, has a number behind the last cell.
    """

    kept: Tensor  # [B, K]       patches still there after this layer
    removed: Tensor  # [B, P]       patches that this layer removed
    size: Tensor | None  # [B, K]       sizes of the kept tokens; None = one each
    source: Tensor  # [B, K, M]    each kept token as a weighted sum of the tokens before
    received: Tensor  # [B, K, P]    how much of each removed token each kept token received

    @property
    def lost(self) -> Tensor:
        """Share of this layer's removed tokens that no kept token received, [B]."""
        if self.removed.shape[1] == 0:
            return self.received.new_zeros(self.received.shape[0])
        return (self.received.abs().amax(dim=1) == 0).float().mean(dim=1)


@dataclass(frozen=True)
class Trace:
    """What became of the patches of each image."""

    grid: tuple[int, int]
    layers: tuple[LayerTrace, ...]

    def membership(self, layer: int) -> Tensor:
        """How much of each patch of the image is in each token after `layer`, [B, K, M0]."""
        depth = len(self.layers)
        if not -depth <= layer < depth:
            raise BadSetting(f"layer is {layer}; the trace has layers 0 to {depth - 1}")
        share = self.layers[0].source
        for step in self.layers[1 : layer % depth + 1]:
            with full_precision(share):  # whoever asks may be under autocast
                share = step.source @ share
            # A token that waited elsewhere while the layer began, as in Evo-ViT, comes back as what it was.
            back = (step.source == 0).all(dim=2, keepdim=True)
            share = share + back * F.one_hot(step.kept.clamp(max=share.shape[2] - 1), share.shape[2])
        return share

    def lost(self) -> Tensor:
        """Share of all removed tokens that no kept token received, [B]."""
        counts = [layer.removed.shape[1] for layer in self.layers]
        lost = torch.stack([layer.lost * count for layer, count in zip(self.layers, counts, strict=True)])
        return lost.sum(dim=0) / max(sum(counts), 1)


@torch.no_grad()
def trace(model: nn.Module, images: Tensor) -> Trace:
    """Follow the tokens of `images` through a patched model in eval mode. No layer is shortened for it.

    >>> import timm, torch, gtp_vit
    >>> fast = gtp_vit.patch(timm.create_model("test_vit").eval(), gtp_vit.GTP(propagate=8))
    >>> found = trace(fast, torch.zeros(1, 3, 160, 160))
    >>> [layer.kept.shape[1] for layer in found.layers]
    [92, 84, 76, 68, 60, 52]
    """
    if not is_patched(model):
        inside = backbones.wrapped(model)
        if inside is not None:
            raise BadSetting(f"trace needs the model itself, not a {type(model).__name__} around it; give {inside}")
        raise BadSetting(f"trace needs a patched model, and this is a plain {type(model).__name__}; patch it first")
    seen: list[Tokens] = []
    with eval_mode(model):
        run(model, images, observe=seen.append, follow=True)
    if any(tokens.size is not None and bool((tokens.size == 0).any()) for tokens in seen):
        raise BadSetting("this method keeps another number of tokens in each image; trace the images one by one")
    return Trace(seen[0].grid, tuple(_layer(before, after) for before, after in itertools.pairwise(seen)))


def _layer(before: Tokens, after: Tokens) -> LayerTrace:
    assert after.source is not None
    batch = before.position.shape[0]
    gone = ~(before.position.unsqueeze(2) == after.position.unsqueeze(1)).any(dim=2)
    removed = int(gone.sum()) // max(batch, 1)  # the same for every image of a batch
    index = gone.nonzero()[:, 1].view(batch, removed)
    return LayerTrace(
        kept=after.position,
        removed=before.position.gather(1, index),
        size=None if after.size is None else after.size[:, after.prefix :],
        source=after.source,
        received=after.source.gather(2, index.unsqueeze(1).expand(-1, after.source.shape[1], -1)),
    )
