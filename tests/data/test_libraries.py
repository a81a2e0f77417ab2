"""Models of other libraries: by name in every command, and models around a ViT of open_clip."""

import json
import shutil
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gtp_vit import GTPError, GTPPlus, Identity, create_model, export, macs, patch, read_recipe
from gtp_vit.backbones import BACKBONES, hf_library, libraries, small_models
from gtp_vit.backbones.host import find_vit
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.models import sources
from gtp_vit.models.factory import names, unsupported_reason
from gtp_vit.patching import tower_of
from gtp_vit.testing import families
from support.engines import needs_onnxruntime
from support.open_clips import open_clip_models

needs_transformers = pytest.mark.skipif(not small_models.HAS_TRANSFORMERS, reason="transformers needs Python 3.11")
REDUCING = GTPPlus(remove=(9, 0, 9, 0))


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for index in range(24):
        path = folder / f"class{index % 2}" / f"{index:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A Hugging Face folder: a classifier of two classes and its processor."""
    import transformers

    folder = tmp_path_factory.mktemp("saved") / "small-vit"
    torch.manual_seed(0)
    labels = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    model = small_models.hugging_face("ViTForImageClassification", "ViTConfig", **labels)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.15 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


@pytest.mark.slow
@needs_transformers
def test_a_folder_of_hugging_face_in_every_command(saved, pictures, tmp_path, capsys):
    name, data = f"hf:{saved}", ("--data-dir", pictures, "-j", "0")
    code, out, err = run(capsys, "evaluate", name, *data, "--method", "tome", "--r", "9", "--json")
    assert code == ExitCode.OK, err
    rows = json.loads(out)["rows"]
    assert [row["images"] for row in rows] == [24, 24]
    assert rows[1]["agreement"] < 100.01
    assert rows[1]["kl"] > 0
    code, out, err = run(capsys, "macs", name, "--method", "gtp", "--propagate", "5", "--json")
    assert (code, err) == (ExitCode.OK, "")
    assert json.loads(out)["unreduced"] == macs(create_model(name)).total
    code, _, err = run(capsys, "benchmark", name, "--rounds", "3", "-b", "2")
    assert code == ExitCode.OK, err
    words = ("tune", name, *data, "--macs", "0.8", "--search-passes", "1", "--output", tmp_path / "r.json")
    code, _, err = run(capsys, *words)
    assert code == ExitCode.OK, err
    assert read_recipe(tmp_path / "r.json").model == "hf:small-vit"  # no folder of this machine
    code, _, err = run(capsys, "visualise", name, pictures / "class0" / "00.png", "--output", tmp_path / "seen")
    assert code == ExitCode.OK, err
    assert (tmp_path / "seen" / "0-00.png").exists()


@pytest.mark.slow
@needs_transformers
@needs_onnxruntime
def test_a_folder_of_hugging_face_is_exported_with_its_preparation_and_labels(saved, pictures, tmp_path, capsys):
    words = ("export", f"hf:{saved}", "--data-dir", pictures, "-j", "0", "--output", tmp_path, "--method", "deploy")
    code, _, err = run(capsys, *words)
    assert code == ExitCode.OK, err
    path = tmp_path / "hf_small-vit-gtp_plus-f32.onnx"
    about = ExportedFile.read(path).metadata.to_dict()
    assert about["model"] == "hf:small-vit"
    assert about["classes"] == ["cat", "dog"]
    assert about["input"]["crop_mode"] == "squash"
    assert about["input"]["mean"] == (0.5, 0.5, 0.5)
    assert "resize to 64 x 64, whatever its shape (bilinear)" in path.with_name(f"{path.name}.md").read_text()
    code, out, err = run(capsys, "evaluate", path, "--data-dir", pictures, "--checkpoint", saved, "-j", "0", "--json")
    assert code == ExitCode.OK, err
    assert json.loads(out)["rows"][1]["images"] == 24


