"""Hosts: models around a ViT, and what travels with the tokens through a host's own blocks."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gtp_vit import (
    GTP,
    EViT,
    GTPError,
    GTPPlus,
    Identity,
    SearchConfig,
    Target,
    ToMe,
    backbones,
    finetune,
    is_patched,
    macs,
    patch,
    trace,
    tune,
    unpatch,
)
from gtp_vit.backbones import small_models, wrappers
from gtp_vit.backbones.timm_vit import TimmViT
from gtp_vit.core.attention import QKV
from gtp_vit.core.loop import run
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.errors import UnsupportedModelError
from gtp_vit.patching import host_of
from gtp_vit.testing import families


class Vision(nn.Module):
    """Something between a root and its ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = families.make("vit")
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images):
        return self.scale * self.trunk(images)


class Root(nn.Module):
    """As CLIP has it: a vision part at a path, and other parts that have nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Vision()
        self.text = nn.Linear(3, 3)

    def forward(self, images):
        return self.visual(images) + 1

    def encode_image(self, images):
        return self.visual.trunk.forward_features(images)


@pytest.fixture
def root(monkeypatch):
    monkeypatch.setitem(wrappers.WRAPPERS, f"{__name__}.Root", wrappers.Wrapper("visual.trunk"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Root().eval()


def test_a_model_around_a_vit_is_patched_along_the_path(root):
    images = families.images("vit")
    before = {name: id(module) for name, module in root.named_modules()}
    fast = patch(root, GTP(propagate=5))
    assert type(fast).__name__ == "Root"
    assert isinstance(fast, Root)
    assert is_patched(fast)
    assert not is_patched(root)
    assert {name: id(module) for name, module in root.named_modules()} == before  # the original is untouched
    assert fast.text is root.text
    assert fast.visual is not root.visual
    assert fast.visual.trunk.blocks is root.visual.trunk.blocks
    alone = patch(root.visual.trunk, GTP(propagate=5))
    with torch.no_grad():
        assert torch.equal(fast(images), 2 * alone(images) + 1)
        assert fast.encode_image(images).shape[1] == 1 + 64 - 4 * 5
        assert root.encode_image(images).shape[1] == 65
        torch.testing.assert_close(patch(root, Identity())(images), root(images), atol=5e-6, rtol=0)
    assert list(fast.state_dict()) == list(root.state_dict())


def test_what_works_on_a_vit_works_on_its_root(root):
    images = families.images("vit")
    fast, alone = patch(root, GTPPlus(remove=6)), patch(root.visual.trunk, GTPPlus(remove=6))
    assert macs(fast) == macs(alone)
    assert macs(root) == macs(root.visual.trunk)
    for one, other in zip(trace(fast, images).layers, trace(alone, images).layers, strict=True):
        assert torch.equal(one.owners, other.owners)
    assert fast.kernels == alone.kernels
    assert fast.reduction.method == GTPPlus(remove=6)
    plain = unpatch(fast)
    assert type(plain) is Root
    assert type(plain.visual.trunk) is type(root.visual.trunk)
    again = patch(fast, ToMe(r=3))
    assert again.reduction.method == ToMe(r=3)
    with torch.no_grad():
        assert torch.equal(plain(images), root(images))
        expected = fast(images)
        assert torch.equal(copy.deepcopy(fast)(images), expected)
        assert torch.equal(pickle.loads(pickle.dumps(fast))(images), expected)


def test_a_root_that_is_not_known_says_where_the_vit_is(monkeypatch):
    with pytest.raises(UnsupportedModelError, match=r"the model itself is model\.visual\.trunk"):
        patch(Root(), GTP())


def test_a_refused_vit_in_a_root_is_named_by_its_path(root):
    root.visual.trunk.blocks[2].attn.extra = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"visual\.trunk: blocks\[2\]\.attn\.extra .*is not known"):
        patch(root, GTP())


def test_a_root_is_tuned_and_evaluated_as_it_is_and_finetuned_without_its_root(root, tmp_path):
    images = families.images("vit", 24)
    recipe = tune(root, images, Target("macs", 0.7), search=SearchConfig(passes=1))
    assert recipe.measured.fraction <= 0.7
    assert is_patched(patch(root, recipe))
    with pytest.raises(GTPError, match=r"give model\.visual\.trunk"):
        finetune(root, GTP(), InMemoryDataset(images, torch.zeros(24).long()), output=tmp_path)


class Rotary(TimmViT):
    """A family whose blocks look something up by grid cell, as rotary positions are: added to queries and keys."""

    def matches(self, model):
        return super().matches(model) and hasattr(model, "positions")

    def embed(self, model, images):
        return super().embed(model, images).replace(position_table=model.positions)

    def rows(self, tokens):
        found = tokens.position_table[tokens.cell]  # [B, M, D]; the last row is for tokens in no cell
        return nn.functional.pad(found, (0, 0, tokens.prefix, 0)).unsqueeze(1)

    def project(self, block, layer, tokens, queries, part="all"):
        found = super().project(block, layer, tokens, None)
        q, k = found.q + self.rows(tokens), found.k + self.rows(tokens)
        return QKV(q[:, :, :queries], k, found.v, found.scale)

    def run_block(self, block, layer, tokens):
        q, k, v, scale, *_ = self.project(block, layer, tokens, None)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
        x = tokens.x + self.attention_branch(block, out)
        return x + self.mlp_branch(block, x, None)


def rotary():
    model = families.make("vit")
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(65, 8, generator=generator)
    table[64] = 0
    model.register_buffer("positions", table, persistent=False)
    return model


@pytest.mark.parametrize("method", [GTP(propagate=7), GTPPlus(remove=7), ToMe(r=7), EViT(keep_rate=0.7)], ids=str)
def test_a_table_is_looked_up_by_the_cells_of_the_tokens_that_are_left(method, monkeypatch):
    monkeypatch.setattr(backbones, "BACKBONES", {"rotary": Rotary(), **backbones.BACKBONES})
    model, images = rotary(), families.images("vit")
    fast = patch(model, method)
    assert isinstance(fast.reduction.backbone, Rotary)
    seen = []
    with torch.no_grad():
        run(fast, images, observe=seen.append)
        for tokens in seen:
            assert tokens.position_table is model.positions
            rows = fast.reduction.backbone.rows(tokens)
            assert rows.shape[2] == tokens.x.shape[1]
        # the last layer by the host's own block, which must see the same positions
        final, before = seen[-1], seen[-2]
        if final.cell.shape == before.cell.shape:
            expected = fast.reduction.backbone.run_block(model.blocks[-1], 3, before)
            torch.testing.assert_close(final.x, expected)


def test_dropped_equals_masked(monkeypatch):
    """Tokens that are gone against all tokens with those hidden: the one test that sees wrong positions."""
    monkeypatch.setattr(backbones, "BACKBONES", {"rotary": Rotary(), **backbones.BACKBONES})
    model, images = rotary(), families.images("vit")
    fast = patch(model, GTP(propagate=(20, 0, 9, 0), graph="none", proportional_attention=False))
    seen = []
    with torch.no_grad():
        run(fast, images, observe=seen.append)
        host, x = fast.reduction.backbone, seen[0].x
        visible = torch.ones(len(images), 65, dtype=torch.bool)
        for layer, block in enumerate(model.blocks):
            q, k, v, scale, *_ = host.project(block, layer, seen[0].replace(x=x), None)
            mask = visible[:, None, None]
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            x = x + host.attention_branch(block, out.transpose(1, 2).flatten(2))
            x = x + host.mlp_branch(block, x, None)
            left = seen[layer + 1].cell
            visible = torch.zeros_like(visible).scatter(1, left + 1, True)
            visible[:, 0] = True
            rows = torch.cat([torch.zeros_like(left[:, :1]), left + 1], dim=1)
            found = x.gather(1, rows.unsqueeze(2).expand(-1, -1, x.shape[2]))
            torch.testing.assert_close(seen[layer + 1].x, found, atol=1e-5, rtol=0)


def test_hooks_of_the_user_do_not_see_tensors_without_data():
    model = families.make("vit")
    seen = []
    for module in (model.patch_embed, model.norm, model.head):
        module.register_forward_hook(lambda _, __, output: seen.append(output.sum().item()))
    patch(model)
    assert macs(model).total > 0
    assert seen == []
    with torch.no_grad():
        model(families.images("vit"))
    assert len(seen) == 3


def test_costs_are_measured_where_the_model_is():
    model = families.make("vit")
    expected = macs(model)
    assert macs(copy.deepcopy(model).to("meta")) == expected
    assert macs(copy.deepcopy(model).double()) == expected
    assert macs(copy.deepcopy(model).train()) == expected
    with torch.inference_mode():
        assert macs(model) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert macs(model) == expected
    assert host_of(model).costs().unreduced == expected.total


def test_counting_leaves_no_trace_in_the_model():
    """Neither in buffers that a forward pass changes, nor in torch's switches, in any mode and with many threads."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            self.peak = torch.maximum(self.peak, x.abs().max())
            self.calls += 1
            return x.relu()

    model = families.make("lvvit").train()
    model.blocks[0].mlp.act = Counts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = families.images("lvvit")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: int(macs(model)), range(8)))
    assert len(found) == 1
    assert int(macs(model, images=images)) in found
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(type(value) is torch.Tensor for value in after.values())
    assert model.training
    assert torch.backends.cuda.flash_sdp_enabled()


