"""trace: which patches stay after each layer, where the removed ones went, and what was lost.

It is an ordinary forward pass with the same kernels, observed between layers. The last layer is not shortened, so its
tokens can be seen as well.

Shapes: B batch, K kept tokens, P removed ones, M0 patches of the image.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.backbones.host import find_inside_wrapper
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import SettingError
from gtp_vit.patching import is_patched, tower_of


@dataclass(frozen=True)
class LayerTrace:
    """The trace of one layer. Patches are named by their grid cell in row-major order.

    A token that is in no cell, such as EViT's fused one, has a number after the last cell's.
    """

    kept: Tensor  # [B, K]       patches still there after this layer
    removed: Tensor  # [B, P]       patches that this layer removed
    sizes: Tensor | None  # [B, K]       patches each kept token stands for, as its method counts; None = one each
    owners: Tensor  # [B, M0]      for each patch the index in `kept` of the token that stands for it; -1 = lost

    @property
    def lost(self) -> Tensor:
        """Share of this layer's removed tokens that no kept token took, [B]."""
        if self.removed.shape[1] == 0:
            return torch.zeros(len(self.removed), device=self.removed.device)
        # Tokens in no cell, such as fused ones, are never lost.
        taken = F.pad(self.owners, (0, 1)).gather(1, self.removed.clamp(max=self.owners.shape[1])) >= 0
        return 1 - taken.float().mean(dim=1)


@dataclass(frozen=True)
class Trace:
    """The trace of a forward pass: where the patches of each image went."""

    grid: tuple[int, int]
    layers: tuple[LayerTrace, ...]

    def lost(self) -> Tensor:
        """Share of all removed tokens that no kept token took, [B]."""
        counts = [layer.removed.shape[1] for layer in self.layers]
        lost = torch.stack([layer.lost * count for layer, count in zip(self.layers, counts, strict=True)])
        return lost.sum(dim=0) / max(sum(counts), 1)


@torch.no_grad()
def trace(model: nn.Module, images: Tensor) -> Trace:
    """Follow the tokens of `images` through a patched model in eval mode; no layer is shortened.

    Args:
        model: a patched model.
        images: [B, channels, height, width].

    Returns:
        The grid of patches, and for each layer which patches are left, which it removed, and the tokens they went to.

    Raises:
        GTPError: the model is not patched, or keeps a different number of tokens in each of several images.

    >>> import timm, torch, gtp_vit
    >>> fast = gtp_vit.patch(timm.create_model("test_vit").eval(), gtp_vit.GTP(propagate=8))
    >>> found = trace(fast, torch.zeros(1, 3, 160, 160))
    >>> [layer.kept.shape[1] for layer in found.layers]
    [92, 84, 76, 68, 60, 52]
    """
    if not is_patched(model):
        inside = find_inside_wrapper(model)
        if inside is not None:
            raise SettingError(f"trace needs the model itself, not a {type(model).__name__} around it; give {inside}")
        raise SettingError(f"trace needs a patched model, and this is a plain {type(model).__name__}; patch it first")
    observed: list[Tokens] = []
    with eval_mode(model):
        run(tower_of(model), images, observe=observed.append, track_owners=True)
    if any(tokens.size is not None and bool((tokens.size == 0).any()) for tokens in observed):
        raise SettingError("this method keeps a different number of tokens in each image; trace the images one by one")
    return Trace(observed[0].grid, tuple(_layer(before, after) for before, after in itertools.pairwise(observed)))


def _layer(before: Tokens, after: Tokens) -> LayerTrace:
    assert after.owner is not None
    batch = len(before.token_ids)
    gone = ~(before.token_ids.unsqueeze(2) == after.token_ids.unsqueeze(1)).any(dim=2)
    removed = int(gone.sum()) // max(batch, 1)  # the same for every image of a batch
    index = gone.nonzero()[:, 1].view(batch, removed)
    return LayerTrace(
        kept=after.token_ids, removed=before.token_ids.gather(1, index), sizes=after.size, owners=after.owner
    )
