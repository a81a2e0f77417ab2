"""Files for phones that were converted once, which takes minutes: they still are what torch computes.

They were made by `export(small, path)` of the model below, with the converters that `Converter.requirements` name.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from gtp_vit import GTPError, GTPPlus, export, patch
from gtp_vit.engines import ENGINES
from gtp_vit.engines.attachment import attach, traced_graph
from gtp_vit.engines.converter import Converter
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.patching import unpatch
from gtp_vit.testing import families
from support.engines import lacking

GOLDEN = Path(__file__).parents[1] / "golden/engines"
CLOSE = 1e-4
FILES = {"litert": "small.tflite", "executorch": "small.pte"}
CONVERTED = [("litert", "f32"), ("litert", "int8"), ("executorch", "f32"), ("executorch", "int8"), ("coreml", "f32")]


@pytest.fixture(scope="module")
def small():
    model = families.make("vit")
    model.blocks = model.blocks[:2]
    return patch(model, GTPPlus(remove=(16, 0)))


def installed(engine):
    if lacking(engine):
        pytest.skip(lacking(engine))


@pytest.mark.time_limit(60)  # ExecuTorch loads its own torch
@pytest.mark.parametrize("engine", FILES)
def test_a_recorded_file_computes_what_torch_computes(engine, small):
    installed(engine)
    file = ExportedFile.read(GOLDEN / FILES[engine])
    assert (file.metadata.engine, file.metadata.batch) == (engine, 1)
    file.check_model(unpatch(small))
    images = families.images("vit", 5)
    with torch.inference_mode():
        torch.testing.assert_close(file.load(threads=1)(images), small(images), rtol=0, atol=CLOSE)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("engine", FILES)
def test_a_recorded_file_in_8_bits_is_near_what_torch_computes(engine, small):
    installed(engine)
    path = GOLDEN / FILES[engine].replace(".", "-int8.")
    file = ExportedFile.read(path)
    assert file.metadata.precision == "int8"
    assert path.stat().st_size < 0.85 * (GOLDEN / FILES[engine]).stat().st_size
    images = families.images("vit", 5)
    with torch.inference_mode():
        found, wanted = file.load(threads=1)(images), small(images)
    assert 1e-4 < (found - wanted).abs().max() < 0.1
    assert (found.argmax(dim=1) == wanted.argmax(dim=1)).all()


@pytest.mark.parametrize("engine", FILES)
def test_a_recorded_file_that_was_edited_is_refused(engine, tmp_path):
    installed(engine)
    path = tmp_path / FILES[engine]
    shutil.copy(GOLDEN / FILES[engine], path)
    path.write_bytes(path.read_bytes().replace(b'"precision": "f32"', b'"precision": "f16"'))
    with pytest.raises(GTPError, match=r"cannot read .*Bad CRC-32.*; export it again"):
        ExportedFile.read(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GTPError, match=r"cannot read .*not a zip file.*; export it again"):
        ExportedFile.read(path)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "precision"), CONVERTED)
def test_a_file_is_converted_and_computes_what_torch_computes(engine, precision, small, tmp_path):
    installed(engine)
    missing = ENGINES[engine].converter.missing()
    if missing:
        pytest.skip(missing)
    path = tmp_path / f"small{ENGINES[engine].suffix}"
    made = export(small, path, precision=precision)
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.md"]
    assert bool(made.checks) == (ENGINES[engine].cannot_run() is None)
    if precision == "f32":
        assert all(check.max_difference <= CLOSE for check in made.checks)
    assert ExportedFile.read(path).metadata.precision == precision


def test_files_for_core_ml_say_everywhere_else_that_they_were_not_run(small, tmp_path, monkeypatch):
    """Its converter is replaced by what it writes."""
    engine = ENGINES["coreml"]
    monkeypatch.setattr("gtp_vit.engines.coreml.sys.platform", "linux")
    monkeypatch.setattr(Converter, "missing", lambda _: None)

    def write(program, path, precision, images, metadata):
        path.touch()
        attach(path, metadata, traced_graph(program, eight_bits=False))

    monkeypatch.setattr(engine, "convert", write)
    made = export(small, tmp_path / "small.mlpackage.zip")
    assert made.checks == ()
    assert made.images == "Core ML runs on macOS only"
    card = (tmp_path / "small.mlpackage.zip.md").read_text()
    assert "Converted and checked as a program, and not run: Core ML runs on macOS only." in card
    assert card.count("On macOS or iOS; not run here") == 2
    with pytest.raises(GTPError, match="Core ML runs on macOS only; here its files can only be made"):
        ExportedFile.read(made.path).load()
    assert "converted and checked as programs here, and not run" in engine.problem()