class Looks(nn.Module):
    """Decides by the data, which tensors without data do not have."""

    def forward(self, x):
        return x.clamp(max=10.0) if x.abs().max() > 1e4 else nn.functional.gelu(x)


def test_modules_that_look_at_their_data_are_counted_as_well():
    model = families.make("vit")
    expected = macs(model)
    model.blocks[1].mlp.act = Looks()
    assert macs(model) == expected
    assert is_patched(patch(model))


@pytest.mark.parametrize("pool", ["token", "avg", "map", ""])
@pytest.mark.parametrize("patches", [1, 2])
def test_images_of_one_or_two_patches_are_counted(pool, patches):
    sizes = {**small_models.SMALL, "img_size": (8, 8 * patches), "class_token": pool != "map"}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, global_pool=pool).eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(1, 3, 8, 8 * patches))
    assert 2 * macs(model).total == counter.get_total_flops()


def test_the_default_of_a_model_whose_last_block_is_most_of_it_removes_nothing():
    model = timm.create_model("vit_tiny_patch16_224", **{**small_models.SMALL, "depth": 1})
    assert patch(model).reduction.method == GTPPlus(remove=(0,))


def test_a_vit_under_two_names_is_refused(root):
    root.alias = root.visual
    with pytest.raises(UnsupportedModelError, match=r"at visual\.trunk and at alias\.trunk"):
        patch(root, GTP())


@pytest.mark.parametrize("family", ["dynamic", "dinov3"])
def test_a_model_of_any_size_is_described_at_the_size_it_was_made_for(family):
    """Not at that of its pre-trained weights: schedules, MACs and exported files are for the same images."""
    host = host_of(families.make(family))
    assert host.inputs.any_size
    assert host.inputs.size == (64, 64) == tuple(8 * side for side in host.vit.grid)
