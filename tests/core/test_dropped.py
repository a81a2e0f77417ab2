"""Dropped equals masked: tokens that our loop drops, against the model's own blocks on all tokens with those hidden.

Wrong positions mostly do not raise: this is the test that sees them.
"""

import functools

import pytest
import torch
from torch import nn

from gtp_vit import GTP, patch
from gtp_vit.backbones import BACKBONES
from gtp_vit.core.loop import run
from gtp_vit.patching import tower_of
from gtp_vit.testing import families

DROPPING = GTP(propagate=(20, 0, 9, 0), graph="none", proportional_attention=False)
# Name of a backbone -> its own block on all tokens, of which those that are not `visible` [B, N] are hidden.
MASKED = {}


def masked(name):
    return lambda function: MASKED.setdefault(name, function)


@masked("timm_vit")
def timm_vit(tower, block, layer, tokens, visible):
    return block(tokens.x, attn_mask=visible[:, None, None])


@masked("timm_eva")
def timm_eva(tower, block, layer, tokens, visible):
    """With the positions that timm computes itself, of all tokens."""
    rope = tower.rope
    if rope is not None:
        rope = rope.get_embed(tokens.grid) if tower.dynamic_img_size else rope.get_embed()
        rope = rope[layer] if tower.rope_mixed else rope
    return block(tokens.x, rope=rope, attn_mask=visible[:, None, None])


@masked("timm_qwen")
def timm_qwen(tower, block, layer, tokens, visible):
    return block(tokens.x, rope=tower.rope.get_embed(shape=tokens.grid), attn_mask=visible[:, None, None])


@masked("timm_beit")
def timm_beit(tower, block, layer, tokens, visible):
    """Its block takes no mask, but adds whatever it gets as the bias that all layers share."""
    shared = torch.zeros(1) if tower.rel_pos_bias is None else tower.rel_pos_bias()
    hidden = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return block(tokens.x, shared_rel_pos_bias=shared + hidden[:, None, None])


@masked("lvvit")
def lvvit(tower, block, layer, tokens, visible):
    attn, x = block.attn, tokens.x
    q, k, v = attn.qkv(block.norm1(x)).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    mask = visible[:, None, None]
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attn.scale)
    x = x + attn.proj(out.transpose(1, 2).flatten(2)) / block.skip_lam
    return x + block.mlp(block.norm2(x)) / block.skip_lam


@masked("hf_vit")
def hf_vit(tower, block, layer, tokens, visible):
    more = {}
    if tokens.position_table is not None:
        more = {"position_embeddings": tower.rope_embeddings(torch.zeros(1, 3, *(8 * side for side in tokens.grid)))}
    hidden = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[:, None, None]
    return block(tokens.x, attention_mask=hidden.expand(-1, -1, visible.shape[1], -1), **more)


@masked("torchvision_vit")
def torchvision_vit(tower, block, layer, tokens, visible):
    attention = block.self_attention.forward
    block.self_attention.forward = functools.partial(attention, key_padding_mask=~visible)
    try:
        return block(tokens.x)
    finally:
        del block.self_attention.forward


@masked("open_clip_vit")
def open_clip_vit(tower, block, layer, tokens, visible):
    count, heads = tokens.x.shape[1], block.attn.num_heads
    hidden = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return block(tokens.x, attn_mask=hidden[:, None, None].expand(-1, heads, count, -1).flatten(0, 1))


def test_every_backbone_is_here():
    assert set(MASKED) == set(BACKBONES) - {"hf_packed"}  # which takes no images: tests/families/test_packed.py


@pytest.mark.parametrize(("backbone", "family"), families.ALL)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_dropped_equals_masked(backbone, family, kernels):
    model, images = families.make(family), families.images(family)
    tower = tower_of(patch(model, DROPPING, kernels=kernels))
    seen = []
    with torch.no_grad():
        run(tower, images, observe=seen.append)
        everything = seen[0]
        prefix, x = everything.prefix, everything.x
        visible = torch.ones(x.shape[:2], dtype=torch.bool)
        for layer, block in enumerate(tower.reduction.backbone.blocks(tower)):
            x = MASKED[backbone](tower, block, layer, everything.replace(x=x), visible)
            left = seen[layer + 1].cell + prefix
            visible = torch.zeros_like(visible).scatter(1, left, True)
            visible[:, :prefix] = True
            rows = torch.cat([torch.arange(prefix).expand(len(left), -1), left], dim=1)
            found = x.gather(1, rows.unsqueeze(2).expand(-1, -1, x.shape[2]))
            # Of the largest value, as these blocks have no trained scales: features grow to 20 and more.
            assert float((seen[layer + 1].x - found).abs().max()) <= 1e-5 * max(1.0, float(found.abs().max()))
    assert [tokens.cell.shape[1] for tokens in seen] == [
        everything.cell.shape[1] - gone for gone in (0, 20, 20, 29, 29)
    ]
