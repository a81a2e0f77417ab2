"""Files for engines: they compute what torch computes, say what is in them, need neither torch nor this package, and a
file that is not right is not left behind."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import gtp_vit
from gtp_vit import (
    ATS,
    GTP,
    MCTF,
    METHODS,
    PPT,
    DiffRate,
    DynamicViT,
    EViT,
    EvoViT,
    GTPError,
    GTPPlus,
    Identity,
    PiToMe,
    ToFu,
    ToMe,
    TriLevel,
    create_model,
    export,
    macs,
    patch,
    read_embeddings,
    read_recipe,
    trace,
)
from gtp_vit.backbones import small_models
from gtp_vit.cli import model_flags
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.engines import ENGINES, engine_of, engine_process, output_check, program
from gtp_vit.engines import export as exporting
from gtp_vit.engines import openvino as ov
from gtp_vit.engines.engine import OPSET
from gtp_vit.engines.export import ExportInfo
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.program import torch_can_export
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.models import bundled
from gtp_vit.patching import host_of
from gtp_vit.profiling.slicing import slicing_like
from gtp_vit.recipes.defaults import deploy_method
from gtp_vit.runs.files import Lock
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.testing import families
from gtp_vit.testing.subject import randomised
from support.engines import ONNX_ENGINES, each_onnx_engine, lacking, needs, needs_onnxruntime
from support.traces import traced as program_of

CLOSE = 1e-4
FILE = "fashion_vit-gtp_plus-f32.onnx"
# Layers, family, method: each method, and each kind of head, prefix, positions and grid. Of three layers one reduces
# tokens of equal sizes, one of different ones, one is the last. `benchmarks/engines.py equality` runs far more.
CASES = [
    (3, "vit", GTPPlus(remove=6)),
    (3, "deit_distilled", EvoViT()),
    (3, "non_square", GTP(propagate=6)),
    (2, "clip", ToMe(r=6)),
    (2, "dinov2_registers", EViT(keep_rate=0.7, drop_loc=(0,))),
    (2, "siglip", DynamicViT()),
    (2, "vit", ATS(budget="keep:0.6:0:1")),
    (2, "dinov3", TriLevel()),
    (2, "eva_l", PPT(r=9, pp_loc_list=(0, 1))),
    (2, "lvvit", DiffRate(prune=(5, 0), merge=(4, 0))),
    (2, "vit", MCTF(r=9)),
    (2, "dinov2_registers", PiToMe(r=6)),
    (2, "gap", ToFu(r=6, first_merging_layer=1)),
    (2, "all_tokens", Identity()),
    (2, "gap", GTPPlus(remove=(6, 0))),
    (2, "vit", None),
]


@pytest.fixture(scope="session")
def images():
    return bundled.normalise(bundled.sample_images()[0])


@pytest.fixture(scope="session")
def fast():
    return patch(create_model("fashion_vit"), "deploy")


@pytest.fixture(scope="session")
def traced(once, fashion):
    """The program of the embedded model without a description, as write_onnx makes it."""

    def make(folder):
        import onnx

        model = onnx.load(fashion / FILE)
        del model.metadata_props[:]
        onnx.save(model, folder / "traced.onnx")

    return once("traced", make) / "traced.onnx"


@pytest.fixture
def ready(traced, monkeypatch):
    """The embedded model is not traced again for every export of it."""
    monkeypatch.setattr(program, "write_onnx", lambda _, path: shutil.copy(traced, path))


@pytest.fixture
def untouched(monkeypatch):
    """Fails if a mistake is found only after the work has begun."""
    monkeypatch.setattr(program, "write_onnx", lambda *_: pytest.fail("it began to work"))


@pytest.fixture
def trusted(fast, monkeypatch):
    """The file of the embedded model is not run; torch stands for its engine."""

    def run_file(engine, made, precision, batches):
        assert made.is_file()
        return [outputs(fast, torch.from_numpy(given)).numpy() for given in batches]

    monkeypatch.setattr(output_check, "run_file", run_file)


@pytest.fixture
def exported(once, ready, fashion, fast, images, monkeypatch):
    """exported(engine, precision): the path of a file of the embedded model."""

    def here(engine, made, precision, batches):
        return list(map(engine.load(made, precision, 1, None), batches))

    def path(engine, precision):
        if (engine, precision) == ("onnxruntime", "f32"):
            return fashion / FILE
        name = f"fashion{ENGINES[engine].suffix}"

        def make(folder):
            with monkeypatch.context() as quick:
                quick.setattr(ov, "SMOOTHING", ov.SMOOTHING[:1])
                if precision != "f32":
                    quick.setattr(output_check, "run_file", here)
                export(fast, folder / name, precision=precision, images=images[:12])

        return once(f"{engine}-{precision}", make) / name

    return path


def run(capsys, *words):
    code = main(list(map(str, words)))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *words):
    """The one line with which a command is refused."""
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (ExitCode.USAGE, "", 1), err
    return err


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outputs(model, images):
    with torch.inference_mode():
        return families.output(model, images)


def in_engine(path, precision, images):
    run = engine_of(path).load(path, precision, 1, None)
    return torch.cat([torch.from_numpy(run(part.numpy())) for part in images.split(25)])


def difference(one, other):
    assert one.shape == other.shape
    return float((one - other).abs().max())


def test_every_method_is_here():
    can = {method for method in METHODS.values() if method.not_exported is None}
    assert {type(method) for _, _, method in CASES if method} == can


@pytest.mark.slow
@needs_onnxruntime
@pytest.mark.parametrize(("layers", "family", "method"), CASES, ids=str)
def test_files_compute_what_torch_computes(tmp_path, layers, family, method):
    """In every engine that is here, from one trace."""
    import onnx

    plain = families.make(family, layers)
    model = plain if method is None else patch(plain, method, quiet=True)
    others = families.images(family, 8)
    if method is not None and not isinstance(method, Identity):
        reduced, whole = outputs(model, others), outputs(plain, others)
        assert reduced.shape != whole.shape or difference(reduced, whole) > 10 * CLOSE
    traced = program_of(f"{layers} {family} {method}", lambda: model)
    assert {node.domain for node in nodes_of(onnx.load(traced).graph)} <= {"", "ai.onnx"}
    for engine in map(ENGINES.get, ONNX_ENGINES):
        if not lacking(engine.name):
            path = tmp_path / f"made{engine.suffix}"
            engine.convert(SimpleNamespace(onnx=traced), path, "f32", None, "")
            metadata = exporting._describe(model, engine, "f32", ExportInfo())
            assert metadata.contradiction(engine.open(path).graph(), engine) is None
            run = engine.load(path, "f32", 1, None)
            for batch in (1, 3, 8):
                found = torch.from_numpy(run(others[:batch].numpy()))
                assert difference(found, outputs(model, others[:batch])) <= CLOSE, (engine.name, batch)


@pytest.mark.slow
@each_onnx_engine
def test_a_file_for_one_size_of_batch_computes_the_same(tmp_path, engine, traced, fast, images):
    path = tmp_path / f"made{ENGINES[engine].suffix}"
    ENGINES[engine].convert(SimpleNamespace(onnx=traced), path, "f32", None, "")
    run = ENGINES[engine].load(path, "f32", 1, 5)
    assert difference(torch.from_numpy(run(images[:5].numpy())), outputs(fast, images[:5])) <= CLOSE


@pytest.mark.parametrize(
    ("version", "can"), [("2.8.1", False), ("2.9.0", True), ("2.9.0a0+145a3a7", True), ("2.15.0+cu132", True)]
)
def test_torch_exports_from_2_9_on(monkeypatch, version, can):
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_can_export() == can


def nodes_of(graph):
    """Nodes of a graph, and of the graphs inside them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from nodes_of(inner)


