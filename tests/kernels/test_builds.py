"""The native libraries: built from what is there now, one for each instruction set, and all of them right."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gtp_vit import GTP, kernels, patch
from gtp_vit.kernels import Ops, native, sources
from gtp_vit.kernels.arguments import NeighboursInputs
from gtp_vit.methods.atc import cluster
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge
from gtp_vit.testing import families
from support.operands import operands

ROOT = Path(__file__).parents[2]
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
needs_a_library = pytest.mark.skipif(native.LOAD_ERROR is not None, reason=f"no native library: {native.LOAD_ERROR}")


def here() -> Path:
    return Path(native.__file__).parent


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_where_there_is_a_compiler_there_are_native_kernels():
    """Else every test of them would be skipped without a word."""
    assert native.LOAD_ERROR is None


def test_a_library_is_named_by_its_sources_and_its_flags(tmp_path, monkeypatch):
    folder = shutil.copytree(sources.FOLDER, tmp_path / "cpp")
    names = {sources.library("portable"), sources.library("portable", folder)}
    assert len(names) == 1
    (folder / "vector.h").write_text((folder / "vector.h").read_text() + "\n")
    names.add(sources.library("portable", folder))
    (folder / "more.h").touch()
    names.add(sources.library("portable", folder))
    monkeypatch.setattr(sources, "FLAGS", ("-O2",))
    names.add(sources.library("portable"))
    assert len(names) == 4
    assert all(name.count(".") == 2 for name in names)  # no version of Python in it


@needs_a_library
def test_a_stale_library_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    right = here() / sources.library("portable")
    for name in ("_portable.0123456789ab.so", "_portable.cpython-311-x86_64-linux-gnu.so"):
        shutil.copy(right, tmp_path / name)
        library, _, problem = native.load(tmp_path)
        assert library is None
        assert "was built from different C++ sources; install gtp_vit again" in problem
    shutil.copy(right, tmp_path)
    library, build, problem = native.load(tmp_path)
    assert (build, problem) == ("portable", None)
    assert Path(library._name).name == right.name


def test_a_broken_or_missing_library_is_reported(tmp_path):
    library, _, problem = native.load(tmp_path)
    assert library is None
    assert "was built when the package was installed" in problem
    name = sources.library("portable")
    (tmp_path / name).write_bytes(b"not a library")
    library, _, problem = native.load(tmp_path)
    assert library is None
    assert f"{name} cannot be loaded" in problem
    assert "\n" not in problem


@pytest.mark.slow
def test_without_a_library_there_is_one_warning_and_the_right_result(tmp_path):
    """The package in a place where nothing was built."""
    package = here().parent
    shutil.copytree(package, tmp_path / "gtp_vit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = """
import warnings, timm, torch, gtp_vit
from gtp_vit import kernels
model = timm.create_model("test_vit").eval()
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("default")
    for _ in range(3):
        fast = gtp_vit.patch(model, gtp_vit.GTP(propagate=4))
    same = torch.equal(fast(torch.ones(1, 3, 160, 160)),
                       gtp_vit.patch(model, gtp_vit.GTP(propagate=4), kernels="torch")(torch.ones(1, 3, 160, 160)))
try:
    gtp_vit.patch(model, gtp_vit.GTP(), kernels="native")
except gtp_vit.GTPError as error:
    print(len([w for w in caught if "slower" in str(w.message)]), same, kernels.status().split(":")[0], error)
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 True torch operators kernels='native' is not available")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what builds the package, and a compiler that makes empty files: what is tested is which, not what."""
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    return tmp_path


