"""Methods and families of an installed package are taken by entry points; mistakes are said in one line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtp_vit import METHODS, GTPError
from gtp_vit import plugins as plugins_module
from gtp_vit.backbones import BACKBONES, known_backbones
from gtp_vit.core.reducer import Method
from gtp_vit.methods import make_method
from gtp_vit.plugins import plugins

SUPPORT = Path(__file__).parents[1] / "support"
ENTRIES = """\
[gtp_vit.methods]
toy = gtp_toys.toy_method:Toy

[gtp_vit.backbones]
toy = gtp_toys.toy_family:ToyBackbone
"""
USE = """
import sys
import gtp_vit, torch
from gtp_vit import testing
from gtp_vit.cli.app import main

assert list(gtp_vit.METHODS)[-1] == "identity" and "gtp_toys" not in sys.modules
model = gtp_vit.create_model("toy:small")
fast = gtp_vit.patch(model, "toy")
assert fast(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
assert type(fast.reduction.method).__module__ == "gtp_toys.toy_method"
assert gtp_vit.macs(fast).total < gtp_vit.macs(model).total
assert main(["methods"]) == 0
assert main(["models", "toy:*"]) == 0
assert main(["macs", "toy:deep", "--method", "toy", "--dropped", "9"]) == 0
(case,) = testing.cases([gtp_vit.make_method("toy", dropped=5)], {"toy": testing.families.factories()["toy"]})
testing.check(case)
"""


def install(folder, entries=ENTRIES, name="gtp-toys"):
    """A package as pip would install it, with the toys of these tests in it."""
    package, about = folder / "gtp_toys", folder / f"{name.replace('-', '_')}-1.0.dist-info"
    if not package.exists():
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "broken.py").write_text("import a_library_that_is_not_there\n")
        for file in ("toy_method.py", "toy_family.py"):
            shutil.copy(SUPPORT / file, package)
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    return folder


@pytest.mark.slow
def test_an_installed_package_brings_a_method_and_a_family(tmp_path):
    install(tmp_path)
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USE}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "toy" in done.stdout
    assert "toy:deep" in done.stdout


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs entry points for one test."""

    def put(entries, name="gtp-toys"):
        monkeypatch.syspath_prepend(install(tmp_path, entries, name))
        plugins_module._entry_points.cache_clear()

    yield put
    plugins_module._entry_points.cache_clear()
    for name in [name for name in sys.modules if name.startswith("gtp_toys")]:
        del sys.modules[name]
    METHODS.pop("toy", None)
    BACKBONES.pop("toy", None)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("toy = gtp_toys.broken:Toy", "broken:Toy cannot be imported: ModuleNotFoundError: No module named 'a_lib"),
        ("toy = gtp_toys.toy_method:Other", "cannot be imported: AttributeError: .*; update or uninstall that package"),
        ("gtp = gtp_toys.toy_method:Toy", "calls itself 'toy'; both names must be the same"),
        ("toy = gtp_toys.toy_family:ToyBackbone", "toy_family:ToyBackbone is not a subclass of Method"),
        ("toy = gtp_toys.toy_family:TOYS", "toy_family:TOYS is not a subclass of Method"),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_package(installed, entry, message):
    installed(f"[gtp_vit.methods]\n{entry}\n")
    assert make_method("gtp").name == "gtp"  # others are not disturbed
    with pytest.raises(
        GTPError, match=rf"^the package gtp-toys registers .* in gtp_vit\.methods, and .*{message}"
    ) as error:
        make_method("toy")
    assert "\n" not in str(error.value)


def test_names_that_are_taken_are_refused(installed):
    installed("[gtp_vit.backbones]\ntimm_vit = gtp_toys.toy_family:ToyBackbone\n")
    with pytest.raises(GTPError, match=r"and gtp_vit\.backbones\.timm_vit\.TimmViT has that name already"):
        known_backbones()
    installed("[gtp_vit.methods]\ntoy = gtp_toys.toy_method:Toy\n", "gtp-toys-again")
    assert plugins("gtp_vit.methods", Method, METHODS)["toy"].__module__ == "gtp_toys.toy_method"
