"""Programs that torch compiles: they compute what torch computes, with any batch, and for one torch only."""

import importlib.metadata
import json
import zipfile

import pytest
import torch

from gtp_vit import GTPError, GTPPlus, export, patch
from gtp_vit.engines import ENGINES
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.testing import families
from support.engines import needs

pytestmark = needs("aotinductor")
CLOSE = 1e-4


@pytest.fixture(scope="module")
def small():
    model = families.make("vit")
    model.blocks = model.blocks[:2]
    return patch(model, GTPPlus(remove=(16, 0)))


@pytest.fixture
def file(once, small):
    return once("small.pt2", lambda folder: export(small, folder / "small.pt2")) / "small.pt2"


@pytest.mark.time_limit(120)  # a C++ compiler
def test_a_file_computes_what_torch_computes(file, small):
    assert sorted(each.name for each in file.parent.iterdir()) == ["small.pt2", "small.pt2.md"]
    exported = ExportedFile.read(file)
    assert exported.metadata.batch is None
    run = exported.load(threads=1)
    for count in (1, 5):
        images = families.images("vit", count)
        with torch.inference_mode():
            torch.testing.assert_close(run(images), small(images), rtol=0, atol=CLOSE)


@pytest.mark.slow
def test_a_file_for_another_torch_is_refused(file, tmp_path):
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "x.pt2", "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("gtp_vit.json"):
                metadata = json.loads(data)
                metadata["versions"]["torch"] = "2.9.0"
                data = json.dumps(metadata)
            new.writestr(entry.filename, data)
    here = importlib.metadata.version("torch")
    with pytest.raises(GTPError, match=f"it was compiled for torch 2.9.0, and this is torch {here}; export it again"):
        ExportedFile.read(tmp_path / "x.pt2").load()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1000, -100])
def test_a_file_that_is_cut_off_is_refused(file, tmp_path, kept):
    cut = tmp_path / "x.pt2"
    cut.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(GTPError, match=r"aotinductor cannot read .*x\.pt2: .*; export it again"):
        ExportedFile.read(cut)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("gtp_vit.engines.aotinductor.shutil.which", lambda _: None)
    assert ENGINES["aotinductor"].missing() == (
        "needs a C++ compiler, which is not installed: install g++ or clang++, or name one in CXX"
    )