def setup(checkout: Path, *words: str) -> None:
    compiler = str(checkout / "compiler")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *words],
        cwd=checkout,
        env=os.environ | {"CC": compiler, "CXX": compiler, "LDSHARED": compiler, "LDCXXSHARED": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_changed_sources_are_built_again_and_the_old_libraries_go(checkout):
    folder = checkout / "src/gtp_vit/kernels"
    old = folder / "_portable.cpython-310-x86_64-linux-gnu.so"
    old.touch()
    found = []
    for change in ("", "// one line more\n"):
        (folder / "cpp/conserve.h").write_text((folder / "cpp/conserve.h").read_text() + change)
        setup(checkout, "build_ext", "--inplace")
        wanted = {sources.library(name, folder / "cpp") for name in sources.INSTRUCTION_SETS}
        built = {path.name for path in folder.glob("*.so")}
        assert built <= wanted
        assert sources.library("portable", folder / "cpp") in built
        found.append(built)
    assert not found[0] & found[1]


def test_wheel_and_sdist_have_what_a_library_is_named_by(checkout):
    stale = checkout / "build/lib/gtp_vit/kernels/_portable.0123456789ab.so"  # what an earlier build has left there
    stale.parent.mkdir(parents=True)
    stale.touch()
    setup(checkout, "build", "--build-lib", "build/lib", "sdist", "bdist_wheel")
    (wheel,) = (checkout / "dist").glob("*.whl")
    assert "-cp310-abi3-" in wheel.name  # one for every Python
    inside = set(zipfile.ZipFile(wheel).namelist())
    libraries = {name for name in inside if name.endswith(".so")}
    assert f"gtp_vit/kernels/{sources.library('portable')}" in libraries
    assert libraries <= {f"gtp_vit/kernels/{sources.library(name)}" for name in sources.INSTRUCTION_SETS}
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for path in [*sources.FOLDER.iterdir(), Path(sources.__file__)]:
        name = path.relative_to(ROOT / "src").as_posix()
        assert name in inside
        assert f"src/{name}" in packed
    assert "setup.py" in packed


@needs_a_library
def test_where_no_openmp_runtime_is_found_it_is_said(monkeypatch):
    """torch brings one, so a process without torch has none."""
    assert native.MULTITHREADED
    assert "one thread" not in kernels.status()
    library = here() / sources.library("portable")
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).gtp_vit_threads(4))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    monkeypatch.setattr(native, "MULTITHREADED", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "on one thread only" in kernels.status()
    with pytest.warns(UserWarning, match="run on one thread only"):
        fast = patch(families.make("vit"), GTP(propagate=4))
    with torch.no_grad():
        assert fast.kernels == kernels.status()
    patch(families.make("vit"), GTP(propagate=4), kernels="torch")  # no warning: they are not used


def awkward_calls(dtype: torch.dtype):
    """Every operator with sizes that are no multiple of any vector's, and with the sizes of real models."""
    torch.manual_seed(0)
    for batch, heads, tokens, depth in ((2, 3, 101, 40), (1, 2, 18, 9), (1, 6, 197, 64), (1, 1, 5, 130)):
        q, k, v, size = operands("normal", batch, heads, tokens, depth, tokens)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        for removed, over_heads in ((0, 1), (tokens * tokens // 3, 2), (0, 0)):
            asked = ([True, True, True], over_heads, min(1, over_heads))
            yield kernels.attention, (q, k, v, size, 0.2, removed, tokens, *asked)
        yield kernels.attention, (q[:, :, :4], k, v, size, 0.2, 0, 4, [False, False, True], 2, 1)
    for batch, rows, columns, channels in ((2, 5, 7, 33), (1, 14, 14, 192), (3, 4, 9, 17)):
        patches = rows * columns
        similarity = torch.randn(batch, patches, patches)
        for spatial, semantic in ((8, 3), (0, 20), (4, 1)):
            yield operators.neighbours, (similarity, rows, columns, spatial, semantic)
        lists = operators.neighbours_reference(NeighboursInputs(similarity, rows, columns, 8, 3))
        x, branch = torch.randn(2, batch, 2 + patches, channels).to(dtype)
        scores, size = torch.rand(batch, patches), torch.rand(batch, 2 + patches) + 0.5
        position = torch.stack([torch.randperm(patches) for _ in range(batch)])
        norm = (*torch.randn(2, channels).to(dtype), 1e-6)
        for norms, sizes in ((norm, size), ((None, None, 0.0), None)):
            arguments = (x, branch, scores, position, sizes, *lists, patches // 3, 0.3, True, *norms)
            yield operators.gtp_reduce, arguments
        for norms, keep_norm in ((norm, True), ((None, None, 0.0), False)):
            arguments = (x, branch, scores, size[:, 2:], patches // 3, 0.5, keep_norm, *norms)
            yield gtp_plus_merge, arguments
        unit = F.normalize(x[:, 2:].float(), dim=2)
        apart = 1 - unit @ unit.transpose(1, 2)
        for linkage in (0, 1, 2):
            yield cluster, (apart, patches // 3, linkage)


@needs_a_library
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_of_every_kernel_equals_the_reference(capability, dtype, monkeypatch, request):
    if CAPABILITIES.index(capability) > CAPABILITIES.index(torch.backends.cpu.get_cpu_capability()):
        pytest.skip(f"this processor has no {capability}")
    folder = Path(request.config.getoption("--native-folder") or here())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
            native.load_from(folder)
        assert {"DEFAULT": "portable"}.get(capability, capability.lower()) == native.INSTRUCTION_SET
        for operator, arguments in awkward_calls(dtype):
            inputs = operator.inputs(*arguments)
            for found, wanted in zip(operator.by_set[Ops.NATIVE](inputs), operator.reference(inputs), strict=True):
                if found.dtype == torch.int64:
                    assert torch.equal(found.sort(dim=-1).values, wanted.sort(dim=-1).values)
                else:
                    torch.testing.assert_close(found, wanted, **close)
    finally:
        native.load_from(folder)
