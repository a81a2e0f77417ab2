"""Tokens: the one value that flows through a forward pass.

All state of a forward pass is a field here and nothing is stored on a module, so threads, gradient checkpointing,
compile and export all see a pure function. State of a method is in `carry`.

Shapes: B batch, N tokens, c prefix tokens, M = N - c image tokens, M0 patches, C channels, K kept image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_vit.kernels import Ops
from gtp_vit.tensors import behind_prefix, select_rows, weighted_merge

SAME: Any = ...  # leaves a field unchanged; None is a value of some fields


@dataclass(frozen=True)
class Tokens:
    """Features of the remaining tokens, and which patches each stands for."""

    x: Tensor  # [B, N, C]   prefix tokens first, then image tokens, in raster order unless the method says otherwise
    cell: Tensor  # [B, M]      grid cell (row major) of each image token; M0 = in no cell
    prefix: int  # class, distillation and register tokens: never reduced
    grid: tuple[int, int]  # rows and columns of the patch grid
    name: Tensor | None = None  # [B, M]: its identity, once a method has made tokens that are in no cell
    size: Tensor | None = None  # [B, M] float32: patches it stands for, as the method counts them; None = one each
    owner: Tensor | None = None  # [B, M0]: index of the token that stands for each patch, -1 = lost; with follow=True
    table: Any = None  # what a backbone looks up by cell, e.g. rotary positions; row M0 is for tokens in no cell
    carry: Any = None  # the method's own state, e.g. GTP's graph
    normed: Tensor | None = None  # x after the norm before the MLP, where an operator has computed it; until x changes
    detail: Tensor | None = None  # what patches had of their own, for restoring.py; a scalar: nothing has been removed
    layers: int = 0  # how many have run, while there is `detail`
    ops: Ops = Ops.TORCH  # the operators of this forward pass

    @property
    def image(self) -> Tensor:
        """Features of the image tokens, [B, M, C]."""
        return self.x[:, self.prefix :]

    @property
    def names(self) -> Tensor:
        """The identity of each image token, [B, M]: the cell of its patch, or an unused number from M0 on."""
        return self.cell if self.name is None else self.name

    @property
    def sizes(self) -> Tensor:
        """How many patches each image token stands for, [B, M]."""
        return torch.ones(self.cell.shape, device=self.x.device) if self.size is None else self.size

    @property
    def key_sizes(self) -> Tensor | None:
        """How often each token counts as a key, [B, N], prefix tokens once; None = all of them once."""
        return None if self.size is None else F.pad(self.size, (self.prefix, 0), value=1.0)

    def but(
        self,
        *,
        x: Tensor = SAME,
        cell: Tensor = SAME,
        name: Tensor | None = SAME,
        size: Tensor | None = SAME,
        owner: Tensor | None = SAME,
        table: Any = SAME,
        carry: Any = SAME,
        normed: Tensor | None = SAME,
        detail: Tensor | None = SAME,
        layers: int = SAME,
        ops: Ops = SAME,
    ) -> Tokens:
        """A copy with some fields changed; prefix and grid are the same for the whole pass.

        Written out, so that a wrong name is a TypeError; torch.compile cannot trace dataclasses.replace in torch 2.6.
        """
        return Tokens(
            x=self.x if x is SAME else x,
            cell=self.cell if cell is SAME else cell,
            prefix=self.prefix,
            grid=self.grid,
            name=self.name if name is SAME else name,
            size=self.size if size is SAME else size,
            owner=self.owner if owner is SAME else owner,
            table=self.table if table is SAME else table,
            carry=self.carry if carry is SAME else carry,
            normed=(self.normed if x is SAME else None) if normed is SAME else normed,
            detail=self.detail if detail is SAME else detail,
            layers=self.layers if layers is SAME else layers,
            ops=self.ops if ops is SAME else ops,
        )

    def add(self, branch: Tensor) -> Tokens:
        """The residual connection."""
        return self.but(x=self.x + branch)

    def keep(self, index: Tensor) -> Tokens:
        """Keep the prefix and the image tokens at `index` [B, K], and their fields."""
        return self.but(
            x=select_rows(self.x, behind_prefix(index, self.prefix)),
            cell=self.cell.gather(1, index),
            name=None if self.name is None else self.name.gather(1, index),
            size=None if self.size is None else self.size.gather(1, index),
            owner=self.owners(index),
        )

    def merge(self, kept: Tensor, gone: Tensor, weights: Tensor, size: Tensor, retain: Tensor | None = None) -> Tokens:
        """Each kept token becomes retain * itself + weights @ the tokens that go.

        Args:
            kept: image tokens that stay, [B, K], in their new order.
            gone: image tokens that go, [B, P].
            weights: what each kept token takes of each of them, [B, K, P].
            size: of the kept tokens afterwards, [B, K].
            retain: what it keeps of itself, [B, K]; None = all.
        """
        return self.but(
            x=weighted_merge(self.x, self.prefix, kept, gone, weights, retain),
            cell=self.cell.gather(1, kept),
            name=None if self.name is None else self.name.gather(1, kept),
            size=size,
            owner=None if self.owner is None else self.owners(kept, gone, receivers(weights)),
        )

    def fuse(self, kept: Tensor, gone: Tensor, fused: Tensor, number: int) -> Tokens:
        """Keep the image tokens `kept` and append `fused` [B, 1, C], a token in no cell, for those that go.

        `number` is the new token's name: an unused number from M0 on.
        """
        rest, nowhere = self.keep(kept), torch.full_like(kept[:, :1], self.grid[0] * self.grid[1])
        owner = None if self.owner is None else self.owners(kept, gone, torch.full_like(gone, kept.shape[1]))
        size = self.sizes
        return rest.but(
            x=torch.cat([rest.x, fused], dim=1),
            cell=torch.cat([rest.cell, nowhere], dim=1),
            name=torch.cat([rest.names, torch.full_like(nowhere, number)], dim=1),
            size=torch.cat([size.gather(1, kept), size.gather(1, gone).sum(dim=1, keepdim=True)], dim=1),
            owner=owner,
        )

    def owners(self, kept: Tensor, gone: Tensor | None = None, target: Tensor | None = None) -> Tensor | None:
        """`owner` after only the image tokens `kept` [B, K] are left; None if patches are not followed.

        Args:
            kept: in their new order.
            gone: tokens that are merged into kept ones, [B, P].
            target: for each of these, the index in `kept` of the token it is merged into, or -1.
        """
        if self.owner is None:
            return None
        place = torch.full(self.cell.shape, -1, device=kept.device)
        place = place.scatter(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
        if gone is not None and target is not None:
            place = place.scatter(1, gone, target)
        return place.gather(1, self.owner.clamp(min=0)).masked_fill(self.owner < 0, -1)

    def prefix_only(self) -> Tokens:
        """Drop all image tokens, for heads that read none of them."""
        none = self.cell[:, :0]
        return self.but(x=self.x[:, : self.prefix], cell=none, name=None, size=None, owner=self.owners(none))


def receivers(weights: Tensor) -> Tensor:
    """For each removed token the index of the kept one that takes most of it, [B, P], or -1; weights [B, K, P]."""
    most, place = weights.max(dim=1)
    return place.masked_fill(most <= 0, -1)
