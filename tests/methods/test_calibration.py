"""Calibrated GTP+: what is learned of a model, the arithmetic with it, where it is stored, and what is refused."""

import dataclasses
import json

import pytest
import torch

from gtp_vit import (
    GTPError,
    GTPPlus,
    calibrate,
    create_model,
    macs,
    patch,
    read_recipe,
    save_checkpoint,
    trace,
)
from gtp_vit.core.schedule import calibrated
from gtp_vit.errors import ScheduleError, SettingError
from gtp_vit.kernels import Ops, native
from gtp_vit.kernels.arguments import GTPPlusMergeByProbeInputs
from gtp_vit.methods.gtp_plus.calibration import calibration_from_text
from gtp_vit.methods.gtp_plus.learning import sensitivity
from gtp_vit.methods.gtp_plus.learning.calibrate import with_calibration
from gtp_vit.methods.gtp_plus.learning.sensitivity import learn_sensitivity
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge_by_probe
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.metrics.registry import MEASURES
from gtp_vit.models import bundled
from gtp_vit.patching import host_of
from gtp_vit.testing import families
from support.flops import torch_flops

needs_native = pytest.mark.skipif(native.LOAD_ERROR is not None, reason=str(native.LOAD_ERROR))


@pytest.fixture(scope="module")
def fashion():
    images, _ = bundled.sample_images()
    return create_model("fashion_vit"), bundled.normalise(images[:120])


@pytest.fixture(scope="module")
def recipe(fashion):
    model, images = fashion
    return calibrate(model, images[:40], macs=0.6)


def problem(seed, protect):
    """Arguments of the operator: 3 images, 2 prefix and 30 image tokens."""
    generator = torch.Generator().manual_seed(seed)
    x, branch = torch.randn(2, 3, 32, 33, generator=generator)
    probe, size = 3 * torch.randn(33, generator=generator), torch.randint(1, 6, (3, 30), generator=generator).float()
    protected = (torch.rand(3, 30, generator=generator) < 0.15).float() if protect else None
    return x, branch, probe, size, protected, 14, 0.5, True, None, None, 0.0


def by_definition(x, branch, probe, size, protected, removed, floor, *_):
    """Features and tokens that stay, of each image: the definition in docs/explanation/gtp-plus.md, token by token."""
    x, results = (x + branch).double(), []
    for image in range(len(x)):
        tokens, sizes = x[image, 2:], size[image].double()
        unit = tokens / tokens.norm(dim=1, keepdim=True)
        free = [t for t in range(30) if protected is None or not protected[image, t]]
        importance = ((unit @ probe.double()).exp() * sizes).sqrt()
        importance = importance / importance[free].mean()

        def apart(one, other, unit=unit, sizes=sizes):
            return (1 - unit[one] @ unit[other]) * (sizes[one] * sizes[other] / (sizes[one] + sizes[other])).sqrt()

        better = {t: [o for o in free if importance[o] > importance[t]] for t in free}
        costs = {t: (importance[t] + floor) * min(apart(t, o) for o in better[t]) for t in free if better[t]}
        gone = sorted(costs, key=costs.get)[:removed]
        kept = [t for t in range(30) if t not in gone]
        taken = {t: max((o for o in better[t] if o in kept), key=lambda o, t=t: unit[t] @ unit[o]) for t in gone}
        rows = []
        for token in kept:
            group = [token, *(t for t in gone if taken[t] == token)]
            weights = sizes[group] * (importance[group] + 0.1) ** 0.75
            mean = (weights[:, None] * tokens[group]).sum(dim=0) / weights.sum()
            rows.append(mean * tokens[group].norm(dim=1).max() / mean.norm() if len(group) > 1 else mean)
        results.append((torch.cat([x[image, :2], torch.stack(rows)]), kept))
    return results


