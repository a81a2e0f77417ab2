"""The scripts in examples/: each runs, says what was wrong with its input, and the server gives torch's answers."""

import concurrent.futures
import importlib.util
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import gtp_vit
from gtp_vit.cli.app import main
from gtp_vit.engines.program import torch_can_export
from gtp_vit.models import bundled

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    for library in ("fastapi", "onnxruntime") if name == "serve" else ():  # the first needs Python 3.11
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch, capsys):
    """An example as from the command line: exit code or message, and what it printed."""

    def call(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        try:
            code = example(name).main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight pictures of clothes, and their classes by name."""
    folder = tmp_path_factory.mktemp("photos")
    images, _ = bundled.sample_images()
    for index in range(8):
        Image.fromarray(images[index].numpy()).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def right():
    """The first class of each picture, by the reduced model in torch."""
    images, _ = bundled.sample_images()
    fast = gtp_vit.patch(gtp_vit.create_model("fashion_vit"), "deploy")
    with torch.inference_mode():
        best = fast(bundled.normalise(images[:8])).softmax(-1).max(-1)
    return [(bundled.CLASSES[index], share) for share, index in zip(*map(torch.Tensor.tolist, best), strict=True)]


def test_a_folder_is_classified(run, photos, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(bundled.CLASSES))
    code, out, err = run("classify", photos, "--model", "fashion_vit", "--names", names)
    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert [Path(name).name for name, _, _ in lines] == [f"{index}.png" for index in range(8)]
    _, labels = bundled.sample_images()
    hits = sum(found == bundled.CLASSES[label] for (_, found, _), label in zip(lines, labels[:8], strict=True))
    assert hits >= 7

    table = tmp_path / "classes.csv"
    (photos / "broken.png").write_bytes(b"no picture")
    try:
        code, out, err = run("classify", photos, "--model", "fashion_vit", "--csv", table)
    finally:
        (photos / "broken.png").unlink()
    assert (code, out) == (3, "")
    assert "left out: " in err
    assert "broken.png" in err
    assert len(table.read_text().splitlines()) == 9


def test_what_cannot_be_classified_is_said_in_a_line(run, photos, tmp_path):
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    for words, message in (
        ([tmp_path / "nowhere", "--model", "fashion_vit"], "nowhere"),
        ([photos, "--model", "fashion_wit"], "unknown model"),
        ([photos, "--model", "fashion_vit", "--names", tmp_path / "names.txt"], "2 class names are given"),
        ([photos, "--model", "fashion_vit", "--names", tmp_path / "none.txt"], "none.txt"),
    ):
        code, _, _ = run("classify", *words)
        assert code.startswith("classify.py: ")
        assert message in code


def test_the_nearest_picture_is_the_picture_itself(run, photos, tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file(gtp_vit.create_model("test_vit").state_dict(), weights)  # random, as there is no network
    model = ["--model", "test_vit", "--checkpoint", weights]
    code, out, _ = run("search", photos, photos / "3.png", *model, "--count", "3")
    assert code == 0
    lines = [line.split("\t") for line in out.splitlines()]
    assert len(lines) == 3
    assert float(lines[0][0]) == pytest.approx(1, abs=1e-3)
    assert Path(lines[0][1]).name == "3.png"
    cosines = [float(cosine) for cosine, _ in lines]
    assert cosines == sorted(cosines, reverse=True)

    vectors = tmp_path / "vectors"
    words = ["embed", "test_vit", "--checkpoint", weights, "--data-dir", photos, "--normalise", "--output", vectors]
    assert main([*map(str, words), "-j", "0"]) == 0
    code, again, _ = run("search", vectors, photos / "3.png", *model, "--count", "3")
    assert code == 0
    found = [line.split("\t") for line in again.splitlines() if line.count("\t") == 1]
    assert [(cosine, Path(name).name) for cosine, name in found] == [(cos, Path(name).name) for cos, name in lines]

    code, _, _ = run("search", photos, tmp_path / "none.png", *model)
    assert "there is no picture" in code
    (tmp_path / "empty").mkdir()
    code, _, _ = run("search", tmp_path / "empty", photos / "3.png", *model)
    assert code.startswith("search.py: ")


@pytest.fixture(scope="module")
def exported(request):
    if not torch_can_export():
        pytest.skip(f"torch {torch.__version__} is too old to export")
    return request.getfixturevalue("fashion") / "fashion_vit-gtp_plus-f32.onnx"


@pytest.fixture(scope="module")
def served(exported):
    """The address of a real server."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(example("serve").make_app(exported), port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)


def post(address, data):
    """Status and answer."""
    try:
        with urllib.request.urlopen(f"{address}/classify", data, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["detail"]


@pytest.mark.slow
def test_the_server_batches_and_answers_as_torch_does(served, photos, right):
    paths = sorted(photos.glob("*.png")) * 3
    with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(lambda path: post(served, path.read_bytes()), paths))
    assert {status for status, _ in answers} == {200}
    together = [answer["computed together"] for _, answer in answers]
    assert 1 < max(together) <= 8
    for path, (_, answer) in zip(paths, answers, strict=True):  # nobody gets another's answer
        name, share = right[int(path.stem)]
        assert answer["classes"][0] == {"class": name, "probability": pytest.approx(share, abs=1e-4)}
    with urllib.request.urlopen(served, timeout=30) as answer:
        assert json.load(answer)["model"] == "fashion_vit"


def picture(mode, size):
    data = io.BytesIO()
    Image.new(mode, size).save(data, "PNG" if mode != "CMYK" else "JPEG")
    return data.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"", 415, "not a picture"),
        (b"GIF89a broken", 415, "not a picture"),
        (picture("RGB", (64, 64))[:60], 415, "not a picture"),
        (picture("1", (10_000, 8_000)), 413, "pixels"),
        (picture("L", (1, 500)), 415, "too narrow"),
        (picture("I;16", (30, 30)), 415, "8 bits"),
        (bytes(20_000_001), 413, "bytes"),
        (picture("RGB", (1, 1)), 200, None),
        (picture("CMYK", (300, 20)), 200, None),
        (picture("RGBA", (20, 300)), 200, None),
    ],
    ids=["empty", "broken", "cut", "huge", "narrow", "16 bits", "bytes", "1 x 1", "cmyk", "rgba"],
)
def test_the_server_says_what_is_wrong_with_a_picture(served, data, status, message):
    found, answer = post(served, data)
    assert found == status, answer
    assert message is None or message in answer


def test_a_file_that_cannot_be_served_is_said_in_a_line(run, tmp_path, exported):
    import onnx

    stranger = onnx.load(exported)
    del stranger.metadata_props[:]
    onnx.save(stranger, tmp_path / "stranger.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for name, message in (("none.onnx", "none.onnx"), ("broken.onnx", ""), ("stranger.onnx", "not made by gtp-vit")):
        code, _, _ = run("serve", tmp_path / name)
        assert code.startswith("serve.py: ")
        assert message in code


def test_pictures_are_prepared_as_timm_does(photos):
    """A picture that is larger than the model's, and not square."""
    import timm

    serve, model = example("serve"), timm.create_model("vit_tiny_patch16_224")
    config = timm.data.resolve_model_data_config(model)
    large = Image.open(photos / "0.png").convert("RGB").resize((331, 270))
    data = io.BytesIO()
    large.save(data, "PNG")
    wanted = {key: config[key] for key in ("mean", "std", "crop_pct", "interpolation")}
    ours = serve.prepare(data.getvalue(), {**wanted, "channels": 3, "size": [224, 224]})
    torch.testing.assert_close(torch.from_numpy(ours), timm.data.create_transform(**config)(large), rtol=0, atol=1e-5)
