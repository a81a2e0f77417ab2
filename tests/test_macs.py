"""MACs: equal to torch's own counter, to the original implementation's, and to the paper's tables."""

import json

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import families
from gtp_vit import GTP, METHODS, GTPError, Identity, macs, patch
from gtp_vit.errors import UnknownName
from gtp_vit.paper.selection import SELECTORS

# Printed GMACs for P = 0, 1, ..., 14 (main results; ViTs without class token).
PAPER = {
    "deit_small_patch16_224": "4.6 4.5 4.3 4.2 4.0 3.9 3.7 3.6 3.4 3.3 3.2 3.0 2.9 2.7 2.6",
    "deit_base_patch16_224": "17.6 17.0 16.5 15.9 15.4 14.8 14.2 13.7 13.1 12.6 12.1 11.6 11.0 10.4 9.8",
    "vit_medium_patch16_gap_256": "10.6 10.4 10.1 9.9 9.6 9.3 9.0 8.8 8.5 8.3 8.0 7.8 7.5 7.2 7.0",
}
METHOD_CASES = [method() for method in METHODS.values()] + [
    GTP(propagate=5, theta=0.5),
    GTP(propagate=(0, 9, 0, 4), graph="spatial"),
    GTP(propagate=5, graph="none"),
    GTP(propagate=5, proportional_attention=False),
    *(GTP(propagate=5, select=select) for select in SELECTORS),
]


def torch_flops(model: torch.nn.Module, images: torch.Tensor) -> int:
    model.requires_grad_(False)  # the counter's module tracker stumbles over expanded parameters
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", families.NAMES)
@pytest.mark.parametrize("method", METHOD_CASES, ids=str)
@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_equal_to_torchs_flop_counter(family, method, lossless, kernels):
    if "class" in str(method) and not families.make(family).has_class_token:
        pytest.skip("needs a class token")
    fast = patch(families.make(family), method, lossless=lossless, kernels=kernels)
    assert macs(fast).total * 2 == torch_flops(fast, families.images(family, 1))


@pytest.mark.parametrize("family", families.NAMES)
def test_a_plain_model_is_counted_as_it_is(family):
    model = families.make(family)
    assert macs(model).total * 2 == torch_flops(model, families.images(family, 1))


def test_a_dynamic_grid_is_counted():
    fast = patch(families.make("dynamic"), GTP(propagate=3))
    assert macs(fast, grid=(5, 10)).total * 2 == torch_flops(fast, torch.zeros(1, 3, 40, 80))


def test_43_of_the_45_printed_cells_are_reproduced():
    missed = []
    for name, row in PAPER.items():
        with torch.device("meta"):
            model = timm.create_model(name)
        for number, printed in enumerate(map(float, row.split())):
            counted = [
                round(macs(model, GTP(propagate=number, graph=graph), convention="torchprofile").total / 1e9, 1)
                for graph in ("mixed", "spatial")  # the table is the best of several settings
            ]
            if printed not in counted:
                missed.append((name, number))
    assert missed == [("deit_base_patch16_224", 11), ("deit_base_patch16_224", 14)]


@pytest.mark.parametrize(("name", "expected"), [("deit_small_patch16_224", 4_601_681_280)])
def test_equal_to_a_torchprofile_run(name, expected):
    with torch.device("meta"):
        assert macs(timm.create_model(name), convention="torchprofile").total == expected


def test_equal_to_the_macs_of_the_original_implementation(data):
    from test_goldens import method_of

    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    entries = json.loads((data / "golden" / "gtp.json").read_text())["entries"]
    stored = [entry for entry in entries if "torchprofile_macs_batch1" in entry]
    assert len(stored) == 22
    for entry in stored:
        counted = macs(model, method_of(entry["settings"]), convention="torchprofile").total
        assert abs(counted - entry["torchprofile_macs_batch1"]) <= 20_000, entry["name"]


def test_the_lossless_tier_saves_seven_percent_of_deit_s():
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    saved = 1 - macs(patch(model, Identity())).total / macs(model).total
    assert 0.065 < saved < 0.075


def test_without_the_methods_own_cost():
    with torch.device("meta"):
        fast = patch(timm.create_model("deit_small_patch16_224"), GTP(propagate=8))
    whole, bare = macs(fast), macs(fast, include_method=False)
    assert bare.method == 0 < whole.method
    assert whole.total == bare.total + whole.method
    assert str(whole).endswith(" GMACs")
    assert int(whole) == whole.total


@pytest.mark.parametrize("lossless", [True, False])
def test_the_papers_convention_counts_norms_where_they_run(lossless):
    """q/k norm and LayerScale of a model whose last block is shortened, by hand."""
    model = families.make("qk_norm")  # 64 patches and a class token, 24 channels, 3 heads of 8, 4 layers
    fast = patch(model, Identity(), lossless=lossless)
    plain, official = macs(fast).total, macs(fast, convention="torchprofile").total
    keys, queries, output, mlp = 24 + 24, 24 + 24, 24, 24 + 24  # norm1, k_norm; scale, q_norm; ls1; norm2, ls2
    whole = 65 * (keys + queries + output + mlp)
    short = 65 * keys + queries + output + mlp
    assert official - plain == 3 * whole + (short + 24 if lossless else whole + 65 * 24)


def test_wrong_arguments_are_refused():
    model = families.make("vit")
    for arguments in ({"method": "gtp"}, {"method": GTP}, {"grid": (0, -3)}, {"grid": (3,)}):
        with pytest.raises(GTPError):
            macs(model, **arguments)


def test_unknown_conventions_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'torchprofile'"):
        macs(families.make("vit"), convention="torchprofil")