@needs_onnxruntime
def test_a_file_has_standard_operators_and_takes_any_number_of_images(fashion, fast, images):
    import onnx

    model = onnx.load(fashion / FILE)
    onnx.checker.check_model(model)
    assert {node.domain for node in nodes_of(model.graph)} <= {"", "ai.onnx"}
    assert not model.functions
    assert [(each.domain, each.version) for each in model.opset_import if each.domain in ("", "ai.onnx")] == [
        ("", OPSET)
    ]
    assert OPSET == 18
    (given,), (found,) = model.graph.input, model.graph.output
    assert (given.name, found.name) == ("images", "logits")
    first, *others = given.type.tensor_type.shape.dim
    assert (first.dim_param, first.HasField("dim_value")) == ("batch", False)
    assert [each.dim_value for each in others] == [1, 28, 28]
    for batch in (1, 2, 7, 20):
        assert difference(in_engine(fashion / FILE, "f32", images[:batch]), outputs(fast, images[:batch])) <= CLOSE


@pytest.mark.time_limit(10)
@each_onnx_engine
def test_a_file_has_no_paths_of_this_machine(engine, exported):
    package, path = Path(gtp_vit.__file__).parent, exported(engine, "f32")
    here = [package, package.parent, Path(__file__).parents[2], sysconfig.get_path("purelib"), path.parent.parent]
    for each in path.parent.iterdir():
        for word in [*map(str, here), "site-packages", "float.onnx", 'File "', ".py:"]:
            assert word.encode() not in each.read_bytes(), (each.name, word)


@each_onnx_engine
def test_a_file_says_what_is_in_it(engine, exported, fast):
    said = ExportedFile.read(exported(engine, "f32")).metadata.to_dict()
    model = create_model("fashion_vit")
    assert said["model"] == "fashion_vit"
    assert gtp_vit.method_from_dict(said["method"]) == fast.reduction.method
    assert said["weights"]["fingerprint"] == tensors_fingerprint(model.state_dict())
    given = said["input"]
    assert (given["name"], given["channels"], given["size"]) == ("images", 1, [28, 28])
    assert (given["mean"], given["std"]) == ((bundled.MEAN,), (bundled.STD,))
    assert said["output"] == {"name": "logits", "kind": "classes", "width": 10}
    assert said["classes"] == list(bundled.CLASSES)
    assert said["macs"]["exported"] == macs(fast).total
    assert said["macs"]["share"] == pytest.approx(macs(fast).total / macs(model).total, abs=1e-4)
    assert (said["precision"], said["engine"], said["versions"]["ONNX opset"]) == ("f32", engine, "18")
    for name in ("gtp-vit", "torch", "timm", *ENGINES[engine].packages):
        assert said["versions"][name].split("+")[0] == metadata.version(name).split("+")[0]


@each_onnx_engine
def test_a_card_beside_a_file_says_how_to_use_it(engine, exported):
    path = exported(engine, "f32")
    text = path.with_name(f"{path.name}.md").read_text()
    for word in (path.name, "[batch, 1, 28, 28]", "0.286", "logits", f"import {engine}", "images that were given"):
        assert word in text
    checked = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [int(cells[0]) for cells in checked] == [1, 3, 8]
    assert all(float(cells[1]) < CLOSE for cells in checked)
    code = text.split("```python\n")[1].split("```")[0]
    given = np.zeros((2, 1, 28, 28), np.float32)
    found = {"images": given}
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        exec(code, found)
    finally:
        os.chdir(before)
    assert found["outputs"].shape == (2, 10)


ALONE = """
import sys
sys.path.append(sys.argv[1])
import numpy
images = numpy.load(sys.argv[3])
if sys.argv[2].endswith(".onnx"):
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    found = onnxruntime.InferenceSession(sys.argv[2], options).run(None, {"images": images})[0]
else:
    import openvino
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    found = openvino.Core().compile_model(sys.argv[2], "CPU", settings)([images])[0]
for name in ("torch", "gtp_vit", "timm", "onnx"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} can be imported")
numpy.save(sys.argv[4], found)
"""
PACKAGES = {"onnxruntime": ["onnxruntime"], "openvino": ["openvino", "openvino_telemetry"]}


