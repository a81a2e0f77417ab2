"""Tokens: the one value that flows through a forward pass.

Everything that lives for one forward pass is a field here, so that nothing is ever stored on a module: threads,
gradient checkpointing, compile and export all see a pure function. What a method has to remember is `carry`.

Shapes: B batch, N tokens, c prefix tokens, M = N - c image tokens, C channels, K kept image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtp_vit.kernels import Ops
from gtp_vit.paper.propagation import summarise
from gtp_vit.tensors import select_rows

SAME: Any = ...  # a field that stays as it is, as None is a value of some


@dataclass(frozen=True)
class Tokens:
    """Features of the tokens that are left, and what each of them stands for."""

    x: Tensor  # [B, N, C]   prefix tokens first, then image tokens, in raster order unless the method says otherwise
    position: Tensor  # [B, M]      grid cell (row major) of each image token
    prefix: int  # class, distillation and register tokens: never reduced
    grid: tuple[int, int]  # rows and columns of the patch grid
    size: Tensor | None = None  # [B, N] float32: patches a token stands for; None = one each
    source: Tensor | None = None  # [B, M, M before]: what the last reduction made each token of; only while tracing
    carry: Any = None  # what the method remembers, e.g. GTP's graph
    ops: Ops = Ops.TORCH  # the operators of this forward pass

    @property
    def image(self) -> Tensor:
        """Features of the image tokens, [B, M, C]."""
        return self.x[:, self.prefix :]

    def but(
        self,
        *,
        x: Tensor = SAME,
        position: Tensor = SAME,
        size: Tensor | None = SAME,
        source: Tensor | None = SAME,
        carry: Any = SAME,
        ops: Ops = SAME,
    ) -> Tokens:
        """A copy with some fields changed; prefix and grid are the same for the whole pass.

        Written out, so that a wrong name is a TypeError; torch.compile cannot follow dataclasses.replace in torch 2.6.
        """
        return Tokens(
            x=self.x if x is SAME else x,
            position=self.position if position is SAME else position,
            prefix=self.prefix,
            grid=self.grid,
            size=self.size if size is SAME else size,
            source=self.source if source is SAME else source,
            carry=self.carry if carry is SAME else carry,
            ops=self.ops if ops is SAME else ops,
        )

    def add(self, branch: Tensor) -> Tokens:
        """The residual connection."""
        return self.but(x=self.x + branch)

    def keep(self, index: Tensor) -> Tokens:
        """Keep the prefix and the image tokens at `index` [B, K], with all that belongs to them."""
        prefix = torch.arange(self.prefix, device=index.device).expand(index.shape[0], -1)
        rows = torch.cat([prefix, index + self.prefix], dim=1)
        return self.but(
            x=select_rows(self.x, rows),
            position=self.position.gather(1, index),
            size=None if self.size is None else self.size.gather(1, rows),
            source=None if self.source is None else select_rows(self.source, index),
        )

    def merge(self, kept: Tensor, gone: Tensor, weights: Tensor, retain: Tensor | None = None) -> Tokens:
        """Each kept token becomes retain * itself + weights @ the tokens that go; sizes are left to the method.

        Args:
            kept: image tokens that stay, [B, K], in the order in which they are wanted.
            gone: image tokens that go, [B, P].
            weights: what each kept token takes of each of them, [B, K, P].
            retain: what it keeps of itself, [B, K]; None = all.
        """
        x, source = self.x, self.source
        return self.but(
            x=summarise(x, self.prefix, kept, gone, weights, 1.0, retain),
            position=self.position.gather(1, kept),
            source=None if source is None else summarise(source, 0, kept, gone, weights, 1.0, retain),
        )

    def prefix_only(self) -> Tokens:
        """Drop all image tokens, for heads that read none of them."""
        return self.but(
            x=self.x[:, : self.prefix],
            position=self.position[:, :0],
            size=None if self.size is None else self.size[:, : self.prefix],
        )
