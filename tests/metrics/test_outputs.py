"""What is measured is right: classes, in eval mode, finite outputs; what cannot be is refused before the work."""

import csv
import dataclasses
import json
import math
import subprocess

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import (
    ATS,
    GTP,
    GTPError,
    GTPPlus,
    Recipe,
    SearchConfig,
    Target,
    Tracking,
    create_model,
    finetune,
    macs,
    patch,
    trace,
    tune,
    tune_and_patch,
)
from gtp_vit.backbones import small_models
from gtp_vit.cli import model_flags
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.cli.commands import benchmark as benchmark_command
from gtp_vit.cli.commands import evaluate as evaluate_command
from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.metrics.registry import check_class_output
from gtp_vit.models import bundled
from gtp_vit.patching import host_of
from gtp_vit.profiling import environment
from gtp_vit.profiling.benchmark import benchmark_models
from gtp_vit.recipes.recipe import sizes_of_vit
from gtp_vit.report.plot import line_plot
from gtp_vit.runs.journal import Journal
from gtp_vit.testing import families
from gtp_vit.tuning import compare as comparison
from gtp_vit.tuning import local_search
from gtp_vit.tuning.compare import compare, models_of, plan_comparison
from reproduction.measure import oversmoothing


def small(name="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    return timm.create_model(name, **{**small_models.SMALL, **settings}).eval()


def in_memory(count=24):
    return InMemoryDataset(families.images("vit", count), torch.arange(count) % 10)


def compared(model, plans):
    return compare(models_of(model, plans), plans, in_memory())


def forbid_images(model):
    """No image may reach the model."""
    model.patch_embed.register_forward_hook(lambda *_: pytest.fail("an image was run"))
    return model


WITHOUT_CLASSES = {
    "features": (lambda: small(num_classes=0), "has no classifier: its output is 24 features"),
    "one output": (lambda: small(num_classes=1), "has one output, .* two or more classes"),
    "every token": (lambda: small(global_pool=""), "an output for every token, .* global_pool"),
    "clip": (lambda: small("vit_base_patch16_clip_quickgelu_224", num_classes=512), "embedding of 512 numbers"),
    "distilled features": (
        lambda: small("deit_tiny_distilled_patch16_224", num_classes=0),
        "has no classifier: its output is 24 features",
    ),
}
MEASURED = {
    "tune": lambda model: tune(model, families.images("vit", 24), Target("macs", 0.7), search=SearchConfig(passes=1)),
    "tune_and_patch": lambda model: tune_and_patch(model, families.images("vit", 24), search=SearchConfig(passes=1)),
    "evaluate": lambda model: evaluate({UNREDUCED: model, "gtp": patch(model, GTP(propagate=4))}, in_memory()),
    "compare": lambda model: compared(model, plan_comparison(model, ("gtp",), [0.8 * macs(model).total])[0]),
    "finetune": lambda model: finetune(model, GTP(propagate=4), in_memory(), output="/dev/null/nothing"),
}


AS_CLASSES = {
    "tune": lambda model: tune(
        model, families.images("vit", 24), Target("macs", 0.7, "classes"), search=SearchConfig(passes=1)
    ),
    "evaluate": lambda model: evaluate({UNREDUCED: model}, in_memory(), measure="classes"),
    "finetune": MEASURED["finetune"],
}


@pytest.mark.parametrize("measure", AS_CLASSES)
@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
def test_models_without_classes_are_not_measured_as_classes(kind, measure):
    make, message = WITHOUT_CLASSES[kind]
    with pytest.raises(GTPError, match=message) as refused:
        AS_CLASSES[measure](forbid_images(make()))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", ["evaluate", "compare", "tune"])
def test_commands_refuse_a_measure_that_does_not_fit_before_they_open_images(command, tmp_path, monkeypatch, capsys):
    save_file(timm.create_model("test_vit", num_classes=1).state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr(model_flags, "open_images", lambda *_: pytest.fail("it opened the images"))
    words = [command, "test_vit", "--num-classes", "1", "--checkpoint", str(tmp_path / "w.safetensors")]
    assert main([*words, "--data-dir", str(tmp_path), "--measure", "classes"]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "the model has one output" in err) == ("", 1, True)


@pytest.mark.parametrize("family", families.NAMES)
def test_models_with_classes_are_not_refused(family):
    model = families.make(family)
    output = host_of(model).output
    if output.kind != "classes":
        with pytest.raises(GTPError, match="agreement, KL and accuracy need one score for each class"):
            check_class_output(model)
        return
    with torch.no_grad():
        assert families.output(model, families.images(family)).shape[1] == output.width == 10
    check_class_output(model)
    check_class_output(patch(model, GTP(propagate=4)).train())
    assert host_of(model).backbone.blocks(host_of(model).tower)[0].training  # as the caller left it


def test_a_classifier_that_was_put_in_afterwards_counts():
    model = small(num_classes=0)
    model.head = torch.nn.Linear(24, 10)
    check_class_output(model)
    clip = small("vit_base_patch16_clip_quickgelu_224", num_classes=512)
    clip.head.bias.data += 0.1  # was trained, so it is no projection of CLIP's, which has none
    check_class_output(clip)


def test_outputs_that_are_no_scores_of_classes_are_refused_where_nothing_else_is_known():
    class Pixels(torch.nn.Conv2d):
        """No ViT; it returns a value for each pixel."""

    with pytest.raises(GTPError, match=r"unreduced returns \[24, 1, 64, 64\]"):
        evaluate({UNREDUCED: Pixels(3, 1, 1)}, in_memory())


def shaky():
    """In train mode every pass is another one; one block is in eval mode, as users freeze them."""
    model = small(drop_path_rate=0.5, proj_drop_rate=0.5)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.15 * torch.randn(parameter.shape)
    return model


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


IN_EVAL_MODE = {
    "tune": lambda model: (
        tune(model, families.images("vit", 24), Target("macs", 0.7), search=SearchConfig(passes=2)).measured
    ),
    "evaluate": lambda model: [s["kl"].value for s in MEASURED["evaluate"](model).scores],
    "compare": lambda model: [r.score["kl"].value for r in MEASURED["compare"](model)[0]],
    "oversmoothing": lambda model: oversmoothing(model, families.images("vit"), 4),
    "trace": lambda model: trace(patch(model, GTP(propagate=4)), families.images("vit")).layers[2].kept.tolist(),
}


@pytest.mark.parametrize("measure", IN_EVAL_MODE)
def test_a_model_in_train_mode_is_measured_in_eval_mode_and_stays_in_train_mode(measure):
    model = shaky()
    expected = IN_EVAL_MODE[measure](model)
    model.train()
    model.blocks[1].eval()
    before = modes(model)
    assert IN_EVAL_MODE[measure](model) == expected
    assert modes(model) == before


def test_accelerate_returns_a_model_in_the_mode_of_the_callers():
    model = shaky().train()
    model.blocks[1].eval()
    before = modes(model)
    fast = tune_and_patch(model, families.images("vit", 24), search=SearchConfig(passes=2))
    assert modes(model) == before
    assert {name: mode for name, mode in modes(fast).items() if name in before} == before
    assert fast.reducer.training


def test_speed_is_measured_in_eval_mode_also_of_models_that_share_blocks():
    model, seen = shaky().train(), set()
    model.blocks[1].eval()
    fast = patch(model, GTP(propagate=4))
    before = modes(model), modes(fast)
    for one in (model, fast):
        one.register_forward_hook(lambda one, *_: seen.add((one.training, one.norm.training)))
    benchmark_models({"unreduced": model, "gtp": fast}, families.images("vit"), rounds=3)
    assert seen == {(False, False)}
    assert (modes(model), modes(fast)) == before


def test_the_mode_comes_back_when_the_work_is_interrupted():
    model = shaky().train()
    model.blocks[2].eval()
    before = modes(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    with eval_mode(model):
        assert not any(modes(model).values())
    model.patch_embed.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate({UNREDUCED: model}, in_memory())
    assert modes(model) == before


def test_a_distilled_model_in_train_mode_which_returns_a_pair_can_be_measured():
    model = small("deit_tiny_distilled_patch16_224")
    model.set_distilled_training(True)
    expected = MEASURED["evaluate"](model).scores[1]["kl"]
    assert isinstance(model.train()(families.images("vit")), tuple)
    assert MEASURED["evaluate"](model).scores[1]["kl"] == expected


def test_macs_of_images_are_counted_in_eval_mode():
    model = shaky()
    images = families.images("vit", 8)
    fast = patch(model, ATS())
    expected = macs(fast, images=images)
    fast.train()
    assert macs(fast, images=images) == expected
    assert fast.training


def spoil(model, every):
    """Some of its outputs are no numbers: of images `every`, 2 `every`, ... of a batch."""

    def hook(_, __, logits):
        logits = logits.clone()
        logits[::every, 3] = torch.tensor([float("nan"), float("inf"), float("-inf")]).repeat(99)[
            : len(logits[::every])
        ]
        return logits

    model.register_forward_hook(hook)
    return model


def test_outputs_that_are_not_finite_are_counted_and_leave_no_kl():
    model = families.make("vit")
    fast = spoil(patch(model, GTP(propagate=4)), 4)
    found = evaluate({UNREDUCED: model, "gtp": fast, "same": model}, in_memory(), batch_size=24)
    unreduced, gtp, same = found.scores
    assert (unreduced.not_finite, gtp.not_finite, same.not_finite) == (0, 6, 0)
    assert math.isnan(gtp["kl"].value)
    assert gtp["agreement"].value <= 75  # where there is no output, there is no agreement
    assert same["agreement"].value == 100
    assert found.not_finite() == ["gtp: 6 of 24 images have outputs that are not finite"]


def test_an_unreduced_model_whose_outputs_are_not_finite_is_refused():
    model = spoil(families.make("vit"), 20)
    with pytest.raises(GTPError, match=r"not finite on 2 of 24 images \(the first is image 0\).*nothing to compare"):
        evaluate({UNREDUCED: model, "gtp": patch(families.make("vit"), GTP(propagate=4))}, in_memory(), batch_size=24)


def test_a_journal_keeps_outputs_that_are_not_finite(tmp_path):
    model = families.make("vit")
    models = {UNREDUCED: model, "gtp": spoil(patch(model, GTP(propagate=4)), 4)}
    journal = Journal(tmp_path / "x.journal", {})
    first = evaluate(models, in_memory(), batch_size=24, journal=journal)
    journal.close(finished=False)
    lines = (tmp_path / "x.journal").read_text().splitlines()
    json.loads(lines[2].split(" ", 1)[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    with Journal(tmp_path / "x.journal", {}) as journal:
        assert evaluate(models, in_memory(), batch_size=24, journal=journal).not_finite() == first.not_finite()


def spoiled_method(name, every=50):
    """patch, whose models of one method have outputs that are not finite."""

    def patched(model, method, **options):
        fast = patch(model, method, **options)
        return spoil(fast, every) if fast.reduction.method.name == name else fast

    return patched


@pytest.mark.slow
def test_evaluate_says_which_model_is_not_finite_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_command, "patch", spoiled_method("gtp"))
    words = ["evaluate", "--method", "gtp", "--propagate", "4", "--limit", "100", "-b", "100"]
    for ending in ("csv", "json"):
        assert main([*words, "--results-file", str(tmp_path / f"r.{ending}")]) == ExitCode.INCOMPLETE
    out, err = capsys.readouterr()
    sentence = "gtp: 2 of 100 images have outputs that are not finite"
    assert sentence in err
    assert sentence in out
    assert "none: 2 not finite" in out
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["not_finite"], row["kl"]) for row in rows] == [("0", "0.0"), ("2", "nan")]
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [(row["not_finite"], row["kl"]) for row in rows] == [(0, 0.0), (2, None)]


@pytest.mark.slow
def test_compare_ends_and_says_which_method_is_not_finite(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "patch", spoiled_method("tome"))
    words = ["compare", "--limit", "100", "-b", "100", "--rounds", "0", "--macs", "0.65", "--methods", "tome", "gtp"]
    assert main([*words, "--output", str(tmp_path)]) == ExitCode.INCOMPLETE
    assert capsys.readouterr().err.count("2 of 100 images have outputs that are not finite") == 1
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["best_at_budget"].split(" @")[0] for row in rows] == [UNREDUCED, "gtp", "gtp"]
    page = (tmp_path / "report.html").read_text()
    assert "not finite, or it is 0, which no logarithmic axis has: tome.</p>" in page
    assert page.count("class=best") == 1


def test_plots_draw_what_is_finite_and_name_the_rest():
    lines = {
        "a": [(1.0, 0.5), (2.0, math.nan)],
        "b": [(1.0, math.inf), (2.0, -math.inf)],
        "c": [(1.0, 0.1), (2.0, 0.2)],
    }
    for log_y in (False, True):
        drawn = line_plot(lines, "x", "y", log_y=log_y)
        assert drawn.count("<circle") == 3
        assert ": a, b.</p>" in drawn
        assert "nan" not in drawn.split("<p>")[0]
    assert line_plot({"c": lines["c"]}, "x", "y").endswith("</svg>")
    assert "<svg" not in line_plot({"b": lines["b"]}, "x", "y")


def test_tune_refuses_settings_whose_held_out_outputs_are_not_finite(monkeypatch):
    model, images = families.make("vit"), families.images("vit", 30)
    measure = local_search.DamageEvaluator.damage

    def spoiled(self, method, first, last):
        found = measure(self, method, first, last)
        spoilt = {**found.reduced, "kl": found.reduced["kl"] * math.nan}
        return dataclasses.replace(found, reduced=spoilt) if last == 30 else found

    monkeypatch.setattr(local_search.DamageEvaluator, "damage", spoiled)
    with pytest.raises(GTPError, match=r"not finite on 6 of 6 held-out images"):
        tune(model, images, Target("macs", 0.7), search=SearchConfig(passes=2))


def test_tune_says_so_if_no_schedule_has_finite_outputs(tmp_path, monkeypatch):
    monkeypatch.setattr(local_search, "patch", spoiled_method("gtp_plus", 1))
    journal = Journal(tmp_path / "x.journal", {})
    with pytest.raises(GTPError, match="gtp_plus's outputs are not finite with any of the"):
        tune(
            families.make("vit"),
            families.images("vit", 30),
            Target("macs", 0.7),
            search=SearchConfig(passes=2),
            tracking=Tracking(journal=journal),
        )
    journal.close(finished=False)
    for line in (tmp_path / "x.journal").read_text().splitlines()[1:]:
        json.loads(line.split(" ", 1)[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--macs", "0.65", "--methods", "gtp", "gtp"], "the method gtp is given more than once"),
        (["--macs", "0.65", "0.65"], "GMACs is given more than once; give each once"),
        (["--recipes", "RECIPE", "RECIPE"], "the recipe GTPPlus("),
        (["--macs", "0.01"], "no method can be compared here: gtp at"),
    ],
)
def test_comparisons_that_cannot_end_are_refused_before_the_first_image(words, message, tmp_path, monkeypatch, capsys):
    model = create_model("fashion_vit")
    method = GTPPlus.at_strength(host_of(model).vit, 0.5)
    recipe = Recipe("fashion_vit", sizes_of_vit(host_of(model).vit), method)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    monkeypatch.setattr(comparison, "evaluate", lambda *_, **__: pytest.fail("it began to work"))
    words = [word.replace("RECIPE", str(tmp_path / "recipe.json")) for word in words]
    assert main(["compare", *words, "--output", str(tmp_path / "out")]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert (out, message in err, err.count("\n")) == ("", True, 1)


def test_budgets_that_are_near_each_other_have_different_names(capsys):
    words = ["compare", "--macs", "0.65", "0.652", "--methods", "gtp", "--limit", "40", "--rounds", "0", "--json"]
    assert main(words) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len({row["best_at_budget"] for row in rows}) == 3
    model = families.make("vit")
    plans, _ = plan_comparison(model, ("gtp",), [0.8 * macs(model).total])
    with pytest.raises(GTPError, match="the name unreduced is given more than once"):
        compared(forbid_images(model), [plans[0], *plans])


@pytest.mark.parametrize("method", ["ats", "gtp"])
def test_costs_are_counted_before_the_first_image_is_evaluated(method, monkeypatch, capsys):
    def fail(*_, images=None):
        assert (images is not None) == (method == "ats" and not fails)
        fails.append(images)
        if len(fails) == 2:
            raise GTPError("no costs")
        return macs(create_model("fashion_vit"))

    fails = []
    monkeypatch.setattr(evaluate_command, "macs", fail)
    monkeypatch.setattr(evaluate_command, "evaluate", lambda *_, **__: pytest.fail("it began to work"))
    assert main(["evaluate", "--method", method]) == ExitCode.USAGE
    assert capsys.readouterr().err == "gtp-vit: no costs\n"


def test_benchmark_asks_for_enough_images_before_it_times(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "a" / "0.png")
    monkeypatch.setattr(benchmark_command, "interleave", lambda *_, **__: pytest.fail("it began to work"))
    words = ["benchmark", "test_vit", "-b", "1", "2", "--data-dir", str(tmp_path), "--rounds", "3"]
    assert main(words) == ExitCode.USAGE
    assert "a batch needs 2 images, but only 1 could be read" in capsys.readouterr().err


@pytest.mark.slow
def test_visualise_says_what_share_of_the_removed_tokens_is_lost(tmp_path, capsys):
    words = ["visualise", "--method", "gtp", "--propagate", "8", "--graph", "spatial", "--json"]
    assert main([*words, "--output", str(tmp_path)]) == ExitCode.OK
    pictures = json.loads(capsys.readouterr().out)["pictures"]
    model = patch(create_model("fashion_vit"), GTP(propagate=8, graph="spatial"))
    images = bundled.normalise(bundled.sample_images()[0][:3])
    expected = [round(float(trace(model, image[None]).lost()[0]), 4) for image in images]
    assert [picture["lost"] for picture in pictures.values()] == expected
    assert any(0 < lost < 1 for lost in expected)


def test_the_commit_of_a_page_is_not_that_of_the_users_repository(tmp_path, monkeypatch):
    installed = tmp_path / ".venv" / "lib" / "python3" / "site-packages" / "gtp_vit" / "profiling" / "environment.py"
    installed.parent.mkdir(parents=True)

    def git(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *user, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "the user's own")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment.commit() == "installed package"
    source = tmp_path / "src" / "gtp_vit" / "profiling" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(source))
    assert len(environment.commit()) >= 7
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as git sets it for its hooks
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment.commit() == "installed package"


def test_benchmark_names_the_kernels_that_it_timed(capsys):
    from gtp_vit import kernels

    assert main(["benchmark", "--rounds", "3", "--batch-size", "1", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] == kernels.status()
    assert not any("gradients are on" in text for text in found["verdicts"])


@pytest.mark.parametrize("name", ["results.csv", "results.json", "report.html"])
def test_compare_asks_for_all_its_files_before_the_work(tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(model_flags, "create_model", lambda *_, **__: pytest.fail("it made a model"))
    assert main(["compare", "--output", str(tmp_path)]) == ExitCode.USAGE
    assert f"{name}: it is a folder" in capsys.readouterr().err


def test_tune_says_which_images_the_model_does_not_take():
    model, images = families.make("vit"), families.images("vit", 24)
    for given, message in (
        (images.double(), "images are torch.float64, but the model is torch.float32"),
        (images[:, :1], "images have 1 channels, but the model takes 3"),
        (images[..., :32], "images are 64 x 32, but the model takes 64 x 64"),
    ):
        with pytest.raises(GTPError, match=message):
            tune(model, given, Target("macs", 0.7), search=SearchConfig(passes=1))