@each_onnx_engine
def test_a_file_runs_without_torch_and_without_this_package(tmp_path, engine, exported, fast, images):
    (tmp_path / "packages").mkdir()
    for name in ("numpy", "numpy.libs", *PACKAGES[engine]):
        found = Path(sysconfig.get_path("platlib")) / name
        if found.exists():
            (tmp_path / "packages" / name).symlink_to(found)
    np.save(tmp_path / "images.npy", images[:6].numpy())
    path = shutil.copytree(exported(engine, "f32").parent, tmp_path / "moved") / exported(engine, "f32").name
    words = [tmp_path / "packages", path, tmp_path / "images.npy", tmp_path / "outputs.npy"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert difference(torch.from_numpy(np.load(tmp_path / "outputs.npy")), outputs(fast, images[:6])) <= CLOSE


@pytest.mark.slow
@each_onnx_engine
def test_eight_bits_change_little_and_take_less_space(engine, exported, fast, images):
    path, others = exported(engine, "int8"), images[100:250]
    assert ExportedFile.read(path).metadata.precision == "int8"
    found, wanted = in_engine(path, "int8", others), outputs(fast, others)
    assert difference(found, wanted) > 1e-3  # it is not the float file
    assert float(kl_per_image(wanted, found).mean()) < 0.05
    assert float((wanted.argmax(1) == found.argmax(1)).float().mean()) > 0.93

    def size(path):
        return sum(each.stat().st_size for each in path.parent.iterdir() if each.suffix != ".md")

    assert size(path) < 0.75 * size(exported(engine, "f32"))


@pytest.mark.slow
@each_onnx_engine
def test_a_run_leaves_its_images_and_earlier_outputs_alone(engine, exported, images):
    run = ENGINES[engine].load(exported(engine, "int8"), "int8", 1, None)
    given = images[:4].numpy().copy()
    first = run(given)
    kept = first.copy()
    run(images[4:8].numpy())
    assert np.array_equal(given, images[:4].numpy())
    assert np.array_equal(first, kept)
    assert np.array_equal(run(given), kept)


MOVES = {"Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Slice", "Split", "VariadicSplit", "Gather"}


@needs_onnxruntime
def test_only_products_with_weights_have_eight_bits_in_onnxruntime(exported):
    import onnx

    graph = onnx.load(exported("onnxruntime", "int8")).graph
    stored = {each.name: each for each in graph.initializer}
    rounded = [node for node in graph.node if node.op_type == "MatMulInteger"]
    free = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(rounded) >= 47  # four in each of 12 layers, and the head; the last layer may slice its weights
    assert {stored[node.input[1]].data_type for node in rounded} == {onnx.TensorProto.INT8}
    assert len(free) >= 24 + 9  # two in each attention, and what reduces tokens in three layers
    # Nothing is rounded but what these products read.
    read = {node.input[0] for node in rounded}
    for node in graph.node:
        assert node.op_type not in ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul")
        if node.op_type == "DynamicQuantizeLinear":
            assert node.output[0] in read


@pytest.mark.slow
@needs("openvino")
def test_only_products_with_weights_have_eight_bits_in_openvino(exported):
    import openvino

    model = openvino.Core().read_model(exported("openvino", "int8"))

    def source(value, passed):
        while value.get_node().get_type_name() in passed:
            value = value.get_node().input_value(0)
        return value.get_node().get_type_name()

    def is_constant(value):
        return source(value, {*MOVES, "Convert", "Multiply", "Subtract", "FakeQuantize"}) == "Constant"

    def is_rounded(value):
        return source(value, MOVES) == "FakeQuantize"

    operations = model.get_ordered_ops()
    products = [each for each in operations if each.get_type_name() in ("MatMul", "ScaledDotProductAttention")]
    with_weights = [each for each in products if is_constant(each.input_value(1))]
    free = [each for each in products if not is_constant(each.input_value(1))]
    assert len(with_weights) >= 49  # four in each of 12 layers, and the head
    assert len(free) >= 12 + 9  # attention, and what reduces tokens in three layers
    assert all(is_rounded(each.input_value(0)) for each in with_weights)
    found = [each.get_friendly_name() for each in free if any(map(is_rounded, each.input_values()))]
    assert found == []


@pytest.fixture
def smoothed(monkeypatch):
    """smoothed(best, images): how much the file is smoothed if the outputs of `best` are the most exact."""
    import nncf
    import openvino
    from openvino import opset13 as ops

    given = ops.parameter([1, 4], np.float32)
    model = openvino.Model([ops.matmul(given, ops.constant(np.eye(4, dtype=np.float32)), False, True)], [given])
    model.set_friendly_name("float")

    def quantize(model, *_, advanced_parameters, **__):
        model.set_friendly_name(str(advanced_parameters.smooth_quant_alphas.matmul))
        return model

    def chosen(best, images):
        errors = {"float": 0, str(best): 0.1}
        monkeypatch.setattr(ov, "_outputs", lambda model, some: np.stack(some) + errors.get(model.friendly_name, 0.2))
        return float(ov._quantise(model, images, ov.SMOOTHING).friendly_name)

    monkeypatch.setattr(nncf, "quantize", quantize)
    return chosen


@needs("openvino")
@pytest.mark.parametrize("best", ov.SMOOTHING)
def test_of_several_ways_to_eight_bits_the_most_exact_is_taken(smoothed, best):
    assert smoothed(best, np.zeros((8, 4), np.float32)) == best


@needs("openvino")
@pytest.mark.parametrize("count", [1, 3])
def test_few_images_are_enough_to_choose_a_way_to_eight_bits(smoothed, count):
    assert smoothed(ov.SMOOTHING[0], np.zeros((count, 4), np.float32)) in ov.SMOOTHING


@pytest.mark.slow
@needs("openvino")
def test_bf16_in_openvino(exported, fast, images):
    import openvino

    path, others = exported("openvino", "bf16"), images[100:250]
    assert ExportedFile.read(path).metadata.precision == "bf16"
    found, wanted = in_engine(path, "bf16", others), outputs(fast, others)
    if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        assert difference(found, wanted) > 1e-3
    assert float(kl_per_image(wanted, found).mean()) < 0.05
    # The weights are stored unrounded. A mean, as in an image or two another of nearly equal tokens may go.
    assert float((in_engine(path, "f32", others) - wanted).abs().mean()) < 1e-5


@pytest.mark.slow
@each_onnx_engine
@pytest.mark.parametrize("existing", [False, True])
def test_a_file_that_computes_something_else_is_not_left_behind(
    tmp_path, ready, monkeypatch, fast, images, engine, existing
):
    path = tmp_path / f"fashion{ENGINES[engine].suffix}"
    if existing:
        for ending in (path.suffix, f"{path.suffix}.md", ".bin"):
            path.with_suffix(ending).write_text(f"an earlier {ending}")
    before = files_in(tmp_path)

    def wrong(engine, made, precision, batches):
        assert made.is_file()
        return [outputs(fast, torch.from_numpy(given)).flip(1).numpy() for given in batches]

    monkeypatch.setattr(output_check, "run_file", wrong)
    with pytest.raises(GTPError, match=r"not what torch computes: only 0 of 12 images .*; nothing was written$"):
        export(fast, path, images=images[:12], overwrite=True)
    assert files_in(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


@needs_onnxruntime
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found * np.nan, "its outputs are not finite"),
        (lambda found: found[:, :9], r"the engine's output is \[1, 9\], torch's \[1, 10\]"),
        (lambda found: found + 1e-2, "only 0 of 12 images are within 0.0001"),
    ],
)
def test_other_outputs_of_an_engine_are_refused(tmp_path, ready, monkeypatch, fast, images, change, message):
    def run_file(engine, made, precision, batches):
        return [change(outputs(fast, torch.from_numpy(given)).numpy()) for given in batches]

    monkeypatch.setattr(output_check, "run_file", run_file)
    with pytest.raises(GTPError, match=message):
        export(fast, tmp_path / "fashion.onnx", images=images[:16])
    assert not list(tmp_path.iterdir())


