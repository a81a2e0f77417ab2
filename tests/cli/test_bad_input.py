"""Bad input gets one line that says what to do: hostile recipes, wrong settings, odd checkpoints, wrappers, flags."""

import dataclasses
import json
import os

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from gtp_vit import GTP, METHODS, GTPError, GTPPlus, create_model, macs, make_method, patch, read_recipe, trace
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.core.schedule import removals
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import ScheduleError, SettingError, UnknownNameError, UnsupportedModelError
from gtp_vit.testing import families
from gtp_vit.weights import read_weights

VIT = "vit"


def complaint(capsys, *words):
    """The one line that a wrong command gets."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, out) == (ExitCode.USAGE, "")
    assert err.count("\n") == 1
    assert len(err) < 1200
    return err


# --- settings --------------------------------------------------------------------------------------------------------

WRONG = [
    "a",
    "",
    None,
    True,
    1.5,
    float("nan"),
    float("inf"),
    10**400,
    [],
    ["a"],
    [None],
    [[1]],
    {},
    {"a": 1},
    b"x",
    3j,
]


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_every_method_refuses_values_of_other_types(name):
    """Whatever is given: settings that can be stored and hashed, or an error of ours in one short line."""
    model = families.make(VIT)
    for field in dataclasses.fields(METHODS[name]):
        refused = []
        for value in WRONG:
            try:
                method = make_method(name, **{field.name: value})
                hash(method)
                json.dumps(method.to_dict(), allow_nan=False)
                if field.name not in METHODS[name].weight_file_fields:
                    method.build(patch(model, "identity").reduction.vit)
            except GTPError as error:
                refused.append(str(error))
        assert len(refused) >= 8, field.name
        assert not any("\n" in message or len(message) > 500 for message in refused)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gtp_plus", {"preserve_norm": "yes"}, "preserve_norm is 'yes'; it must be True or False"),
        ("gtp_plus", {"importance_floor": True}, "importance_floor is True; it must be a finite number"),
        ("gtp_plus", {"importance_floor": float("inf")}, "importance_floor is inf; it must be a finite number"),
        ("gtp", {"propagate": None}, "must be an integer or a list of integers or a string"),
        ("gtp", {"propagate": [1, "a"]}, "propagate is [1, 'a']"),
        ("gtp", {"seed": 10**400}, "seed is a number of more than 50 digits; it must be an integer"),
        ("evit", {"drop_loc": "a"}, "drop_loc is 'a'; it must be a list of integers or None"),
        ("tome", {"prop_attn": 1}, "prop_attn is 1; it must be True or False"),
    ],
)
def test_a_setting_of_the_wrong_type_says_what_it_must_be(method, settings, message):
    with pytest.raises(SettingError) as caught:
        make_method(method, **settings)
    assert message in str(caught.value)


def test_settings_become_plain_python():
    import numpy as np

    method = GTP(propagate=np.int64(3), alpha=np.float32(0.5))
    assert (type(method.propagate), type(method.alpha)) == (int, float)
    assert json.loads(json.dumps(method.to_dict()))["propagate"] == 3


@pytest.mark.parametrize(
    "schedule", ["early:1e308", "default:1e308", "linear:-1e300:1e300", "²", "9" * 5000, "late:nan"]
)
def test_schedules_of_absurd_numbers(schedule):
    with pytest.raises((ScheduleError, UnknownNameError)) as caught:
        removals(schedule, 4, 64)
    assert len(str(caught.value)) < 300


# --- recipes ---------------------------------------------------------------------------------------------------------


def recipe(**changes):
    return {**read_recipe("vit_tiny_patch16_224-0.65").to_dict(), **changes}


SIZES = recipe()["sizes"]
METHOD = recipe()["method"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "model": ' + '{"a":' * 100_000, "nested too deeply"),
        (json.dumps(recipe(model=3)), "model is 3; it must be a string"),
        (json.dumps(recipe(sizes={**SIZES, "grid": "a"})), "grid is 'a'; it must be a list of 2 integers"),
        (json.dumps(recipe(sizes={**SIZES, "grid": [14]})), r"grid is [14]"),
        (json.dumps(recipe(sizes={**SIZES, "grid": [14, 14, 14]})), r"grid is [14, 14, 14]"),
        (json.dumps(recipe(sizes={**SIZES, "layers": "12"})), "layers is '12'"),
        (json.dumps(recipe(sizes={**SIZES, "layer": 12})), "unknown key of sizes 'layer'; did you mean 'layers'"),
        (json.dumps(recipe(sizes=[1])), "sizes is [1]; it must be a dictionary"),
        (json.dumps(recipe(sizes={"layers": 12})), "sizes lacks channels, heads, grid, prefix_tokens"),
        (
            json.dumps(recipe(method={**METHOD, "preserve_norm": "yes"})),
            "preserve_norm is 'yes'; it must be True or False",
        ),
        (json.dumps(recipe(method={**METHOD, "importance_flor": 1})), "did you mean 'importance_floor'"),
        (json.dumps(recipe(method={"method": 3})), "must be a dictionary that names its method"),
        (json.dumps(recipe(method={"method": ["gtp"]})), "must be a dictionary that names its method"),
        (json.dumps(recipe(method="gtp")), "must be a dictionary that names its method"),
        (json.dumps(recipe(method=METHOD | {"importance_floor": float("nan")})), "the number NaN, which is not finite"),
        (
            json.dumps(recipe(method=METHOD | {"importance_floor": 0.35})).replace("0.35", "1e999"),
            "importance_floor is inf; it must be a finite number",
        ),
        (json.dumps(recipe(method=METHOD | {"remove": [10**30] * 12})), "remove is [1000"),
        (
            json.dumps(recipe(method=METHOD | {"importance_floor": 0.35})).replace("0.35", "9" * 10_000),
            "is not a recipe",
        ),
        (json.dumps(recipe(provenance=[])), "provenance is []; it must be a dictionary"),
        (json.dumps(recipe(provenance={"seeds": 1})), "unknown key of provenance 'seeds'; did you mean 'seed'"),
        (json.dumps(recipe(provenance={"seed": "1"})), "seed is '1'; it must be an integer"),
        (json.dumps(recipe(provenance={"target": {"macs": "all"}})), "provenance.target.macs is 'all'"),
        (json.dumps(recipe(measured={"speedup": {"median": 1.5}})), "measured.speedup lacks quartiles, batch, threads"),
        (json.dumps(recipe(measured={"held_out": 1})), "measured.held_out is 1; it must be a dictionary"),
        (json.dumps(recipe(measured=None)), "measured is None; it must be a dictionary"),
        (json.dumps(recipe(modell="x")), "unknown key 'modell'; did you mean 'model'"),
        (json.dumps(recipe()).replace('"model"', '"model": "a", "model"'), "it has 'model' twice; remove one of them"),
        (json.dumps(recipe(format=True)), "is a recipe of format True"),
        (json.dumps(recipe(format=[1])), "is a recipe of format [1]"),
        (json.dumps(recipe(model="x" * 10_000)), "model is 'xxx"),
        (json.dumps(recipe(model="x" * 2**21)), "recipes are small"),
        (b"\xff\xfe\x00\x01", "it is not text in UTF-8"),
        (b"\x00" * 100, "it is not JSON"),
        ("", "it is not JSON"),
        ("3", "it names no format"),
    ],
)
def test_hostile_recipes_are_refused_in_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (read_recipe, lambda path: patch(families.make(VIT), path)):
        with pytest.raises(GTPError) as caught:
            read(path)
        assert message in str(caught.value)
    assert message in complaint(capsys, "macs", "vit_tiny_patch16_224", "--method", path)


def test_hostile_metadata_of_a_checkpoint_is_refused_likewise(tmp_path):
    for number, (text, message) in enumerate(
        [("[" * 100_000, "nested too deeply"), (json.dumps(recipe(model=3)), "model is 3"), ("{", "it is not JSON")]
    ):
        path = tmp_path / f"{number}.safetensors"
        save_file({"x": torch.zeros(1)}, path, {"gtp_vit_recipe": text})
        with pytest.raises(GTPError, match=message):
            read_recipe(path)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(GTPError, match="is not a safetensors file that can be read"):
        read_recipe(tmp_path / "broken.safetensors")


def test_names_that_no_recipe_can_have(tmp_path):
    model = families.make(VIT)
    for name, message in (
        (tmp_path, "is a folder; give the recipe file in it"),
        ("a\0b.json", "there is no recipe"),
        ("x" * 5000, "there is no recipe x"),
        ("gtp_pluss", "did you mean 'gtp_plus'"),
        ("", "there is no recipe"),
    ):
        with pytest.raises(GTPError) as caught:
            patch(model, name)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_recipe_never_stores_what_json_has_no_word_for(tmp_path):
    stored = read_recipe("vit_tiny_patch16_224-0.65")
    measured = dataclasses.replace(stored.measured, figures={"kl": float("nan"), "agreement": float("inf")})
    odd = dataclasses.replace(stored, measured=measured)
    (tmp_path / "r.json").write_text(odd.to_json())
    assert read_recipe(tmp_path / "r.json").measured.figures == {"kl": None, "agreement": None}


# --- names of methods ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
def test_the_name_of_a_method_means_its_defaults():
    model = timm.create_model("test_vit")
    for name, method in METHODS.items():
        if name not in ("gtp_plus", "ppt"):
            assert patch(model, name).reduction.method == method()
    assert patch(model, "gtp_plus").reduction.method == patch(model).reduction.method != GTPPlus()


@pytest.mark.slow
def test_the_commands_do_what_patch_does(capsys):
    def settings(*words):
        assert main(["macs", *words, "--json"]) == ExitCode.OK
        return json.loads(capsys.readouterr().out)["settings"]

    for name in ("vit_tiny_patch16_224", "vit_huge_patch14_224"):  # with a recipe in the package, and without
        default = patch(create_model(name, meta=True)).reduction.method
        assert settings(name) == settings(name, "--method", "gtp_plus") == json.loads(json.dumps(default.to_dict()))
        # What is written counts, also where it is the default of the class.
        for value in (2.0, GTPPlus().importance_floor):
            floor = dataclasses.replace(default, importance_floor=value)
            assert settings(name, "--importance-floor", str(value)) == json.loads(json.dumps(floor.to_dict()))
    assert settings("vit_tiny_patch16_224", "--remove", "8") == GTPPlus(remove=8).to_dict()
    assert settings("vit_tiny_patch16_224", "--method", "gtp") == GTP().to_dict()


# --- the value that flows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["postion", "prefix", "grid", "X"])
def test_tokens_refuse_to_change_what_they_do_not_have(name):
    tokens = Tokens(torch.zeros(1, 5, 2), torch.zeros(1, 4), 1, (2, 2))
    with pytest.raises(TypeError, match=name):
        tokens.replace(**{name: None})
    assert tokens.replace(size=None, method_state=3).method_state == 3


# --- models and weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--img-size", 0], "img_size is 0; it must be an integer in [1, 8192]"),
        (["--img-size", -32], "img_size is -32"),
        (["--img-size", 100], "the patches of test_vit are 16 wide; give a multiple, e.g. 96 or 112"),
        (["--img-size", 8], "give a multiple, e.g. 16"),
        (["--img-size", 10**7], "img_size is 10000000"),
        (["--img-size", "9" * 5000], "--img-size is '9999"),
    ],
)
def test_sizes_of_images_that_cannot_be(capsys, words, message):
    assert message in complaint(capsys, "macs", "test_vit", *words)


@pytest.mark.parametrize("command", ["evaluate", "compare", "tune", "finetune", "visualise", "benchmark", "macs"])
def test_an_unknown_model_is_said_first_with_the_nearest(capsys, command):
    assert "unknown model 'deit_smal'; the nearest are" in complaint(capsys, command, "deit_smal")
    assert ", deit_small_patch16_224," in complaint(capsys, command, "--model", "deit_smal")


def test_only_models_that_can_be_patched_are_proposed():
    with pytest.raises(UnknownNameError) as caught:
        create_model("vit_small_patch16_18x2_22")
    assert "18x2" not in str(caught.value).split("the nearest are")[1]


def state(model, wrap):
    return {wrap(key): value for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda key: f"_orig_mod.{key}",
        lambda key: f"module.{key}",
        lambda key: f"_orig_mod.module.{key}",
        lambda key: f"module._orig_mod.{key}",
        lambda key: key.replace("blocks.0.", "blocks.0._orig_mod."),  # compiled block by block
        lambda key: f"_fsdp_wrapped_module.{key.replace('blocks.1.', 'blocks.1._checkpoint_wrapped_module.')}",
    ],
)
def test_weights_of_wrapped_models_load(tmp_path, wrap):
    model = timm.create_model("test_vit")
    torch.save({"state_dict": state(model, wrap)}, tmp_path / "w.pth")
    loaded = create_model("test_vit", checkpoint=tmp_path / "w.pth")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_weights_of_a_compiled_model_load(tmp_path):
    model = timm.create_model("test_vit")
    torch.save(torch.compile(model).state_dict(), tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").keys() == model.state_dict().keys()


def test_files_of_weights_that_are_none(tmp_path, capsys):
    def refused(file, message, *more):
        assert message in complaint(capsys, "evaluate", "test_vit", "--data-dir", tmp_path, "--checkpoint", file, *more)

    def saved(stored):
        torch.save(stored, tmp_path / "w.pth")
        return tmp_path / "w.pth"

    model = timm.create_model("test_vit")
    refused(tmp_path, "is a folder; give the file of weights in it")
    refused("x" * 5000, "there is no file")
    refused(saved({0: torch.zeros(1)}), "has no weights")
    refused(saved({}), "has no weights")
    refused(saved(model.state_dict() | state(model, lambda key: f"module.{key}")), "has some weights twice")
    os.mkfifo(tmp_path / "pipe.pth")
    refused(tmp_path / "pipe.pth", "is not a regular file")
    whole = saved(model.state_dict())
    refused(whole, "create the model with its 1000 classes: --num-classes", "--num-classes", 7)
    refused(whole, "num_classes is -1", "--num-classes", -1)
    headless = {key: value for key, value in model.state_dict().items() if not key.startswith("head.")}
    refused(saved(headless), "the file has no classifier: create the model without one, num_classes=0")


# --- wrappers --------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """As DistributedDataParallel and FSDP hold a model, which need a process group."""

    def __init__(self, model):
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (torch.compile, "model._orig_mod"),
        (nn.DataParallel, "model.module"),
        (Around, "model.module"),
        (lambda model: nn.DataParallel(torch.compile(model)), "model.module._orig_mod"),
        (lambda model: nn.Sequential(nn.Identity(), model), "model.get_submodule('1')"),
    ],
    ids=["compile", "data parallel", "distributed", "both", "sequential"],
)
def test_a_wrapped_model_is_refused_with_what_is_inside(wrap, inside):
    model, images = families.make(VIT), families.images(VIT)
    for work in (patch, macs):
        with pytest.raises(UnsupportedModelError) as caught:
            work(wrap(model))
        assert f"is a wrapper; unwrap it, the model itself is {inside}" in str(caught.value)
    with pytest.raises(SettingError) as caught:
        trace(wrap(patch(model)), images)
    assert f"give {inside}" in str(caught.value)
    found = eval(inside, {"model": wrap(model)})
    assert macs(patch(found)).total < macs(model).total


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_with_what_to_do():
    scripted = torch.jit.trace(families.make(VIT).eval(), families.images(VIT))
    with pytest.raises(UnsupportedModelError, match=r"compiled by TorchScript.* patch the model it was made of"):
        patch(scripted)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--gtp-budgets"], "--gtp-budgets needs a value: an integer, or several"),
        (["compare", "--gtp-budgets", "--json"], "--gtp-budgets needs a value"),
        (["macs", "--method"], "--method needs a value: a name"),
        (["macs", "--method", "--json"], "--method needs a value"),
        (["macs", "--model"], "--model needs a value"),
        (["macs", "--model", "--json"], "--model needs a value"),
        (["macs", "test_vit", "--html"], "--html needs a value: a path"),
        (["evaluate", "--data-dir", ""], "--data-dir is empty; give a path"),
        (["evaluate", "--data-dir="], "--data-dir is empty"),
        (["evaluate", "--checkpoint", ""], "--checkpoint is empty"),
        (["evaluate", ""], "an argument is empty"),
        (["macs", "--method", ""], "unknown method ''"),
        (["macs", "--importance-floor", "much"], "--importance-floor is 'much'; it must be a finite number"),
        (["macs", "--importance-floor", "nan"], "--importance-floor is 'nan'; it must be a finite number"),
        (["evaluate", "--limit", "1.5"], "--limit is '1.5'; it must be an integer"),
        (["evaluate", "--limit", "-1"], "--limit is -1"),
        (["evaluate", "--threads", "-1"], "--threads is -1"),
        (["evaluate", "-b", "0"], "--batch-size is 0"),
        (["evaluate", "-j", "-1"], "--workers is -1"),
        (["evaluate", "--crop-pct", "0"], "--crop-pct is 0.0"),
        (["evaluate", "--interpolation", "bicubicc"], "did you mean 'bicubic'"),
        (["evaluate", "--device", ""], "device '' cannot be used"),
        (["evaluate", "--device", "meta"], "device 'meta' cannot be used: Tensor.item() cannot be called on meta"),
        (["macs", "--alpha", "0.3"], "--alpha is not a setting of the chosen method; gtp has it: add --method gtp"),
        (["macs", "test_vit", "--json=1"], "--json takes no value; write --json or --no-json"),
        (["macs", "test_vit", "--json", "true"], "unexpected argument 'true'"),
        (["macs", "test_vit", "remove", "8"], "did you mean --remove?"),
        (["macs", "test_vit", "--model", "test_vit2"], "unexpected argument 'test_vit'"),
        (["macs", "--img_size", "32"], "unknown flag '--img_size'; did you mean '--img-size'"),
        (["macs", "test_vit", "--remove", "2", "--remove", "3"], "--remove is given twice"),
        (["macs", "--method", "gtp", "--method", "tome"], "--method is given twice"),
        (["models", "--pattern", "x"], "unknown flag '--pattern'"),
        (["models", "*18x2*"], "vit_base_patch16_18x2_224: blocks[0] is ParallelThingsBlock"),
        (["chek"], "did you mean 'check'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_on_the_command_line_get_one_line(capsys, words, message):
    assert message in complaint(capsys, *words)


@pytest.mark.parametrize("mistake", [["--nonsense"], ["--nonsense", "3"], ["-x"], ["--"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("command", ["benchmark", "evaluate", "compare", "tune", "finetune", "check"])
def test_every_command_answers_unknown_flags_and_words_in_one_line(capsys, command, mistake):
    assert "unknown flag" in (line := complaint(capsys, command, *mistake)) or "unexpected argument" in line


def test_negative_numbers_and_several_values_are_no_flags(capsys):
    words = ["macs", "test_vit", "--method", "tome", "--r", "inflection:4:-1", "--json"]
    assert main(words) == ExitCode.OK
    assert main(["macs", "--model", "test_vit", "--remove", "2", "3", "4", "4", "5", "6", "--json"]) == ExitCode.OK
    assert capsys.readouterr().err == ""


def test_models_lists_only_what_patch_takes(capsys):
    assert main(["models", "vit_*wee_patch*"]) == ExitCode.OK
    listed = capsys.readouterr().out.split()
    assert listed == ["vit_wee_patch16_reg1_gap_256"]
    others = ("vit_pwee_patch16_reg1_gap_256", "vit_dwee_patch16_reg1_gap_256")  # the second is in newer timms only
    for name in filter(timm.is_model, others):
        with pytest.raises(UnsupportedModelError):
            patch(create_model(name, meta=True))
    assert patch(create_model(listed[0], meta=True))


def test_a_name_that_is_too_long_for_a_file_is_one_line(capsys):
    line = complaint(capsys, "embed", "--output", "a" * 5000)
    assert "is too long for the name of a file; give a shorter one" in line
