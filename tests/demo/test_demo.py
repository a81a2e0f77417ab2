"""The demo without a browser: what is read, computed and written, and what is refused."""

import base64
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import gtp_vit
from gtp_vit import METHODS, ToMe, create_model, patch, trace
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.core.backbone import Output
from gtp_vit.data.image_file import ORIENTATION
from gtp_vit.demo import serve, upload
from gtp_vit.demo.demo_model import (
    Example,
    bundled_examples,
    make_demo_model,
    python_for,
    read_examples,
    recipe_at,
    settings_at,
)
from gtp_vit.demo.exported_model import inspect_file, make_exported_subject
from gtp_vit.demo.inspection import inspect_picture, time_columns
from gtp_vit.demo.markup import data_url, file_html, inspection_html, trace_data
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.metadata import ExportMetadata
from gtp_vit.engines.preprocessing import Preprocessing
from gtp_vit.errors import GTPError
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.models import bundled
from gtp_vit.patching import host_of
from gtp_vit.recipes.defaults import default_method
from support.pictures import bomb


@pytest.fixture(scope="module")
def subject():
    return make_demo_model("fashion_vit", create_model("fashion_vit"), bundled_examples(), "gtp_vit.create_model('x')")


@pytest.fixture(scope="module")
def encoder():
    """A model without classes, with random weights and three examples that differ."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=0).eval()
    noise = torch.randint(0, 255, (3, 160, 160, 3), dtype=torch.uint8)
    examples = [Example(f"noise <{place}>", Image.fromarray(each.numpy())) for place, each in enumerate(noise)]
    return make_demo_model("test_vit", model, examples, "...")


# Pictures that people send


def saved(tmp_path, picture, name, **options):
    path = tmp_path / name
    picture.save(path, **options)
    return path


def test_exif_turns_a_picture_upright(tmp_path):
    picture = Image.new("RGB", (40, 20), "red")
    picture.paste("blue", (0, 0, 10, 20))  # left when upright
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # stored turned by 90 degrees
    path = saved(tmp_path, picture.transpose(Image.Transpose.ROTATE_90), "photo.jpg", exif=exif, quality=95)
    found, notes = upload.read_upload(path)
    assert found.size == (40, 20)
    assert found.getpixel((3, 10))[2] > 200 > found.getpixel((30, 10))[2]
    assert notes == ["It was turned upright, as its EXIF data say."]


def test_of_an_animation_the_first_frame_is_read_and_that_is_said(tmp_path):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("lime", "red", "red")]
    path = saved(tmp_path, frames[0], "moving.gif", save_all=True, append_images=frames[1:])
    found, notes = upload.read_upload(path)
    assert found.getpixel((5, 5)) == (0, 255, 0)
    assert "2 frames" in notes[0] or "3 frames" in notes[0]


def test_cmyk_and_16_bits_are_converted_and_a_single_pixel_is_enough(tmp_path, subject):
    found, notes = upload.read_upload(saved(tmp_path, Image.new("CMYK", (30, 30), (0, 255, 255, 0)), "print.jpg"))
    assert found.getpixel((5, 5))[0] > 200 > found.getpixel((5, 5))[2]
    assert "CMYK" in notes[0]
    deep = Image.new("I;16", (30, 30), 32768)
    found, notes = upload.read_upload(saved(tmp_path, deep, "deep.png"))
    assert found.getpixel((5, 5)) == (128, 128, 128)
    assert "16 bits" in notes[0]
    found, notes = upload.read_upload(saved(tmp_path, Image.new("RGB", (1, 1), "white"), "dot.png"))
    assert "1 x 1" in notes[0]
    assert inspect_picture(subject, found, ["gtp_plus"], 0.65).columns[0].damage >= 0


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bomb.png", bomb(20_000, 20_000), "far more than 89 million pixels"),
        ("large.png", bomb(10_000, 9_000), "10,000 x 9,000 pixels are more than 89 million"),
        ("line.png", bomb(1, 100_000), "more than 100 times as long as wide"),
        ("text.png", b"hello", "not a readable image; send one of JPEG, PNG"),
        ("empty.jpg", b"", "not a readable image"),
        ("program.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
        ("cut.png", bomb(30, 30), "cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(GTPError, match=re.escape(message)) as refused:
        upload.read_upload(path)
    assert str(tmp_path) not in str(refused.value)  # where uploads lie is nobody's business


def test_a_file_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "MAX_BYTES", 10)
    with pytest.raises(GTPError, match="larger than"):
        upload.read_upload(saved(tmp_path, Image.new("RGB", (9, 9)), "large.png"))


# What is computed


def test_the_embedded_examples_are_seen_as_everywhere_else(subject):
    images, labels = bundled.sample_images()
    place = int((labels == 0).nonzero()[0])
    seen = subject.view(subject.examples[0].picture)
    torch.testing.assert_close(seen.tensor, bundled.normalise(images[place : place + 1])[0])
    assert seen.picture.size == (28, 28)


def test_a_study_is_what_the_library_says(subject):
    picture = subject.examples[3].picture
    study = inspect_picture(subject, picture, ["tome", "gtp"], 0.6)
    model, image = create_model("fashion_vit"), subject.view(picture).tensor[None]
    with torch.inference_mode():
        base = model(image)
        for column in study.columns:
            fast = patch(model, column.method)
            found = fast(image)
            assert column.damage == pytest.approx(float(kl_per_image(base, found)), abs=1e-6)
            best = found[0].softmax(0).topk(5)
            assert [each.name for each in column.classes] == [bundled.CLASSES[place] for place in best.indices]
            assert [each.probability for each in column.classes] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert column.macs == gtp_vit.macs(fast).total
            assert column.fraction == pytest.approx(0.6, abs=0.01)
            assert trace_data(column.trace) == trace_data(trace(fast, image))
        assert study.classes[0].probability == pytest.approx(float(base.softmax(1).max()), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "identity"])
@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_every_method_has_settings_at_both_ends(subject, name, fraction):
    method = settings_at(subject, name, fraction)
    cost = subject.costs.macs_with(method) / subject.costs.unreduced
    assert 0.1 < cost < 0.6 if fraction == 0.2 else 0.9 < cost < 1


def test_at_its_default_share_gtp_plus_is_that_of_patch(subject):
    assert settings_at(subject, "gtp_plus", 0.65) == default_method(host_of(subject.model))


def test_the_recipe_does_the_same_in_the_lines_that_are_given(subject, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(recipe_at(subject, "evit", 0.5).to_json())
    own = dataclasses.replace(subject, python="gtp_vit.create_model('fashion_vit')")
    lines, names = python_for(own), {"gtp_vit": gtp_vit}
    assert lines.count("\n") == 1
    exec(lines, names)
    assert (
        gtp_vit.macs(names["fast"]).total
        == inspect_picture(subject, subject.examples[0].picture, ["evit"], 0.5).columns[0].macs
    )


@pytest.mark.parametrize(("name", "fraction"), [("no such", 0.5), ("gtp", 0.0), ("gtp", 1.5), ("gtp", float("nan"))])
def test_what_a_browser_makes_up_is_refused(subject, name, fraction):
    with pytest.raises(GTPError):
        inspect_picture(subject, subject.examples[0].picture, [name], fraction)


def test_the_page_says_what_was_measured_and_escapes_what_it_says(subject):
    study = inspect_picture(subject, subject.examples[0].picture, ["gtp_plus", "dynamicvit"], 0.5)
    waiting = inspection_html(subject, study, ["<b>note</b>"], None)
    assert waiting.count("measuring") == 2
    assert "&lt;b&gt;note" in waiting
    timings, rounds = time_columns(subject, study)
    html = inspection_html(subject, study, [], timings, rounds)
    assert f"{timings[0].speedup:.2f} x ({timings[0].speedup_quartiles[0]:.2f} to" in html
    assert f"the middle half of {rounds} rounds" in html
    assert f"{study.columns[0].damage:.4f}" in html
    assert f"{study.columns[0].fraction:.1%}" in html
    assert "untrained" in html  # DynamicViT's predictors
    data = json.loads(re.search(r"data-trace='(.*?)'", html)[1].replace("&quot;", '"'))
    assert len(data["layers"]) == 12


def test_an_encoder_has_neighbours_and_features(encoder):
    picture = encoder.examples[1].picture
    study = inspect_picture(encoder, picture, ["tome"], 0.6)
    column = study.columns[0]
    assert {each.example_index for each in study.neighbours} == {0, 2}  # not itself
    assert 0 < column.damage < 1  # 1 - cosine
    assert column.features.error > 0
    assert not column.classes
    html = inspection_html(encoder, study, [], None)
    assert "Nearest examples: 2 of 2" in html
    assert "noise &lt;0&gt;" in html
    alone = dataclasses.replace(encoder, examples=())
    assert "--examples FOLDER" in inspection_html(alone, inspect_picture(alone, picture, ["tome"], 0.6), [], None)


def test_examples_are_read_from_a_folder_and_broken_ones_left_out(tmp_path):
    saved(tmp_path, Image.new("RGB", (900, 600), "red"), "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    (found,) = read_examples(tmp_path)
    assert found.name == "a"
    assert max(found.picture.size) == 512
    (tmp_path / "a.png").unlink()
    with pytest.raises(GTPError, match=r"no picture in .* can be read; b.png"):
        read_examples(tmp_path)
    with pytest.raises(GTPError, match="give a folder"):
        read_examples(tmp_path / "none")


class Doubled(torch.nn.Module):
    """Stands for an exported file: it answers as one, without an engine."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return 2 * self.model(images)