@needs_onnxruntime
def test_right_outputs_are_accepted_and_earlier_files_replaced(tmp_path, ready, trusted, fast, images):
    (tmp_path / "fashion.onnx").write_text("an earlier file")
    found = export(fast, tmp_path / "fashion.onnx", images=images[:16], overwrite=True)
    assert set(files_in(tmp_path)) == {"fashion.onnx", "fashion.onnx.md"} == {path.name for path in found.files}
    assert [check.max_difference for check in found.checks] == [0, 0, 0]
    assert difference(in_engine(found.path, "f32", images[:5]), outputs(fast, images[:5])) <= CLOSE


@needs_onnxruntime
def test_a_crash_of_the_engine_is_one_line_that_names_the_signal(tmp_path, ready, monkeypatch, fast, images):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -ILL $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(engine_process.sys, "executable", str(killed))
    (tmp_path / "out").mkdir()
    with pytest.raises(GTPError, match=r"^onnxruntime crashed .* \(SIGILL\); nothing was written.*$") as caught:
        export(fast, tmp_path / "out" / "fashion.onnx", images=images[:16])
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@needs_onnxruntime
def test_a_file_that_the_engine_cannot_run_is_one_line(tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("no model")
    with pytest.raises(GTPError, match=r"^onnxruntime cannot run the exported file: .+; nothing was written$"):
        output_check.run_file(engine_of(path), path, "f32", [np.zeros((1, 1, 28, 28), np.float32)])


@pytest.fixture
def doubling(tmp_path):
    """An ONNX file that doubles its images."""
    from onnx import TensorProto, helper, save

    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("images", "logits")]
    graph = helper.make_graph([helper.make_node("Add", ["images", "images"], ["logits"])], "x", sides[:1], sides[1:])
    opset = [helper.make_opsetid("", OPSET)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "doubling.onnx")
    return tmp_path / "doubling.onnx"


@pytest.mark.slow
@needs_onnxruntime
def test_a_file_that_is_used_runs_in_a_process_whose_end_is_one_line(doubling):
    model, other = ExportedModel(doubling, "f32", 1), ExportedModel(doubling, "f32", 1)
    for images in (torch.randn(3, 2), torch.randn(1, 2)):
        assert torch.equal(model(images), 2 * images)
    with pytest.raises(GTPError, match=r"^onnxruntime cannot run .*doubling.onnx: .*; export it again$"):
        other(torch.randn(1, 3))
    model.run.process.send_signal(signal.SIGSEGV)
    with pytest.raises(
        GTPError,
        match=r"^onnxruntime crashed on .*doubling.onnx \(SIGSEGV\); export it again\. gtp-vit check .*$",
    ):
        model(torch.randn(1, 2))
    doubling.write_text("no model")
    with pytest.raises(GTPError, match=r"^onnxruntime cannot run .*doubling.onnx: .*; export it again$"):
        ExportedModel(doubling, "f32", 1)


