"""The attention of one layer, as a method sees it: computed when it is read.

Shapes: B batch, H heads, N tokens, M image tokens, Q queries, D head dimension, C channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from gtp_vit.core.attention import QKV, Adjustments, AttentionStats, Heads, attend, attention_map
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.restoring import record_losses
from gtp_vit.core.tokens import Tokens
from gtp_vit.kernels import NormParams


class LayerAttention:
    """A layer's attention, which lives as long as the layer runs.

    Statistics and output are one computation, so ask for statistics first. Whoever reads nothing calls `add`.
    """

    def __init__(
        self,
        backbone: Backbone,
        block: nn.Module,
        layer: int,
        tokens: Tokens,
        adjustments: Adjustments,
        *,
        prefix_only: bool,
        drops_patches: bool,
    ) -> None:
        self._backbone, self._block, self._drops_patches = backbone, block, drops_patches
        self.layer = layer
        self.tokens = tokens  # before the layer, or those that `replace_tokens` left
        self.adjustments = adjustments
        self.prefix_only = prefix_only  # in a shortened last block: image tokens get no output
        self._qkv: QKV | None = None
        self._output: Tensor | None = None
        self._branch: Tensor | None = None

    @property
    def qkv(self) -> QKV:
        """Queries, keys and values; queries of prefix tokens alone where no others are needed."""
        if self._qkv is None:
            # An edit has to see the whole map, since it changes what the prefix tokens see.
            short = self.prefix_only and self.adjustments.edit is None
            queries = self.tokens.prefix if short else None
            self._qkv = self._backbone.project(self._block, self.layer, self.tokens, queries)
        return self._qkv

    @property
    def keys(self) -> Tensor:
        """Keys of the image tokens, as methods compare them, [B, H, M, D]."""
        _, k, *_, metric = self.qkv
        return (k if metric is None else metric)[:, :, self.tokens.prefix :]

    @property
    def values(self) -> Tensor:
        """Values of the image tokens, [B, H, M, D]."""
        return self.qkv.v[:, :, self.tokens.prefix :]

    def statistics(self, *names: str, heads: Heads = "each", before_edit: bool = False) -> AttentionStats:
        """These fields of `AttentionStats`, of each head or aggregated over the heads, before or after an edit of the
        map."""
        assert self._output is None, "statistics come with the output: ask for all of them at once, and before `add`"
        prefix, adjustments, queries = self.tokens.prefix, self.adjustments, None
        if self.prefix_only:
            queries = prefix
            mask = adjustments.mask
            adjustments = Adjustments(
                adjustments.key_weights, adjustments.edit, None if mask is None else mask[:, :prefix]
            )
        self._output, stats = attend(
            self.qkv,
            adjustments,
            names,
            heads=heads,
            before_edit=before_edit,
            queries=queries,
            first=prefix,
            ops=self.tokens.ops,
        )
        return stats

    def branch(self, output: Tensor | None = None) -> Tensor:
        """The attention branch, ready to be added, from the output [B, Q, H D] or one that the method has computed."""
        if self._branch is None:
            if output is None and self._output is None:
                self.statistics()
            output = self._output if output is None else output
            assert output is not None
            self._branch = self._backbone.attention_branch(self._block, output)
        return self._branch

    def add(self, output: Tensor | None = None) -> Tokens:
        """The tokens after the residual connection: those that have an output."""
        tokens = self.tokens.prefix_only() if self.prefix_only else self.tokens
        return tokens.add(self.branch(output))

    @property
    def mlp_norm(self) -> NormParams:
        """The norm before the MLP, if an operator should compute it; see `Tokens.normed`."""
        return NormParams.of(self._backbone.mlp_norm(self._block) if self.tokens.ops.fuses_norm else None)

    # Another order: for methods that reduce before the output is computed.

    def map_only(self) -> Tensor:
        """The whole map [B, H, N, N] before any edit, from queries and keys alone."""
        projections = self._backbone.project(self._block, self.layer, self.tokens, None, "map")
        return attention_map(projections, self.adjustments)

    def values_only(self) -> Tensor:
        """The values of all tokens alone, [B, H, N, D]."""
        return self._backbone.project(self._block, self.layer, self.tokens, 0, "values").v

    def replace_tokens(self, tokens: Tokens, adjustments: Adjustments) -> None:
        """Go on with the tokens that are left, and with an attention of them."""
        self.tokens, self.adjustments = self._record_losses(tokens, None), adjustments
        self._qkv = None

    def finish(self, tokens: Tokens) -> Tokens:
        """The tokens after the layer's attention and reduction, patches followed; called by the loop."""
        return self._record_losses(tokens, self._branch)

    def _record_losses(self, after: Tokens, branch: Tensor | None) -> Tokens:
        return record_losses(self._drops_patches, self.layer, self.tokens, after, branch)
