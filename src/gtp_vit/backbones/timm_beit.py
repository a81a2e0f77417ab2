"""timm's Beit: BEiT and BEiT v2, whose attention adds a bias to the logits, by how far two grid cells are apart.

Native kernels have no such bias, and a block of the model can only run while all tokens are there: afterwards our own
arithmetic runs in every layer.

Shapes: B batch, N tokens, Q queries, M0 patches, H heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.backbones.modules import class_unsupported_reason
from gtp_vit.backbones.timm_blocks import SupportedTypes, attention_dropout, blocks_unsupported_reason
from gtp_vit.backbones.timm_eva import ATTENTION, BLOCK, TimmEva, queries_keys_values
from gtp_vit.backbones.timm_vit import MODEL
from gtp_vit.core.attention import QKV, attend
from gtp_vit.core.backbone import Part
from gtp_vit.core.tokens import Tokens
from gtp_vit.tensors import with_prefix_rows

POOLS = {"", "avg", "token"}
BIAS_TENSORS = {"relative_position_bias_table", "relative_position_index"}


class BiasTable(NamedTuple):
    """The bias that the layers share, and the cells of all patches."""

    shared: Tensor | None  # [H, 1 + M0, 1 + M0]: added in every layer; None = nothing is
    cells: Tensor  # `Tokens.cell` of the embedded tokens: while it is that very tensor, all are there and in order


class TimmBeit(TimmEva):
    """Backbone of timm's Beit, whose blocks are otherwise those of Eva."""

    module, classes = "beit", ("Beit",)
    models = "BEiT, BEiT v2"

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import timm_beits

        return timm_beits(depth)

    def unsupported_reason(self, model: Any) -> str | None:
        beit = sys.modules["timm.models.beit"]
        kinds = SupportedTypes((beit.Block,), (beit.Attention,), BLOCK, ATTENTION | BIAS_TENSORS)
        around = class_unsupported_reason(model, beit.Beit) or self._model_unsupported_reason(
            model, {*MODEL, "rel_pos_bias"}, POOLS
        )
        return around or self._tensors_unsupported_reason(model) or blocks_unsupported_reason(model.blocks, kinds)

    def any_size(self, model: Any) -> bool:
        return False

    def embed(self, model: Any, images: Tensor) -> Tokens:
        x, grid = self.patches(model, images)
        x = torch.cat([model.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = model.pos_drop(x if model.pos_embed is None else x + model.pos_embed)
        shared = None if model.rel_pos_bias is None else model.rel_pos_bias()
        cell = self.cells(x, grid)
        return Tokens(x, cell, model.num_prefix_tokens, grid, position_table=BiasTable(shared, cell))

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        if tokens.cell is tokens.position_table.cells:
            return block(tokens.x, shared_rel_pos_bias=tokens.position_table.shared)
        out, _ = attend(self.project(block, layer, tokens, None), ops=tokens.ops)
        x = tokens.x + self.attention_branch(block, out)
        return x + self.mlp_branch(block, x, None)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        attn = block.attn
        q, k, v = queries_keys_values(attn, block.norm1(tokens.x), queries)
        return QKV(q, k, v, attn.scale, attention_dropout(attn), _bias(attn, tokens, queries))


def _bias(attn: Any, tokens: Tokens, queries: int | None) -> Tensor | None:
    """The bias of each pair of tokens, added to the logits, [B or 1, H, Q, N]."""
    own = None if attn.relative_position_bias_table is None else attn._get_rel_pos_bias()[0]
    shared, cells = tokens.position_table
    bias = own if shared is None else shared if own is None else own + shared  # [H, 1 + M0, 1 + M0]
    if bias is None:
        return None
    if tokens.cell is cells:
        return bias[None, :, :queries]
    # A token in no cell is at no distance from any other: its biases are 0, as a query and as a key.
    bias, places = F.pad(bias, (0, 1, 0, 1)), with_prefix_rows(tokens.cell, tokens.prefix)
    pairs = places[:, :queries, None] * bias.shape[2] + places[:, None]
    return bias.flatten(1).index_select(1, pairs.flatten()).unflatten(1, pairs.shape).transpose(0, 1)