def test_a_file_shows_its_output_and_says_what_it_cannot_show(subject):
    model, picture = subject.model, subject.examples[0].picture
    metadata = ExportMetadata(
        model="fashion_vit",
        weights="",
        fingerprint="0" * 16,
        method=ToMe(),
        unreduced_macs=100,
        exported_macs=60,
        precision="f32",
        engine="onnxruntime",
        batch=None,
        channels=1,
        size=(28, 28),
        preprocessing=Preprocessing(mean=(0.286,), std=(0.353,), crop_pct=1.0),
        output=Output("classes", 10),
        classes=bundled.CLASSES,
        versions={},
    )
    file = ExportedFile(Path("a.onnx"), metadata)
    alone = make_exported_subject(file, Doubled(model), [], None, "the weights are not here")
    study = inspect_file(alone, picture, timed=True)
    assert study.damage is None
    assert not study.before
    html = file_html(alone, study, [])
    assert "the weights are not here" in html
    assert "Where patches went is not in it" in html
    assert "<th>before</th>" not in html
    both = make_exported_subject(file, Doubled(model), [], model)
    study = inspect_file(both, picture, timed=True)
    assert study.after[0].name == study.before[0].name == "T-shirt"
    assert study.after[0].probability > study.before[0].probability
    assert study.damage > 0
    assert "rounds in turns" in file_html(both, study, [])
    assert both.python.splitlines()[-1].startswith("outputs = session.run")
    tokens = dataclasses.replace(metadata, output=Output("tokens", 3))
    with pytest.raises(GTPError, match="for every token"):
        make_exported_subject(ExportedFile(file.path, tokens), Doubled(model), [])