@pytest.mark.parametrize("name", ["ILL", "SEGV", "KILL"])
def test_the_name_of_every_signal_is_known(tmp_path, monkeypatch, name):
    killed = tmp_path / "python"
    killed.write_text(f"#!/bin/sh\nkill -{name} $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(engine_process.sys, "executable", str(killed))
    with pytest.raises(GTPError, match=f"openvino crashed on the exported file .SIG{name}.; nothing"):
        output_check.run_file(ENGINES["openvino"], tmp_path / "x.xml", "f32", [])


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@needs_onnxruntime
@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "onnx.save"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, ready, trusted, monkeypatch, fast, images, place):
    (tmp_path / "fashion.onnx.md").write_text("an earlier card")
    before = files_in(tmp_path)
    monkeypatch.setattr(place, full)
    with pytest.raises(GTPError, match="No space left on device") as caught:
        export(fast, tmp_path / "fashion.onnx", images=images[:16], overwrite=True)
    assert "\n" not in str(caught.value)
    assert "fashion.onnx" in str(caught.value)
    monkeypatch.undo()
    assert files_in(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1


@needs_onnxruntime
@pytest.mark.parametrize("existing", ["fashion.onnx", "fashion.onnx.md"])
def test_files_that_exist_are_refused_before_any_work(tmp_path, untouched, fast, existing):
    (tmp_path / existing).write_text("precious")
    with pytest.raises(GTPError, match=rf"{existing} exists; give overwrite=True .--overwrite., or a different name"):
        export(fast, tmp_path / "fashion.onnx")
    assert files_in(tmp_path) == {existing: b"precious"}


@needs_onnxruntime
def test_a_folder_of_that_name_is_never_replaced(tmp_path, untouched, fast):
    (tmp_path / "fashion.onnx").mkdir()
    with pytest.raises(GTPError, match="exists"):
        export(fast, tmp_path / "fashion.onnx", overwrite=True)


def mistakes():
    vit, good = families.make("vit"), families.images("vit", 8)
    wrong = good.clone()
    wrong[3, 0, 0, 0] = torch.nan
    onnx = "x.onnx"
    return {
        "unknown ending": (vit, "x.pb", {}, "x.pb does not say which engine it is for; end its name in .onnx"),
        "no ending": (vit, "x", {}, "does not say which engine it is for"),
        "unknown precision": (vit, onnx, {"precision": "fp16"}, "unknown precision 'fp16'"),
        "bf16": (vit, onnx, {"precision": "bf16"}, "onnxruntime has no bf16 on a CPU; give f32 or int8"),
        "adaptive": (patch(vit, ATS()), onnx, {}, "ats keeps a different number of tokens in each image"),
        "a loop": (patch(vit, "atc"), onnx, {}, "atc joins clusters one after the other"),
        "bfloat16": (
            families.make("vit").bfloat16(),
            onnx,
            {},
            "the model is in bfloat16 on cpu; export takes float32",
        ),
        "meta": (families.make("vit").to("meta"), onnx, {}, "the model is in float32 on meta"),
        "int8 without images": (vit, onnx, {"precision": "int8"}, "int8 needs images"),
        "size of images": (vit, onnx, {"images": good[..., :56]}, r"images are \[8, 3, 64, 56\]; give a tensor"),
        "one image": (vit, onnx, {"images": good[0]}, r"images are \[3, 64, 64\]"),
        "no images": (vit, onnx, {"images": good[:0]}, r"images are \[0, 3, 64, 64\]"),
        "an array": (vit, onnx, {"images": good.numpy()}, "images are ndarray"),
        "nan": (vit, onnx, {"images": wrong}, "some images are not finite"),
        "classes": (
            vit,
            onnx,
            {"info": ExportInfo(classes=["one", "two"])},
            "2 class names are given, and the model has 10 classes",
        ),
        "no vit": (torch.nn.Linear(2, 2), onnx, {}, "not a supported ViT"),
    }


@needs_onnxruntime
@pytest.mark.parametrize("mistake", mistakes())
def test_mistakes_are_refused_before_any_work(tmp_path, untouched, mistake):
    model, name, settings, message = mistakes()[mistake]
    with pytest.raises(GTPError, match=message) as caught:
        export(model, tmp_path / name, **settings)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", [name for name, engine in ENGINES.items() if engine.packages])
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, untouched, monkeypatch, engine):
    missing, find = ENGINES[engine].packages[-1], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    wanted = rf"{engine} needs .*{missing}.*, which is not installed: pip install 'gtp-vit\[{ENGINES[engine].extra}\]'"
    with pytest.raises(GTPError, match=wanted):
        export(families.make("vit"), tmp_path / f"x{ENGINES[engine].suffix}")
    with pytest.raises(GTPError, match=wanted):
        ExportedFile.read(tmp_path / f"x{ENGINES[engine].suffix}")
    assert not list(tmp_path.iterdir())


@needs_onnxruntime
def test_places_that_cannot_be_written_are_one_line(tmp_path, untouched, capsys):
    (tmp_path / "file").write_text("no folder")
    place = tmp_path / "file" / "x.onnx"
    with pytest.raises(
        GTPError, match=rf"^cannot write {place.parent}\S*: [^\n]+; choose another path or free some disk space$"
    ):
        export(families.make("vit"), place)
    assert "cannot write" in refused(capsys, "export", "--output", tmp_path / "file")
    assert files_in(tmp_path) == {"file": b"no folder"}


@needs_onnxruntime
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path, untouched):
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(
        GTPError, match=r"^cannot write .*: Permission denied; choose another path or free some disk space$"
    ):
        export(families.make("vit"), tmp_path / "closed" / "x.onnx")


@needs_onnxruntime
def test_export_by_command(fashion, fast, images):
    answer = json.loads((fashion.parent / "answer.json").read_text())
    assert {Path(file).name for file in answer["files"]} == {FILE, f"{FILE}.md"} == set(files_in(fashion))
    assert answer["metadata"] == json.loads(json.dumps(ExportedFile.read(fashion / FILE).metadata.to_dict()))
    assert answer["metadata"]["weights"]["from"] == "the package"
    assert [check["batch"] for check in answer["checks"]] == [1, 3, 8]
    assert max(check["max_difference"] for check in answer["checks"]) <= CLOSE
    assert all(check["agreement"] == 100 for check in answer["checks"])
    assert difference(in_engine(fashion / FILE, "f32", images[:20]), outputs(fast, images[:20])) <= CLOSE


@pytest.mark.slow
@needs_onnxruntime
def test_export_by_command_replaces_files_only_if_told(tmp_path, fashion, ready, trusted, capsys):
    shutil.copytree(fashion, tmp_path / "out")
    words = ["export", "--output", tmp_path / "out", "--images", "16"]
    before = files_in(tmp_path)
    assert f"{FILE} exists; give overwrite=True (--overwrite)" in refused(capsys, *words)
    assert files_in(tmp_path) == before
    (tmp_path / "out" / FILE).write_text("an earlier file")
    code, out, _ = run(capsys, *words, "--overwrite", "--html", tmp_path / "page.html")
    assert code == ExitCode.OK
    assert FILE in out
    assert files_in(tmp_path / "out")[FILE] == files_in(fashion)[FILE]
    assert FILE in (tmp_path / "page.html").read_text()


@pytest.fixture
def pictures(tmp_path):
    """A folder of twelve pictures."""
    generator = np.random.default_rng(0)
    (tmp_path / "pictures" / "some").mkdir(parents=True)
    for number in range(12):
        picture = Image.fromarray(generator.integers(0, 255, (30, 36), dtype=np.uint8))
        picture.save(tmp_path / "pictures" / "some" / f"{number:02}.png")
    return tmp_path / "pictures"


@needs_onnxruntime
def test_images_that_cannot_be_read_are_named_and_the_file_is_written(tmp_path, ready, trusted, pictures, capsys):
    (pictures / "some" / "03.png").write_bytes(b"no picture")
    words = ["export", "--data-dir", pictures, "--output", tmp_path / "out", "-j", "0", "--json"]
    code, out, err = run(capsys, *words)
    assert code == ExitCode.INCOMPLETE
    assert "1 of the images could not be read and were left out: " in err
    assert "03.png" in err
    assert FILE in files_in(tmp_path / "out")
    assert json.loads(out)["metadata"]["model"] == "fashion_vit"