@needs_transformers
def test_images_are_prepared_by_the_models_own_processor(saved, pictures):
    import transformers

    model = create_model(f"hf:{saved}")
    dataset = open_images(model, DataSettings(data_dir=pictures, transform=sources.transform_of(f"hf:{saved}", model)))
    processor = transformers.AutoImageProcessor.from_pretrained(saved)
    picture = Image.open(pictures / "class0" / "00.png")
    assert torch.equal(dataset[0].image, processor(picture, return_tensors="pt")["pixel_values"][0])
    assert dataset[0].image.shape == (3, 64, 64)
    with pytest.raises(GTPError, match="the preprocessing for the weights of small-vit is unknown"):
        open_images(model, DataSettings(data_dir=pictures))


@needs_transformers
def test_of_models_of_images_and_texts_the_image_part_is_run(tmp_path, capsys):
    for name, config in (("CLIPModel", "CLIPVisionConfig"), ("SiglipModel", "SiglipVisionConfig")):
        small_models.hugging_face(name, config).save_pretrained(tmp_path / name)
        for meta in (True, False):
            model = create_model(f"hf:{tmp_path / name}", meta=meta)
            assert type(model).__name__ == hf_library.VISION_ONLY_CLASSES[name]
        capsys.readouterr()
        code, _, err = run(capsys, "benchmark", f"hf:{tmp_path / name}", "--rounds", "3", "-b", "1")
        assert (code, err) == (ExitCode.OK, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["macs", "torchvision:vit_b_17"],
            "unknown model 'torchvision:vit_b_17'; the nearest are torchvision:vit_b_16",
        ),
        (["macs", "open_clip:ViT-Q"], "; gtp-vit models 'open_clip:*' lists all"),
        (["macs", "open_clip:RN50"], "is not a supported ViT"),
        (["macs", "torchvision:"], "'torchvision:' has no model name after the colon"),
        (["macs", "hf:"], "'hf:' has no model name after the colon"),
        (["evaluate", "torchvision:vit_b_16", "--data-dir", "x"], "has random weights; give --pretrained"),
        (["evaluate", "torchvision:vit_b", "--data-dir", "x"], "unknown model 'torchvision:vit_b'"),
        (
            ["evaluate", "open_clip:ViT-B-32", "--data-dir", "x", "--pretrained"],
            "say which weights: open_clip:ViT-B-32/",
        ),
        (["evaluate", "open_clip:ViT-B-32/no", "--data-dir", "x", "--pretrained"], "has no weights called 'no'"),
        (["macs", "hf:nowhere/at/all"], "transformers cannot open 'nowhere/at/all'"),
        (["finetune", "hf:SAVED", "--data-dir", "x", "--output", "y"], "only a ViT itself can be finetuned here"),
        (["evaluate", "hf:SAVED", "--data-dir", "x", "--img-size", "32"], "has its own weights and sizes; remove"),
        (["evaluate", "hf:SAVED", "--data-dir", "x", "--crop-pct", "0.9"], "remove --crop-pct"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@needs_transformers
def test_mistakes_get_one_line(words, message, saved, capsys):
    code, out, err = run(capsys, *(word.replace("SAVED", str(saved)) for word in words))
    assert code == ExitCode.USAGE
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_missing_library_is_named(monkeypatch, capsys):
    libraries._open_clip.cache_clear()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    code, _, err = run(capsys, "macs", "open_clip:ViT-B-32")
    assert (code, "pip install 'gtp-vit[open_clip]'" in err) == (ExitCode.USAGE, True)
    assert not any(name.startswith("open_clip:") for name in names("*"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "macs", "hf:some/model")
    assert (code, "pip install 'gtp-vit[hf]'" in err) == (ExitCode.USAGE, True)
    libraries._open_clip.cache_clear()


def test_models_lists_what_is_accepted(capsys):
    code, out, _ = run(capsys, "models", "torchvision:*")
    assert (code, out.split()) == (
        ExitCode.OK,
        [f"torchvision:vit_{each}" for each in ("b_16", "b_32", "h_14", "l_16", "l_32")],
    )
    for name in ("open_clip:ViT-B-32", "open_clip:ViT-B-16-SigLIP", "open_clip:coca_ViT-B-32"):
        assert unsupported_reason(name) is None
    for name in ("open_clip:RN50", "open_clip:convnext_base"):
        assert "is not a supported ViT" in unsupported_reason(name)
    assert {"open_clip:ViT-B-32", "torchvision:vit_b_16", "deit_tiny_patch16_224"} <= set(names("*"))


def test_a_family_brings_the_names_of_all_its_models():
    """No list of timm's modules: whichever of them uses a family's class is asked."""
    for family in ("timm_vit", "timm_eva", "timm_beit", "timm_qwen"):
        backbone = BACKBONES[family]
        for name in {model.split(".")[0] for model in timm.list_models(module=backbone.module)}:
            assert name in names(name)
    assert {"deit_tiny_patch16_224", "vit_tiny_r_s16_p8_224", "lvvit_s", "fashion_vit"} <= set(names("*"))
    if timm.is_model("qwen3_vit_88m"):
        assert unsupported_reason("qwen3_vit_88m") is None


def test_torchvision_by_name(pictures):
    model = create_model("torchvision:vit_b_16", img_size=32, num_classes=2)
    transform = sources.transform_of("torchvision:vit_b_16", model)
    assert find_vit(model).inputs.classes == 2
    assert transform(Image.open(pictures / "class0" / "00.png")).shape == (3, 224, 224)


def test_models_around_a_vit_of_open_clip():
    for model, path in open_clip_models():
        torch.manual_seed(0)
        model.eval()
        side = 224 if "trunk" in path else 64
        images, fast = torch.randn(2, 3, side, side), patch(model, GTPPlus(remove=5))
        assert find_vit(model).path == path
        assert type(fast).__name__ == type(model).__name__
        with torch.no_grad():
            expected = model.encode_image(images)
            torch.testing.assert_close(patch(model, Identity()).encode_image(images), expected, atol=5e-6, rtol=5e-6)
            assert fast.encode_image(images).shape == expected.shape
            assert not torch.equal(fast.encode_image(images), expected)
            words = torch.randint(0, 50, (2, 8))
            assert torch.equal(fast.encode_text(words), model.encode_text(words))
        assert macs(fast).total < macs(model).total
        assert tower_of(fast).reduction.method == GTPPlus(remove=5)


@pytest.mark.slow
@needs_onnxruntime
def test_a_hugging_face_encoder_is_exported(tmp_path):
    if not small_models.HAS_TRANSFORMERS:
        pytest.skip("transformers needs Python 3.11")
    found = export(patch(families.make("hf_clip_projection"), REDUCING), tmp_path / "clip.onnx")
    assert found.metadata.output == ("embedding", 16)
    assert max(check.max_difference for check in found.checks) < 1e-4


# What a processor, a configuration and a file of weights may disagree about


def without(folder, to, *lost):
    """A copy of a folder whose weights lack some."""
    shutil.copytree(folder, to)
    weights = {key: value for key, value in load_file(to / "model.safetensors").items() if key not in lost}
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@needs_transformers
def test_weights_that_are_missing_are_not_random(saved, pictures, tmp_path, capsys):
    (lost,) = (key for key in load_file(saved / "model.safetensors") if ".2." in key and "query.weight" in key)
    folder = without(saved, tmp_path / "less", lost)
    code, out, err = run(capsys, "evaluate", f"hf:{folder}", "--data-dir", pictures, "-j", "0")
    assert (code, out, err.count("\n")) == (ExitCode.USAGE, "", 1)
    assert "lack vit.layers.2.attention.q_proj.weight" in err
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    code, out, err = run(capsys, "evaluate", f"hf:{folder}", "--data-dir", pictures, "-j", "0")
    assert (code, out, err.count("\n"), "transformers cannot load" in err) == (ExitCode.USAGE, "", 1, True)


@needs_transformers
def test_a_pooler_without_weights_is_left_out(tmp_path):
    families.make("hf_vit_base").save_pretrained(tmp_path / "whole")
    folder = without(tmp_path / "whole", tmp_path / "less", "pooler.dense.weight", "pooler.dense.bias")
    assert create_model(f"hf:{folder}").pooler is None
    assert find_vit(create_model(f"hf:{folder}")).output.kind == "tokens"
    assert find_vit(create_model(f"hf:{tmp_path / 'whole'}")).output.kind == "features"


@needs_transformers
def test_a_model_that_takes_any_size_is_measured_at_its_processors(pictures, tmp_path, capsys):
    """As DINOv2's: its configuration has the size of its pre-training."""
    import transformers

    model = small_models.hugging_face("Dinov2ForImageClassification", "Dinov2Config", num_labels=2, image_size=144)
    model.save_pretrained(tmp_path)
    size = {"size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}
    transformers.BitImageProcessor(**size).save_pretrained(tmp_path)
    small = small_models.hugging_face("Dinov2ForImageClassification", "Dinov2Config", num_labels=2)
    capsys.readouterr()
    code, out, err = run(capsys, "evaluate", f"hf:{tmp_path}", "--data-dir", pictures, "-j", "0", "--json")
    assert code == ExitCode.OK, err
    assert json.loads(out)["rows"][0]["gmacs"] * 1e9 == pytest.approx(macs(small).total, rel=1e-3)
    assert json.loads(run(capsys, "macs", f"hf:{tmp_path}", "--json")[1])["unreduced"] == macs(small).total
    assert sources.preprocessing_of(f"hf:{tmp_path}")["crop_pct"] == 0.8
    create_model(f"hf:{tmp_path}").save_pretrained(tmp_path / "again")  # the configuration still fits the weights
    assert json.loads((tmp_path / "again" / "config.json").read_text())["image_size"] == 144


@needs_transformers
def test_a_processor_of_another_size_is_refused(saved, pictures, tmp_path, capsys):
    import transformers

    shutil.copytree(saved, tmp_path / "other")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "other")
    code, out, err = run(capsys, "evaluate", f"hf:{tmp_path / 'other'}", "--data-dir", pictures, "-j", "0")
    assert (code, out, err.count("\n")) == (ExitCode.USAGE, "", 1)
    assert "makes images of (32, 32), and the model takes (64, 64)" in err


@needs_transformers
def test_what_timm_has_no_words_for_is_told_as_it_is():
    import transformers

    size = {"size": {"height": 80, "width": 80}, "crop_size": {"height": 64, "width": 64}}
    for processor in (
        transformers.DeiTImageProcessor(**size),
        transformers.ViTImageProcessor(do_normalize=False),
        transformers.CLIPImageProcessor(rescale_factor=1 / 128),
    ):
        assert list(hf_library.HFImageTransform(processor).preprocessing()) == ["processor"]
    found = hf_library.HFImageTransform(transformers.CLIPImageProcessor()).preprocessing()
    assert (found["crop_pct"], found["crop_mode"], found["interpolation"]) == (1.0, "center", "bicubic")


@needs_transformers
def test_a_classifier_for_no_classes_gives_features():
    model = small_models.hugging_face("ViTForImageClassification", "ViTConfig", num_labels=0).eval()
    assert find_vit(model).output == ("features", 24)


@needs_transformers
def test_a_recipe_in_a_folder_is_mentioned(tmp_path, saved):
    model = create_model(f"hf:{saved}")
    patch(model, REDUCING).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"gtp_vit\.json in this folder is not used by itself; give --method"):
        create_model(f"hf:{tmp_path}")