# Serving


def test_a_port_in_use_gives_the_next_free_one():
    with serve.listen(serve.LOCAL, 7860) as taken:
        port = taken.getsockname()[1]
        with serve.listen(serve.LOCAL, port) as other:
            assert port < other.getsockname()[1] <= port + serve.MAX_PORTS
            assert serve.address_of(serve.LOCAL, other) == f"http://127.0.0.1:{other.getsockname()[1]}/"
    with pytest.raises(GTPError, match="not an address of this machine"):
        serve.listen("192.0.2.1", 7860)
    with pytest.raises(GTPError, match="--port is 0"):
        serve.listen(serve.LOCAL, 0)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_which_addresses_only_this_machine_reaches(host, local):
    assert serve.is_local(host) is local


def test_a_missing_extra_is_one_line_with_the_command(monkeypatch, capsys):
    find = serve.importlib.util.find_spec
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None if name == "gradio" else find(name))
    assert main(["demo"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "pip install 'gtp-vit[demo]'" in error
    assert error.count("\n") == 1


def test_models_that_cannot_be_shown_are_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(serve, "check_extra", lambda: None)
    for words, message in (
        (["test_vit"], "has random weights"),
        (["no_such_model"], "unknown model"),
        (["resnet18", "--pretrained"], "ResNet"),
        (["none.onnx"], "there is no file"),
        (["--port", "99999999"], "--port is 99999999"),
        (["--examples", "/no/such/folder"], "give a folder of pictures"),
    ):
        assert main(["demo", *words]) == ExitCode.USAGE
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_buffer_of_a_picture_is_png():
    """What page.js gets: lossless, so that a patch is what the model saw."""
    picture = Image.effect_noise((8, 8), 50).convert("RGB")
    data = io.BytesIO(base64.b64decode(data_url(picture).split(",")[1]))
    assert Image.open(data).tobytes() == picture.tobytes()