@needs_onnxruntime
def test_too_few_images_are_refused(tmp_path, untouched, pictures, capsys):
    words = ["export", "--output", tmp_path / "out", "-j", "0", "--data-dir"]
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, *words, tmp_path / "empty")
    for number in range(5):
        (pictures / "some" / f"{number:02}.png").write_bytes(b"no picture")
    assert "only 7 images could be read, and 5 not, e.g. " in refused(capsys, *words, pictures)
    for number in range(5):
        (pictures / "some" / f"{number:02}.png").unlink()
    assert "7 images are too few; give at least 8" in refused(capsys, *words, pictures)
    assert files_in(tmp_path / "out") == {}


@needs_onnxruntime
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "--output is missing; give the folder to write to"),
        (["export", "test_vit", "--output", "OUT"], "test_vit has random weights; give --pretrained or --checkpoint"),
        (["export", "--format", "tflite", "--output", "OUT"], "unknown --format 'tflite'"),
        (["export", "--precision", "bf16", "--output", "OUT"], "onnxruntime has no bf16 on a CPU; give f32 or int8"),
        (["export", "--images", "7", "--output", "OUT"], "--images is 7; it must be an integer in [8,"),
        (["export", "--device", "cuda", "--output", "OUT"], "--device is cuda; exporting runs on a CPU"),
        (["export", "--class-names", "no.txt", "--output", "OUT"], "cannot read --class-names no.txt"),
        (["export", "--method", "ats", "--output", "OUT"], "ats keeps a different number of tokens in each image"),
        (["export", "--method", "deplyo", "--output", "OUT"], "did you mean 'deploy'"),
        (["evaluate", "OUT/none.onnx"], "there is no file OUT/none.onnx; make one with gtp-vit export"),
        (["evaluate", "OUT/text.onnx"], "onnxruntime cannot read OUT/text.onnx: "),
        (["evaluate", "OUT/empty.onnx"], "OUT/empty.onnx was not made by gtp-vit export"),
        (
            ["evaluate", "FASHION", "--method", "gtp"],
            "--method was fixed when fashion_vit-gtp_plus-f32.onnx was exported; remove it",
        ),
        (
            ["evaluate", "FASHION", "--method=gtp_plus"],
            "--method was fixed when fashion_vit-gtp_plus-f32.onnx was exported; remove it",
        ),
        (
            ["evaluate", "FASHION", "--remove", "4"],
            "--remove was fixed when fashion_vit-gtp_plus-f32.onnx was exported; remove it",
        ),
        (["evaluate", "FASHION", "--device", "cuda"], "--device is cuda; exported files run on a CPU"),
        (
            ["benchmark", "--precision", "int8"],
            "--precision is int8, which is for engines; give --engine, or in",
        ),
        (["benchmark", "--engine", "onnxruntime", "--precision", "bf16"], "onnxruntime has no bf16 on a CPU"),
        (
            ["benchmark", "--engine", "onnxruntime", "--compile"],
            "--compile applies to torch only; remove it with --engine",
        ),
        (["benchmark", "--engine", "onnxruntime", "--dtype", "bfloat16"], "--dtype applies to torch only; remove it"),
        (["benchmark", "--engine", "tensorrt"], "unknown --engine 'tensorrt'"),
        (["tune", "--precision", "int8"], "--precision is int8, which is for engines"),
        (["tune", "--engine", "onnxruntime", "--precision", "bf16"], "onnxruntime has no bf16 on a CPU"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_two(tmp_path, untouched, fashion, capsys, words, message):
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    named = {"OUT": str(tmp_path), "FASHION": str(fashion / FILE)}

    def filled(text):
        for name, path in named.items():
            text = text.replace(name, path)
        return text

    assert filled(message) in refused(capsys, *map(filled, words))
    assert set(files_in(tmp_path)) == {"text.onnx", "empty.onnx"}


@needs("openvino")
@pytest.mark.parametrize("text", ["no model", "<net></net>"])
def test_text_in_place_of_an_openvino_file_is_one_line(tmp_path, capsys, text):
    (tmp_path / "text.xml").write_text(text)
    assert f"openvino cannot read {tmp_path}/text.xml: " in refused(capsys, "evaluate", tmp_path / "text.xml")


def evaluated(capsys, *words):
    code, out, err = run(capsys, "evaluate", *words, "--limit", "60", "-b", "25", "-j", "0", "--json")
    assert code == ExitCode.OK, err
    return json.loads(out)["rows"]


@pytest.mark.slow
@needs_onnxruntime
def test_a_file_is_evaluated_as_its_method_is_in_torch(tmp_path, fashion, capsys):
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    plain, ours = evaluated(capsys, fashion / FILE, "--results-file", results, "--html", page)
    same, wanted = evaluated(capsys, "--method", "deploy")
    assert (plain["method"], ours["method"], wanted["method"]) == ("", FILE, "gtp_plus")
    assert plain == same
    for figure in ("top1", "top5", "agreement", "kl", "top1_change", "images"):
        assert ours[figure] == pytest.approx(wanted[figure], abs=1e-3), figure
    assert (ours["images"], ours["gmacs"]) == (60, wanted["gmacs"])
    assert ours["kl"] > 1e-3  # it is reduced
    assert json.loads(results.read_text())[1]["kl"] == ours["kl"]
    assert FILE in page.read_text()


@pytest.mark.slow
@needs_onnxruntime
def test_a_file_embeds_images_without_the_model_it_was_made_from(tmp_path, fashion, fast, images, monkeypatch, capsys):
    words = ["--limit", "9", "--batch-size", "4", "--output"]
    assert main(["embed", str(fashion / FILE), *words, str(tmp_path / "file")]) == ExitCode.OK
    assert "these embeddings are class scores" in " ".join(capsys.readouterr().out.split())
    (found,) = read_embeddings(tmp_path / "file")
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(found.embeddings), fast(images[:9]), rtol=0, atol=1e-3)
    # --engine makes such a file by itself; here it is made already
    monkeypatch.setattr("gtp_vit.cli.commands.embed.export", lambda model, path: shutil.copy(fashion / FILE, path))
    assert main(["embed", "--logits", "--engine", "onnxruntime", *words, str(tmp_path / "engine")]) == ExitCode.OK
    (same,) = read_embeddings(tmp_path / "engine")
    assert np.array_equal(found.embeddings, same.embeddings)
    capsys.readouterr()
    for flag in ("--logits", "--pretrained"):
        assert main(["embed", str(fashion / FILE), flag, *words, str(tmp_path / "x")]) == ExitCode.USAGE
        assert f"{flag} was fixed when {FILE} was exported; remove it" in capsys.readouterr().err


