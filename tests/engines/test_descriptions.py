"""An exported file is what it says: its description is complete, in range, and what its graph is, or it is refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import gtp_vit
from gtp_vit import GTPError, create_model, export, patch
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.transforms import make_transform
from gtp_vit.engines import ENGINES, engine_of, output_check, program
from gtp_vit.engines.export import ExportInfo
from gtp_vit.engines.exported_file import ExportedFile, file_fingerprint
from gtp_vit.engines.metadata import ExportMetadata
from gtp_vit.engines.preprocessing import Preprocessing
from gtp_vit.models import bundled
from support.engines import needs, needs_onnxruntime

FILE = "fashion_vit-gtp_plus-f32.onnx"
pytestmark = needs_onnxruntime


@pytest.fixture
def edited(tmp_path, fashion):
    """edited(change): the path of an exported file after change(description)."""
    import onnx

    def made(change, graph=None):
        model = onnx.load(fashion / FILE)
        about = json.loads(model.metadata_props[0].value)
        changed = change(about)
        model.metadata_props[0].value = json.dumps(about if changed is None else changed)
        if graph is not None:
            graph(model.graph)
        onnx.save(model, tmp_path / "edited.onnx")
        return tmp_path / "edited.onnx"

    return made


@pytest.fixture
def seen(monkeypatch):
    """The images that a file gets; torch stands for its engine."""
    found = []

    class Stand(nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.fast = patch(create_model("fashion_vit"), "deploy")

        def forward(self, images):
            found.append(images)
            return self.fast(images)

    monkeypatch.setattr("gtp_vit.engines.exported_file.ExportedModel", Stand)
    return found


@pytest.fixture
def pictures(tmp_path):
    """Ten folders with a picture each."""
    generator = np.random.default_rng(0)
    for number in range(10):
        (tmp_path / "pictures" / str(number)).mkdir(parents=True)
        picture = Image.fromarray(generator.integers(0, 255, (40, 30), dtype=np.uint8))
        picture.save(tmp_path / "pictures" / str(number) / "one.png")
    return tmp_path / "pictures"


OTHER = {"mean": [0.9], "std": [0.1], "crop_pct": 0.5, "interpolation": "nearest"}


def test_evaluate_and_embed_prepare_images_as_the_file_says(tmp_path, edited, seen, pictures, capsys):
    path = edited(lambda about: about["input"].update(OTHER))
    wanted = make_transform({**OTHER, "input_size": (1, 28, 28)})
    first = wanted(Image.open(pictures / "0" / "one.png"))
    words = ["--data-dir", str(pictures), "-j", "0", "-b", "10"]
    assert main(["evaluate", str(path), *words, "--results-file", str(tmp_path / "r.json")]) == ExitCode.OK, capsys
    assert main(["embed", str(path), *words, "--output", str(tmp_path / "vectors")]) == ExitCode.OK
    capsys.readouterr()
    evaluated, embedded_ = seen[0], seen[-1]
    assert torch.equal(evaluated[0], first)
    assert torch.equal(evaluated, embedded_)
    row = json.loads((tmp_path / "r.json").read_text())[1]
    assert (row["crop_pct"], row["interpolation"]) == (0.5, "nearest")


@pytest.mark.parametrize("command", ["evaluate", "embed"])
def test_images_of_the_package_are_not_used_where_a_file_wants_others(tmp_path, edited, seen, capsys, command):
    path = edited(lambda about: about["input"].update(OTHER))
    words = ["--output", str(tmp_path / "vectors")] if command == "embed" else []
    assert main([command, str(path), *words]) == ExitCode.USAGE
    assert "expects other preprocessing than the images of fashion_vit; give --data-dir" in (capsys.readouterr().err)
    assert not seen


def put(*place):
    """A change: put(a, b, value) makes about[a][b] this value."""

    def change(about):
        for key in place[:-2]:
            about = about[key]
        about[place[-2]] = place[-1]

    return change


def without(*place):
    def change(about):
        for key in place[:-1]:
            about = about[key]
        del about[place[-1]]

    return change


def costs(unreduced, exported):
    def change(about):
        about["macs"] = {
            "unreduced": unreduced,
            "exported": exported,
            "share": round(exported / unreduced, 4),
        }

    return change


WRONG = {
    "no input": (without("input"), "input is missing"),
    "no model": (without("model"), "model is missing"),
    "no versions": (without("versions"), "versions is missing"),
    "no classes": (without("classes"), "classes is missing"),
    "no share": (without("macs", "share"), "macs.share is missing"),
    "a list": (lambda _: [1], "it does not say what is in it"),
    "format": (put("format", 2), "its format is 2; this version of gtp-vit reads 1"),
    "input": (put("input", 3), "input is 3; it must have fields"),
    "model": (put("model", 7), "model is 7; it must be a string"),
    "empty model": (put("model", ""), "model is ''; it must be a string"),
    "fingerprint": (put("weights", "fingerprint", "x"), "weights.fingerprint is 'x'; it must be 16 hexadecimal"),
    "from": (put("weights", "from", None), "weights.from is None; it must be a string"),
    "method": (put("method", {"method": "gpt"}), "unknown method 'gpt'"),
    "setting": (put("method", {"method": "tome", "q": 1}), "q"),
    "no fields": (put("method", "gtp_plus"), "a method is stored as 'gtp_plus'"),
    "no macs": (put("macs", "exported", 0), "macs.exported is 0; it must be an integer from 1"),
    "true macs": (put("macs", "exported", True), "macs.exported is True; it must be an integer from 1"),
    "few macs": (costs(100, 1), "its metadata give 1 MACs, its graph 9.181e+07"),
    "many macs": (costs(10**9, 10**9), "its metadata give 1e+09 MACs, its graph 9.181e+07"),
    "share": (put("macs", "share", 0.1), "macs.share is 0.1, and by macs.exported and macs.unreduced it is 0."),
    "precision": (put("precision", "fp4"), "precision is 'fp4'; here it must be f32 or int8"),
    "int8": (
        put("precision", "int8"),
        "its metadata give the precision as int8, and its graph has no product in 8 bits",
    ),
    "engine": (put("engine", "openvino"), "engine is 'openvino'; here it must be onnxruntime"),
    "channels": (put("input", "channels", 3), "input.mean is [0.286]; it must be a finite number for each of 3"),
    "size": (
        put("input", "size", [32, 28]),
        "its metadata give the input as 'images': float32 [any, 1, 32, 28], its graph",
    ),
    "sides": (put("input", "size", [28]), "input.size is [28]; it must be height and width"),
    "side": (put("input", "size", [28, -28]), "input.size is [28, -28]; it must be height and width"),
    "input name": (put("input", "name", "x"), "input.name is 'x'; here it must be images"),
    "mean": (put("input", "mean", "grey"), "input.mean is 'grey'; it must be a finite number for each of 1 channels"),
    "nan": (put("input", "mean", [float("nan")]), "input.mean is [nan]; it must be a finite number"),
    "huge": (put("input", "mean", [10**400]), "input.mean is [1000"),
    "std": (put("input", "std", [0]), "input.std is [0]; its numbers must be above 0"),
    "mean alone": (without("input", "std"), "input.mean is there alone; mean and std belong together"),
    "crop": (put("input", "crop_pct", 0), "input.crop_pct is 0; it must be a number above 0, at most 1"),
    "crop mode": (put("input", "crop_mode", "none"), "input.crop_mode is 'none'; it must be one of center, squash"),
    "interpolation": (put("input", "interpolation", "magic"), "input.interpolation is 'magic'; it must be one of nea"),
    "processor": (put("input", "processor", "it"), "input.processor is 'it'; it must be the settings"),
    "kind": (put("output", "kind", "scores"), "output.kind is 'scores'; here it must be classes or features"),
    "classes of features": (put("output", "kind", "features"), "it names classes, and its output is features"),
    "width": (put("output", "width", 9), "it names 10 classes, and its output has 9"),
    "class names": (put("classes", list(range(10))), "classes is [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]; it must be a list of"),
    "batch": (put("input", "batch", 0), "input.batch is 0; it must be an integer from 1"),
    "fixed batch": (
        put("input", "batch", 4),
        "its metadata give the input as 'images': float32 [4, 1, 28, 28], its graph",
    ),
    "version": (put("versions", {"torch": 2}), "versions is {'torch': 2}; it must be a version for each package"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_description_that_is_not_right_is_refused(edited, capsys, wrong):
    change, message = WRONG[wrong]
    path = edited(change)
    with pytest.raises(GTPError) as caught:
        ExportedFile.read(path)
    text = str(caught.value)
    assert message in text
    assert text.endswith("; export it again")
    assert "\n" not in text
    assert main(["evaluate", str(path)]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def features(about):
    """Class scores that call themselves features."""
    about.update(classes=None, output={"name": "features", "kind": "features", "width": 10})


def test_the_kind_of_output_is_what_the_graph_calls_it(edited):
    with pytest.raises(
        GTPError, match=r"its metadata give the output as 'features': float32 \[any, 10\], its graph as 'logits'"
    ):
        ExportedFile.read(edited(features))
    with pytest.raises(
        GTPError, match=r"its metadata give the output as 'tokens': float32 \[any, any, 10\], its graph as 'log"
    ):
        ExportedFile.read(
            edited(lambda about: about.update(classes=None, output={"name": "tokens", "kind": "tokens", "width": 10}))
        )


def test_the_number_of_outputs_is_the_graphs(edited):
    with pytest.raises(
        GTPError, match=r"its metadata give the output as 'logits': float32 \[any, 9\], its graph as 'logits': fl"
    ):
        ExportedFile.read(edited(lambda about: about.update(classes=None, output={**about["output"], "width": 9})))


def test_a_graph_with_two_outputs_is_refused(edited):
    def another(graph):
        graph.output.add().CopyFrom(graph.output[0])

    with pytest.raises(GTPError, match="its graph has 2 outputs, expected one; export it again"):
        ExportedFile.read(edited(lambda _: None, another))


def test_shapes_that_a_graph_claims_are_not_believed(edited):
    """A forged value_info would make its products look small."""

    def forge(graph):
        for value in graph.value_info:
            for dim in value.type.tensor_type.shape.dim:
                dim.dim_value = 1

    with pytest.raises(GTPError, match=r"its metadata give 1 MACs, its graph 9\.181e\+07"):
        ExportedFile.read(edited(costs(100, 1), forge))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (costs(10**8, 91_000_000), "says that its MACs unreduced is 100000000, and of fashion_vit it is "),
        (lambda about: costs(about["macs"]["unreduced"], 91_000_000)(about), "says that its MACs is 91000000, and of"),
    ],
    ids=["unreduced", "exported"],
)
def test_macs_are_those_of_the_model_it_was_made_from(edited, seen, capsys, change, message):
    assert main(["evaluate", str(edited(change))]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert message in err
    assert err.rstrip().endswith("; export it again")
    assert not seen


@needs("openvino")
@pytest.mark.parametrize("harm", ["missing", "cut", "empty"])
def test_weights_beside_an_openvino_file_are_named(tmp_path, fashion, harm):
    import openvino

    model = openvino.Core().read_model(fashion / FILE)
    openvino.save_model(model, tmp_path / "x.xml", compress_to_fp16=False)
    weights = tmp_path / "x.bin"
    if harm == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[: 0 if harm == "empty" else 1000])
    with pytest.raises(GTPError, match=r"^openvino cannot read .*x\.xml: .*x\.bin.*; export it again$") as caught:
        ExportedFile.read(tmp_path / "x.xml")
    assert "src/" not in str(caught.value)


@pytest.mark.parametrize(
    ("preprocessing", "message"),
    [
        ({"mean": [0.5] * 3, "std": [0.5] * 3}, "preprocessing: mean is .*; it must be a finite number for each of 1"),
        ({"crop_pct": 2}, "preprocessing: crop_pct is 2; it must be a number above 0, at most 1"),
    ],
)
def test_a_preparation_that_makes_no_sense_is_not_exported(tmp_path, monkeypatch, preprocessing, message):
    monkeypatch.setattr(program, "write_onnx", lambda *_: pytest.fail("it began to work"))
    with pytest.raises(GTPError, match=message):
        export(create_model("fashion_vit"), tmp_path / "x.onnx", info=ExportInfo(preprocessing=preprocessing))
    assert not list(tmp_path.iterdir())


def test_a_file_that_would_contradict_itself_is_not_left_behind(tmp_path, fashion, monkeypatch):
    """The reduced program under the description of the unreduced model."""
    monkeypatch.setattr(program, "write_onnx", lambda _, path: shutil.copy(fashion / FILE, path))
    monkeypatch.setattr(output_check, "run_file", lambda *_: pytest.fail("it was run"))
    with pytest.raises(GTPError, match=r"^the exported file contradicts its metadata: .* MACs.*; nothing was written$"):
        export(create_model("fashion_vit"), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_is_read_as_it_was_written(fashion):
    metadata = ExportedFile.read(fashion / FILE).metadata
    assert ExportMetadata.from_dict(json.loads(json.dumps(metadata.to_dict())), ENGINES["onnxruntime"]) == metadata
    assert metadata.preprocessing == Preprocessing(mean=(bundled.MEAN,), std=(bundled.STD,))
    graph = ENGINES["onnxruntime"].open(fashion / FILE).graph()
    assert graph.macs == pytest.approx(gtp_vit.macs(patch(create_model("fashion_vit"), "deploy")).total, rel=0.04)


def test_the_identity_of_a_file_has_its_weights_under_whatever_name(tmp_path, fashion):
    """A file that was renamed still names its external data as before; a link leads to where the data really are."""
    import onnx

    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "production.onnx"
    beside = {"save_as_external_data": True, "size_threshold": 0, "location": "f32.onnx.data"}
    onnx.save(onnx.load(fashion / FILE), path, **beside)
    link = tmp_path / "link.onnx"
    link.symlink_to(path)
    before = file_fingerprint(path), file_fingerprint(link)
    assert ExportedFile.read(path).metadata.model == "fashion_vit"
    weights = path.with_name("f32.onnx.data")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    after = file_fingerprint(path), file_fingerprint(link)
    assert before[0] != after[0]
    assert before[1] != after[1]
    weights.unlink()
    assert file_fingerprint(path) not in (before[0], after[0])


@needs("openvino")
def test_the_identity_of_an_openvino_file_has_its_weights(tmp_path):
    for name in ("x.xml", "x.bin"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "y.xml").symlink_to(tmp_path / "x.xml")
    before = file_fingerprint(tmp_path / "x.xml"), file_fingerprint(tmp_path / "y.xml")
    (tmp_path / "x.bin").write_bytes(b"2")
    after = file_fingerprint(tmp_path / "x.xml"), file_fingerprint(tmp_path / "y.xml")
    assert before[0] != after[0]
    assert before[1] != after[1]


@needs_onnxruntime
@pytest.mark.slow
def test_weights_of_more_than_two_gigabytes_get_a_file_of_their_own(tmp_path):
    """protobuf cannot even say how large such a model is. A file with a hole in it stands for the weights."""
    import onnx
    from onnx import TensorProto, helper

    rows = 2**21 + 5  # of a kilobyte
    source, path = tmp_path / "program.onnx", tmp_path / "large.onnx"
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 256], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="hole")
    sizes = {"x": rows, "y": 256}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", n]) for name, n in sizes.items()]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weights])
    source.write_bytes(helper.make_model(graph).SerializeToString())
    with open(tmp_path / "hole", "wb") as hole:
        hole.truncate(rows * 1024)
    engine = engine_of(path)
    engine.convert(SimpleNamespace(onnx=source), path, "f32", None, "{}")
    beside = tmp_path / "large.onnx.data"
    assert beside.stat().st_size >= rows * 1024
    assert path.stat().st_size < 2000
    assert engine.files(path) == [path, beside]
    assert engine.open(path).graph().macs == rows * 256
    assert onnx.load(path, load_external_data=False).graph.initializer[0].dims == [rows, 256]
