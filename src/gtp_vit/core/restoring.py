"""Restoring: a feature for every patch from the tokens that are left, for heads that read a full grid.

A patch gets the feature of the token that stands for it, its owner, and a part of what it had of its own. At each
reduction a patch loses d = its feature before - its owner's feature after. After layer L, counted from 0,

    restored = x[owner] + sum over reductions of (l + 1) / (L + 2) d,     l the layer of the reduction,

so what was lost early fades as the layers behind it add to what the owner has. Nothing is fitted. docs/dense.md has the
measurements: least squares find nearly these factors, and neither plain copies nor the whole of d are as near.

A patch that a method drops belongs to no token. It is given to the one nearest in the grid.

Shapes: B batch, M image tokens, M0 patches, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.core.tokens import Tokens
from gtp_vit.tensors import select_rows


def begin_restoring(tokens: Tokens) -> Tokens:
    """The embedded tokens, ready to be followed by `record_losses`."""
    return tokens.replace(restore_residual=tokens.x.new_zeros(()))


def record_losses(
    drops_patches: bool, layer: int, before: Tokens, after: Tokens, branch: Tensor | None = None
) -> Tokens:
    """`after` with what its patches have lost since `before`; as it is, unless this pass is to be restored.

    `branch` was added to the features in between; `drops_patches`: may a patch be left without a token?
    """
    if before.restore_residual is None or after.cell is before.cell:
        return after
    if after.cell.shape[1] > before.cell.shape[1]:  # the method has brought all tokens back itself
        return begin_restoring(after)
    assert before.owner is not None
    owner = assign_dropped_patches(after) if drops_patches else after.owner
    assert owner is not None
    x = before.x if branch is None else before.x + branch
    lost = select_rows(x[:, before.prefix :], before.owner) - select_rows(after.image, owner)
    return after.replace(owner=owner, restore_residual=before.restore_residual + (layer + 1) * lost)


def assign_dropped_patches(tokens: Tokens) -> Tensor:
    """`owner` with every patch that has none given to the nearest token in the grid, [B, M0]."""
    assert tokens.owner is not None
    rows, columns = tokens.grid
    places = torch.arange(rows * columns, device=tokens.x.device)
    down, right = places // columns, places % columns
    distance = (down[:, None] - down).square() + (right[:, None] - right).square()
    distance = F.pad(distance.float(), (0, 0, 0, 1), value=torch.inf)[tokens.cell]  # [B, M, M0]; infinite for no cell
    owner = tokens.owner
    if tokens.size is not None:  # padding, of size 0, stands for nothing
        padding = tokens.size == 0
        distance = distance.masked_fill(padding.unsqueeze(2), torch.inf)
        owner = owner.masked_fill(padding.gather(1, owner.clamp(min=0)), -1)
    return torch.where(owner < 0, distance.argmin(dim=1), owner)


def restore_patches(tokens: Tokens) -> Tensor:
    """The features of prefix tokens and all patches, [B, c + M0, C]; those that there are if they were not followed."""
    if tokens.restore_residual is None or tokens.restore_residual.ndim == 0:
        return tokens.x
    assert tokens.owner is not None
    image = select_rows(tokens.image, tokens.owner) + tokens.restore_residual / (tokens.num_layers_run + 1)
    return torch.cat([tokens.x[:, : tokens.prefix], image], dim=1)