@pytest.mark.slow
@each_onnx_engine
def test_eight_bit_files_are_evaluated(engine, exported, capsys):
    _, ours = evaluated(capsys, exported(engine, "int8"))
    assert ours["settings"]["precision"] == "int8"
    assert ours["settings"]["engine"] == engine
    assert 0 < ours["kl"] < 0.1
    assert ours["agreement"] > 90


@needs_onnxruntime
def test_a_file_is_not_compared_with_other_weights(tmp_path, fashion, monkeypatch, capsys):
    import onnx

    model = onnx.load(fashion / FILE)
    about = json.loads(model.metadata_props[0].value)
    about["weights"]["fingerprint"] = "0123456789abcdef"
    model.metadata_props[0].value = json.dumps(about)
    onnx.save(model, tmp_path / "other.onnx")
    line = refused(capsys, "evaluate", tmp_path / "other.onnx")
    assert "other.onnx was made from other weights (fingerprint 0123456789abcdef, these: " in line

    other = create_model("fashion_vit")
    other.head.bias.data[0] += 1e-3
    monkeypatch.setattr(model_flags, "create_model", lambda *_, **__: other)
    assert "was made from other weights" in refused(capsys, "evaluate", fashion / FILE)


@needs_onnxruntime
def test_the_weights_of_a_file_must_be_here(tmp_path, fashion, capsys):
    import onnx

    model = onnx.load(fashion / FILE)
    about = json.loads(model.metadata_props[0].value) | {"model": "test_vit"}
    about["weights"]["from"] = "nowhere/weights.pth"
    model.metadata_props[0].value = json.dumps(about)
    onnx.save(model, tmp_path / "x.onnx")
    line = refused(capsys, "evaluate", tmp_path / "x.onnx")
    assert "whose weights (nowhere/weights.pth) are not here; give --checkpoint FILE or --pretrained" in line


@pytest.mark.slow
@needs_onnxruntime
def test_benchmark_in_an_engine(monkeypatch, capsys):
    short = create_model("fashion_vit")
    short.blocks = short.blocks[:3]
    monkeypatch.setattr(model_flags, "create_model", lambda *_, **__: short)
    words = ["--engine", "onnxruntime", "--method", "deploy", "--rounds", "3", "--batch-size", "2", "--json"]
    code, out, err = run(capsys, "benchmark", "fashion_vit", *words)
    assert code == ExitCode.OK, err
    result = json.loads(out)
    (entry,) = result["timed"]
    names = ["unreduced", "gtp_plus", "slicing", "eager torch, unreduced"]
    assert [timing["name"] for timing in entry["timings"]] == names
    assert all(timing["milliseconds"] > 0 for timing in entry["timings"])
    assert (entry["engine"], entry["batch_size"]) == ("onnxruntime", 2)
    assert set(entry["over_torch"]) == set(names)
    assert entry["over_torch"]["eager torch, unreduced"] == 1
    assert result["threads"] == torch.get_num_threads()
    assert result["macs"]["gtp_plus"] < result["macs"]["unreduced"]


@pytest.mark.parametrize("method", [GTPPlus(remove=6), ToMe(r=6), EViT(drop_loc=(1, 2)), DynamicViT()], ids=str)
def test_slicing_has_the_numbers_of_tokens_of_a_method(method):
    model, images = families.make("vit"), families.images("vit")
    fast = patch(model, method, quiet=True)
    sliced = slicing_like(fast.reducer)
    other = patch(model, sliced, quiet=True)
    assert macs(fast, include_overhead=False).total == macs(other, include_overhead=False).total < macs(model).total
    assert macs(other).overhead == 0
    counts = [[layer.kept.shape[1] for layer in trace(each, images).layers] for each in (fast, other)]
    assert counts[0] == counts[1]
    assert counts[0][-2] < 64


def test_slicing_keeps_the_first_tokens():
    model = families.make("vit")
    sliced = slicing_like(patch(model, GTPPlus(remove=6)).reducer)
    for layer in trace(patch(model, sliced, quiet=True), families.images("vit")).layers:
        assert (layer.kept == torch.arange(layer.kept.shape[1])).all()


@pytest.mark.parametrize("method", [ATS(), EvoViT()], ids=str)
def test_no_slicing_where_numbers_of_tokens_depend_on_the_image_or_grow_again(method):
    assert slicing_like(patch(families.make("vit"), method).reducer) is None


@pytest.mark.parametrize("name", ["deit_small_patch16_224", "vit_base_patch16_siglip_224", "vit_large_patch16_224"])
def test_settings_for_engines_reduce_in_few_layers_and_to_even_numbers(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    host = host_of(model)
    method = deploy_method(host)
    steps = method.build(host.vit).steps(host.vit.grid)
    left = [host.vit.image_tokens, *(step.out for step in steps)]
    removing = [after for before, after in itertools.pairwise(left) if after < before]
    assert 1 <= len(removing) <= 3
    assert all((host.vit.prefix + after) % 8 == 0 for after in removing)
    assert 0.55 < macs(model, method, shorten_last_block=True).total / macs(model).total <= 0.65


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_settings_for_engines_of_the_measured_models_are_their_recipes(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert patch(model, "deploy").reduction.method == read_recipe(f"{name}-deploy").method
    assert macs(patch(model, "deploy")).total <= 0.65 * macs(model).total


def by_default(model):
    """The error of patch(model); None if there is none."""
    try:
        patch(model)
    except GTPError as error:
        return str(error)
    return None


@pytest.mark.time_limit(5)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name in families.LIGHT else []) for name in families.NAMES],
)
def test_small_models_have_settings_for_engines_wherever_they_have_any(family):
    model, images = families.make(family), families.images(family)
    problem = by_default(model)
    if problem is not None:  # 65 % of its MACs cannot be reached
        with pytest.raises(GTPError, match=re.escape(problem)):
            patch(model, "deploy")
        return
    fast = patch(model, "deploy")
    assert fast.reduction.method.name == "gtp_plus"
    assert outputs(fast, images).isfinite().all()
    assert macs(fast).total < macs(model).total