@pytest.mark.time_limit(6)  # of Triton, whose interpreter is slow; the others take a blink
@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize("ops", Ops)
def test_every_form_merges_by_the_definition(ops, protect):
    if ops is Ops.NATIVE and native.LOAD_ERROR is not None:
        pytest.skip(native.LOAD_ERROR)
    for seed in range(4):
        arguments = problem(seed, protect)
        features, _, size, kept, gone, target = gtp_plus_merge_by_probe(ops, GTPPlusMergeByProbeInputs(*arguments))
        for image, (wanted, stays) in enumerate(by_definition(*arguments)):
            assert kept[image].tolist() == stays
            torch.testing.assert_close(features[image].double(), wanted, rtol=1e-4, atol=1e-4)
        assert size.sum(dim=1).tolist() == arguments[3].sum(dim=1).tolist()
        if protect:
            assert arguments[4].any()
            assert not arguments[4].gather(1, gone).any()
            assert not arguments[4].gather(1, kept).gather(1, target).any()


@needs_native
def test_the_operator_passes_torchs_own_check_and_kernel_and_reference_treat_nan_alike():
    arguments = problem(0, True)
    torch.library.opcheck(
        torch.ops.gtp_vit.gtp_plus_merge_by_probe.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    arguments[0][0, 7, 3] = torch.nan
    found, wanted = (
        gtp_plus_merge_by_probe(ops, GTPPlusMergeByProbeInputs(*arguments)) for ops in (Ops.NATIVE, Ops.TORCH)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found[0][1:].isfinite().all()


def test_shapes_that_contradict_each_other_are_refused():
    arguments = problem(0, True)
    for place, wrong in ((2, torch.rand(5)), (3, torch.rand(3, 40)), (4, torch.rand(3, 7)), (5, 30)):
        with pytest.raises(GTPError, match=r"gtp_vit.gtp_plus_merge_by_probe: "):
            gtp_plus_merge_by_probe(
                Ops.TORCH, GTPPlusMergeByProbeInputs(*arguments[:place], wrong, *arguments[place + 1 :])
            )


def test_directions_have_the_covariance_of_the_damage():
    """Half of delta^T Cov delta is the KL divergence, or 1 - cosine, of a small change delta."""
    generator = torch.Generator().manual_seed(0)
    output, delta = torch.randn(2, 6, generator=generator)
    noise = torch.randn(200_000, 6, generator=generator)
    small = output + 1e-2 * delta
    kl = (output.softmax(0) * (output.log_softmax(0) - small.log_softmax(0))).sum()
    cosine = 1 - torch.cosine_similarity(output, small, dim=0)
    error = (1e-2 * delta).norm().square() / output.norm().square() / 2
    for measure, damage in (("classes", kl), ("embedding", cosine), ("dense", error)):
        drawn = MEASURES[measure]().direction(output.expand_as(noise), noise)
        assert float((drawn @ (1e-2 * delta)).square().mean() / 2) == pytest.approx(float(damage), rel=0.03)


@pytest.mark.slow
def test_the_probe_predicts_and_does_less_damage(fashion, recipe):
    model, images = fashion
    assert min(fit for fit in recipe.provenance.fit[:11] if fit is not None) > 0.1  # on images it was not fitted on
    assert recipe.provenance.fit[11] is None  # the head reads the class token only
    plain = dataclasses.replace(recipe.method, calibration=None)
    with torch.inference_mode():
        base = model(images[40:])
        calibrated, before = (kl_per_image(base, patch(model, m)(images[40:])).mean() for m in (recipe.method, plain))
    assert calibrated < before


def test_the_same_images_give_the_same_calibration(fashion, recipe):
    model, images = fashion
    with torch.inference_mode():  # which must not keep it from its gradients
        again = calibrate(model.train(), images[:40], macs=0.6)
    assert model.training
    model.eval()
    assert again.method == recipe.method
    assert all(parameter.grad is None for parameter in model.parameters())


def test_floor_and_shape_suit_it_unless_they_were_chosen(fashion, recipe):
    vit = host_of(fashion[0]).vit
    tokens, depth = vit.image_tokens, vit.depth
    suited = with_calibration(GTPPlus(), recipe.method.calibration, vit)
    assert (suited.importance_floor, suited.remove) == (0.3, tuple(calibrated(depth, tokens, tokens / (2 * depth))))
    assert (
        with_calibration(GTPPlus.at_strength(vit, 0.5), recipe.method.calibration, vit) == suited
    )  # where a search begins
    chosen = GTPPlus(remove=3, importance_floor=0.4)
    assert with_calibration(chosen, recipe.method.calibration, vit) == dataclasses.replace(
        chosen, calibration=recipe.method.calibration
    )


def test_a_recipe_holds_it_and_so_do_checkpoints(fashion, recipe, tmp_path):
    model, images = fashion
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    save_checkpoint(model, tmp_path / "weights.safetensors", recipe)
    with torch.inference_mode():
        wanted = patch(model, recipe)(images[:8])
        for file in ("recipe.json", "weights.safetensors"):
            assert read_recipe(tmp_path / file).method == recipe.method
            assert torch.equal(patch(model, tmp_path / file)(images[:8]), wanted)
    assert len(repr(recipe.method)) < 200


def test_other_weights_are_refused_and_rounded_or_finetuned_ones_are_not(recipe):
    other = bundled.create(pretrained=False)
    with pytest.raises(SettingError, match=r"learned on other weights: about \d+ % of these are different"):
        patch(other, recipe)
    patch(create_model("fashion_vit").bfloat16(), recipe)
    moved = create_model("fashion_vit")
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
    with pytest.raises(SettingError, match="learned on other weights"):
        patch(moved, recipe)
    patch(
        moved, recipe.method.with_fingerprint_of(host_of(moved).block_weights)
    )  # what a checkpoint of such a model holds


def test_macs_are_what_torch_counts(fashion, recipe):
    model, images = fashion
    fast = patch(model, recipe.method, shorten_last_block=False, kernels="native")
    assert macs(fast).total == pytest.approx(torch_flops(fast, images[:1]) / 2, rel=1e-3)
    assert macs(fast).overhead < macs(patch(model, dataclasses.replace(recipe.method, calibration=None))).overhead


def test_saving_memory_changes_nothing(monkeypatch):
    model, images = families.make("vit"), families.images("vit", 24)
    wanted = learn_sensitivity(model, images, batch_size=1)
    monkeypatch.setattr(sensitivity, "MEMORY_BYTES", 1)  # an image at a time, and checkpoints
    found = learn_sensitivity(model, images)
    assert found.fit == wanted.fit
    assert found.calibration.to_text() == wanted.calibration.to_text()
    assert not host_of(model).backbone.uses_grad_checkpointing(model)


def with_a_register(family, cell):
    """A model whose token in one cell is far longer than the others."""
    model = families.make(family)
    with torch.no_grad():
        model.pos_embed[0, model.num_prefix_tokens + cell] *= 400
    return model


@pytest.mark.parametrize(("family", "cell"), [("vit", 9), ("siglip", 63)])
def test_a_cell_of_long_tokens_is_a_register_and_stays_alone(family, cell):
    images = families.images(family, 24)
    found = learn_sensitivity(with_a_register(family, cell), images).calibration
    assert found.registers == (cell,)
    assert learn_sensitivity(families.make(family), images).calibration.registers == ()
    fast = patch(with_a_register(family, cell), GTPPlus(remove=(12, 12, 12, 12), calibration=found.to_text()))
    for layer in trace(fast, images[:3]).layers:
        place = (layer.kept == cell).nonzero()
        assert len(place) == 3  # in every image it is there
        for image, slot in place.tolist():
            assert layer.sizes[image, slot] == 1


@pytest.mark.filterwarnings("ignore:images .* have values up to")  # that is how a token gets long here
def test_long_tokens_that_are_nowhere_in_particular_are_no_registers():
    """As in DINOv2 without registers: each image has its own."""
    model, images = families.make("vit"), families.images("vit", 24).clone()
    for number, image in enumerate(images):
        row, column = divmod(7 * number % 64, 8)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] *= 1e4
    assert learn_sensitivity(model, images).calibration.registers == ()


@pytest.mark.parametrize(
    "family",
    ["dinov2_registers", "all_tokens", "siglip", "eva02", "hf_vit", "hf_clip_projection", "open_clip", "lvvit"],
)
def test_every_kind_of_output_can_be_learned_from(family):
    if family not in families.NAMES:
        pytest.skip(f"no {family} here")
    model, images = families.make(family), families.images(family, 24)
    recipe = calibrate(model, images, macs=0.8)
    fast, reference = (patch(model, recipe, kernels=kernels) for kernels in ("native", "torch"))
    with torch.inference_mode():
        found, wanted = (families.output(each, images[:3]) for each in (fast, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert recipe.measured.fraction <= 0.8


class NoGradients(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x):
        return self.head(x.detach())


def test_what_cannot_be_calibrated_is_refused(fashion):
    model, images = fashion
    with pytest.raises(SettingError, match=r"^1 image is too few to learn from; give at least 20"):
        calibrate(model, images[:1])
    with pytest.raises(SettingError, match="5 images are too few to learn from; give at least 20"):
        calibrate(model, images[:5])
    with pytest.raises(SettingError, match="images is a list"):
        calibrate(model, list(images))
    with pytest.raises(SettingError, match="macs is 2"):
        calibrate(model, images, macs=2)
    cut = families.make("vit")
    cut.head = NoGradients(cut.head)
    with pytest.raises(GTPError):
        calibrate(cut, families.images("vit", 24))
    dead = families.make("vit")
    torch.nn.init.zeros_(dead.head.weight)
    with pytest.raises(GTPError, match="does not depend on any image token"):
        calibrate(dead, families.images("vit", 24))


def stored(**changes):
    return dataclasses.replace(calibration_from_text(families.calibration()), **changes).to_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "gtp_vit.calibrate did not write"),
        ("", "gtp_vit.calibrate did not write"),
        ("A" * 4000, "gtp_vit.calibrate did not write"),
        (stored(probe=torch.rand(3, 24)), "is for 3 layers of 24 channels, this model has 4 of 24"),
        (stored(probe=torch.full((4, 24), torch.nan)), "not finite"),
        (stored(registers=(64,)), "not in its 8 x 8 patches"),
        (stored(grid=(0, 8)), "missing or unknown fields"),
        (stored(weights=torch.zeros(7)), "have 7 matrices, those of this one have 16"),
    ],
)
def test_texts_that_are_no_calibration(text, message):
    with pytest.raises(SettingError, match=message):
        patch(families.make("vit"), GTPPlus(calibration=text))


def test_registers_must_be_left():
    text = stored(registers=tuple(range(10)))
    with pytest.raises(ScheduleError, match="uses 10 cells as registers, which stay: leave at least 11"):
        patch(families.make("vit"), GTPPlus(remove=(0, 54, 0, 0), calibration=text))
    patch(families.make("vit"), GTPPlus(remove=(0, 53, 0, 0), calibration=text))


def test_another_grid_has_its_registers_in_the_same_places():
    text = stored(registers=(0, 7, 63))
    fast = patch(families.make("dynamic"), GTPPlus(remove=2, calibration=text))
    found = trace(fast, torch.randn(2, 3, 48, 80))  # 6 x 10 patches
    assert {0, 9, 59} <= set(found.layers[-1].kept[0].tolist())


def test_settings_are_json():
    method = GTPPlus(calibration=stored())
    again = GTPPlus(**{k: v for k, v in json.loads(json.dumps(method.to_dict())).items() if k != "method"})
    assert again == method
    assert calibration_from_text(again.calibration).registers == (0,)
