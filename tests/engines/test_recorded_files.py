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
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.patching import unpatch
from gtp_vit.testing import families
from support.engines import lacking

GOLDEN = Path(__file__).parents[1] / "golden/engines"
CLOSE = 1e-4
FILES = {"litert": "small.tflite", "executorch": "small.pte"}


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
@pytest.mark.parametrize("precision", ["f32", "int8"])
@pytest.mark.parametrize("engine", FILES)
def test_a_file_is_converted_and_computes_what_torch_computes(engine, precision, small, tmp_path):
    installed(engine)
    missing = ENGINES[engine].converter.missing()
    if missing:
        pytest.skip(missing)
    before = set(os.listdir(tmp_path))
    made = export(small, tmp_path / FILES[engine], precision=precision)
    assert set(os.listdir(tmp_path)) - before == {FILES[engine], f"{FILES[engine]}.md"}
    if precision == "f32":
        assert max(check.max_difference for check in made.checks) <= CLOSE
    assert ExportedFile.read(made.path).metadata.precision == precision
