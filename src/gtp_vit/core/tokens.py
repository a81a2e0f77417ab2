"""Tokens: the one value that flows through a forward pass.

All state of a forward pass is a field here and nothing is stored on a module, so threads, gradient checkpointing,
compile and export all see a pure function. State of a method is in `method_state`.

Shapes: B batch, N tokens, c prefix tokens, M = N - c image tokens, M0 patches, which are the cells of the grid,
C channels, K image tokens that stay, P image tokens that go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels import Ops
from gtp_vit.tensors import select_rows, weighted_merge, with_prefix_rows

_UNCHANGED: Any = ...  # leaves a field unchanged; None is a value of some fields


@dataclass(frozen=True)
class Tokens:
    """Features of the tokens that are left, and the patches that each stands for."""

    x: Tensor  # [B, N, C]   prefix tokens first, then image tokens, in raster order unless the method says otherwise
    cell: Tensor  # [B, M]      grid cell (row major) of each image token; M0 for a token in no cell
    prefix: int  # number of class, distillation and register tokens, which are never removed
    grid: tuple[int, int]  # rows and columns of the patch grid
    token_id: Tensor | None = None  # [B, M]: see `token_ids`; None = `cell`, until a method makes tokens in no cell
    size: Tensor | None = None  # [B, M] float32: patches each token stands for, as the method counts them; None = 1
    owner: Tensor | None = None  # [B, M0]: index of each patch's token, -1 = none; None without `track_owners`
    position_table: Any = None  # the backbone's values per cell, e.g. rotary positions; row M0 is for tokens in no cell
    method_state: Any = None  # the method's own state, e.g. GTP's graph
    normed: Tensor | None = None  # x after the norm before the MLP, if an operator computed it; a new x clears it
    restore_residual: Tensor | None = None  # [B, M0, C]: what patches lost (restoring.py); a scalar: nothing yet
    num_layers_run: int = 0  # for `restore_residual`, which is scaled by it; 0 without one
    ops: Ops = Ops.TORCH  # the operators of this forward pass

    @property
    def image(self) -> Tensor:
        """Features of the image tokens, [B, M, C]."""
        return self.x[:, self.prefix :]

    @property
    def token_ids(self) -> Tensor:
        """The identity of each image token, [B, M]: the cell of its patch, or an unused number from M0 on."""
        return self.cell if self.token_id is None else self.token_id

    @property
    def sizes(self) -> Tensor:
        """The number of patches each image token stands for, [B, M]."""
        return torch.ones(self.cell.shape, device=self.x.device) if self.size is None else self.size

    @property
    def key_sizes(self) -> Tensor | None:
        """The size of each token as a key of attention, [B, N], 1 for prefix tokens; None = all 1."""
        return None if self.size is None else F.pad(self.size, (self.prefix, 0), value=1.0)

    def replace(
        self,
        *,
        x: Tensor = _UNCHANGED,
        cell: Tensor = _UNCHANGED,
        token_id: Tensor | None = _UNCHANGED,
        size: Tensor | None = _UNCHANGED,
        owner: Tensor | None = _UNCHANGED,
        position_table: Any = _UNCHANGED,
        method_state: Any = _UNCHANGED,
        normed: Tensor | None = _UNCHANGED,
        restore_residual: Tensor | None = _UNCHANGED,
        num_layers_run: int = _UNCHANGED,
        ops: Ops = _UNCHANGED,
    ) -> Tokens:
        """A copy with some fields changed; prefix and grid are the same for the whole pass.

        Written by hand, so that a wrong name is a TypeError, and because torch.compile of torch 2.6 cannot trace
        dataclasses.replace.
        """
        return Tokens(
            x=self.x if x is _UNCHANGED else x,
            cell=self.cell if cell is _UNCHANGED else cell,
            prefix=self.prefix,
            grid=self.grid,
            token_id=self.token_id if token_id is _UNCHANGED else token_id,
            size=self.size if size is _UNCHANGED else size,
            owner=self.owner if owner is _UNCHANGED else owner,
            position_table=self.position_table if position_table is _UNCHANGED else position_table,
            method_state=self.method_state if method_state is _UNCHANGED else method_state,
            normed=(self.normed if x is _UNCHANGED else None) if normed is _UNCHANGED else normed,
            restore_residual=self.restore_residual if restore_residual is _UNCHANGED else restore_residual,
            num_layers_run=self.num_layers_run if num_layers_run is _UNCHANGED else num_layers_run,
            ops=self.ops if ops is _UNCHANGED else ops,
        )

    def add(self, branch: Tensor) -> Tokens:
        """Add the output of a branch to the features: the residual connection."""
        return self.replace(x=self.x + branch)

    def keep(self, index: Tensor) -> Tokens:
        """The prefix tokens and the image tokens at `index` [B, K], in that order, with all their fields."""
        return self.replace(
            x=select_rows(self.x, with_prefix_rows(index, self.prefix)),
            cell=self.cell.gather(1, index),
            token_id=None if self.token_id is None else self.token_id.gather(1, index),
            size=None if self.size is None else self.size.gather(1, index),
            owner=self.owners_after(index),
        )

    def merge(self, keep: Tensor, drop: Tensor, weights: Tensor, size: Tensor, retain: Tensor | None = None) -> Tokens:
        """Replace each token that stays by retain * itself + weights @ the tokens that go.

        Args:
            keep: image tokens that stay, [B, K], in their new order.
            drop: image tokens that go, [B, P].
            weights: weight of each token that goes in each token that stays, [B, K, P].
            size: sizes of the tokens that stay, after the merge, [B, K].
            retain: weight of each token that stays in its own result, [B, K]; None = 1.
        """
        return self.replace(
            x=weighted_merge(self.x, self.prefix, keep, drop, weights, retain),
            cell=self.cell.gather(1, keep),
            token_id=None if self.token_id is None else self.token_id.gather(1, keep),
            size=size,
            owner=None if self.owner is None else self.owners_after(keep, drop, receivers(weights)),
        )

    def fuse(self, keep: Tensor, drop: Tensor, fused: Tensor, token_id: int) -> Tokens:
        """Keep the image tokens `keep` and append `fused` [B, 1, C], a token in no cell, in place of those at `drop`.

        `token_id` identifies the new token: an unused number from M0 on.
        """
        remaining, no_cell = self.keep(keep), torch.full_like(keep[:, :1], self.grid[0] * self.grid[1])
        owner = None if self.owner is None else self.owners_after(keep, drop, torch.full_like(drop, keep.shape[1]))
        size = self.sizes
        return remaining.replace(
            x=torch.cat([remaining.x, fused], dim=1),
            cell=torch.cat([remaining.cell, no_cell], dim=1),
            token_id=torch.cat([remaining.token_ids, torch.full_like(no_cell, token_id)], dim=1),
            size=torch.cat([size.gather(1, keep), size.gather(1, drop).sum(dim=1, keepdim=True)], dim=1),
            owner=owner,
        )

    def owners_after(self, keep: Tensor, drop: Tensor | None = None, target: Tensor | None = None) -> Tensor | None:
        """`owner` when only the image tokens `keep` [B, K] are left; None if owners are not tracked.

        Args:
            keep: image tokens that stay, in their new order.
            drop: image tokens that are merged into these, [B, P]; None = none are.
            target: for each token of `drop`, the index in `keep` of the token it is merged into, or -1.
        """
        if self.owner is None:
            return None
        new_index = torch.full(self.cell.shape, -1, device=keep.device)
        new_index = new_index.scatter(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
        if drop is not None and target is not None:
            new_index = new_index.scatter(1, drop, target)
        return new_index.gather(1, self.owner.clamp(min=0)).masked_fill(self.owner < 0, -1)

    def prefix_only(self) -> Tokens:
        """Drop all image tokens, for heads that read none of them."""
        no_cells = self.cell[:, :0]
        return self.replace(
            x=self.x[:, : self.prefix], cell=no_cells, token_id=None, size=None, owner=self.owners_after(no_cells)
        )


def receivers(weights: Tensor) -> Tensor:
    """For each token that goes, the index of the one with the largest of `weights` [B, K, P] for it, or -1: [B, P]."""
    largest, index = weights.max(dim=1)
    return index.masked_fill(largest <= 0, -1)