@pytest.mark.parametrize("sizes", [{"depth": 1}, {"depth": 2}, {"img_size": 24}], ids=str)
def test_models_with_few_tokens_or_layers_have_settings_for_engines_too(sizes):
    model = randomised(lambda: small_models.of_timm("vit_tiny_patch16_224", sizes))
    side = sizes.get("img_size", 64)
    assert outputs(patch(model, "deploy"), torch.zeros(1, 3, side, side)).isfinite().all()


@pytest.mark.time_limit(4)
def test_settings_for_engines_can_be_changed_by_flags(capsys):
    code, out, _ = run(capsys, "macs", "fashion_vit", "--method", "deploy", "--importance-floor", "0.25", "--json")
    assert code == ExitCode.OK
    changed = dataclasses.replace(deploy_method(host_of(create_model("fashion_vit"))), importance_floor=0.25)
    assert json.loads(out)["gtp_plus"] == macs(create_model("fashion_vit"), changed, shorten_last_block=True).total


def test_instructions_that_end_the_process_are_avoided_and_said(monkeypatch):
    monkeypatch.setattr(ov, "probe_amx_crash", lambda: "it ends the process here (signal 4)")
    monkeypatch.delenv(ov.ISA_VARIABLE, raising=False)
    wanted = r"it ends the process here \(signal 4\); it runs with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, set that"
    with pytest.warns(UserWarning, match=wanted):
        ov.avoid_amx_crash()
    assert os.environ.pop(ov.ISA_VARIABLE) == "AVX512_CORE_FP16"


def test_instructions_that_are_chosen_or_work_are_left_alone(monkeypatch):
    monkeypatch.setattr(ov, "probe_amx_crash", lambda: pytest.fail("it was asked"))
    monkeypatch.setenv(ov.ISA_VARIABLE, "AVX2")
    ov.avoid_amx_crash()
    assert os.environ[ov.ISA_VARIABLE] == "AVX2"
    monkeypatch.setattr(ov, "probe_amx_crash", lambda: None)
    monkeypatch.delenv(ov.ISA_VARIABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ov.avoid_amx_crash()
    assert ov.ISA_VARIABLE not in os.environ


def test_the_trap_is_found_by_how_a_process_ends(monkeypatch):
    codes = iter((0, 1, -signal.SIGILL))
    monkeypatch.setattr(ov.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], next(codes)))
    assert ov.probe_amx_crash.__wrapped__() is None
    assert ov.probe_amx_crash.__wrapped__() is None  # OpenVINO is not here, or has a problem that it can explain
    assert ov.probe_amx_crash.__wrapped__().endswith("ends the process here (signal 4)")


def test_the_page_says_how_equal_files_were():
    docs = Path(__file__).parents[2] / "docs"
    found = json.loads((docs / "results/engines-equality.json").read_text())["rows"]
    compared = [row[engine] for row in found if "refused" not in row for engine in ONNX_ENGINES]
    worst = max(row["largest_difference"] for row in compared)
    assert worst <= CLOSE
    assert not any(row["images_with_other_tokens"] or row["images_beyond_1e-4"] for row in compared)
    page = " ".join((docs / "reference/exported-files.md").read_text().split())
    assert f"{len(compared) // len(ONNX_ENGINES)} small random models" in page
    assert f"differ from torch by {worst:.1e} at most" in page
    assert f"GTP+ on all {len({row['family'] for row in found if row['method'] == 'gtp_plus'})} families" in page


@needs("openvino")
@pytest.mark.time_limit(6)  # the first one loads OpenVINO
@pytest.mark.parametrize("how", ["missing", "cut off", "of another"])
def test_weights_beside_a_file_that_are_broken_are_named(exported, tmp_path, how, capsys):
    made = exported("openvino", "f32")
    for path in (made, made.with_suffix(".bin")):
        shutil.copy(path, tmp_path / path.name)
    weights = tmp_path / made.with_suffix(".bin").name
    if how == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000] if how == "cut off" else b"x" * 5000)
    assert main(["evaluate", str(tmp_path / made.name)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert weights.name in said
    assert "core.cpp" not in said.split("(")[0]


@pytest.mark.slow
@needs_onnxruntime
def test_a_file_is_benchmarked_in_its_engine(fashion, capsys):
    assert main(["benchmark", str(fashion / FILE), "--rounds", "3", "--batch-size", "2", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    (timed,) = found["timed"]
    assert timed["engine"] == "onnxruntime"
    assert [timing["name"] for timing in timed["timings"]] == ["unreduced", FILE, "eager torch, unreduced"]
    assert found["settings"]["method"] == "gtp_plus"
    assert main(["benchmark", str(fashion / FILE), "--engine", "openvino"]) == ExitCode.USAGE
    assert f"--engine was fixed when {FILE} was exported; remove it" in capsys.readouterr().err
    assert main(["benchmark", "nowhere.onnx"]) == ExitCode.USAGE
    assert "there is no file nowhere.onnx" in capsys.readouterr().err


@pytest.mark.slow
@needs("openvino")
def test_an_export_that_is_killed_between_its_files_leaves_no_mixed_pair(ready, fast, images, tmp_path, monkeypatch):
    path = tmp_path / "model.xml"
    for each in (path, path.with_suffix(".bin"), tmp_path / "model.xml.md"):
        each.write_bytes(b"of an earlier export")
    checks = (exporting.OutputCheck(1, 0.0, 1.0, 1, 1.0, None, None),)
    monkeypatch.setattr(exporting, "check_outputs", lambda *_: checks)
    replace, calls = os.replace, []

    def killed(one, other):
        calls.append(other)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(one, other)

    monkeypatch.setattr(exporting.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(fast, path, overwrite=True)
    assert not path.exists()  # new weights beside an old program would run, and be wrong
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.bin", "model.xml.md"]


@needs_onnxruntime
def test_what_a_killed_export_left_is_deleted_by_the_next_of_that_file(ready, fast, trusted, tmp_path):
    left, other = tmp_path / ".model.onnx.killed", tmp_path / ".other.onnx.killed"
    running = tmp_path / ".model.onnx.running"
    for folder in (left, other, running):
        folder.mkdir()
        (folder / "float.onnx").write_bytes(b"x")
    lock = Lock(running / exporting.LOCK)
    exporting.export(fast, tmp_path / "model.onnx")
    lock.release()
    found = sorted(each.name for each in tmp_path.iterdir())
    assert found == [".model.onnx.running", ".other.onnx.killed", "model.onnx", "model.onnx.md"]
