"""Set-up of all tests: the AMX trap, one thread, what may not skip, where the real weights and goldens are,
and what is too slow to be made more than once."""

import contextlib
import io
import os

# On some virtual machines bf16 products kill the process, with no exception (docs/decisions.md). Before torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Each worker of pytest-xdist has a core of its own: more threads would only fight for it. Processes that tests start
# inherit this; a test that needs two threads takes the fixture `two_threads`.
os.environ["OMP_NUM_THREADS"] = "1"
# Triton kernels run in its interpreter, on a CPU; Triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import pytest
import torch

from support.time_limit import hold_to_limit

torch.set_num_threads(1)  # where torch was loaded before this file
# nn.MultiheadAttention has two implementations, which round differently. Tests compare with the one that torch's FLOP
# counter can see into; those of the other one, which eval mode prefers, take the fixture `mha_fast_path`.
torch.backends.mha.set_fastpath_enabled(False)


def pytest_addoption(parser):
    parser.addoption("--native-folder", help="test the native libraries in this folder, e.g. a sanitizer build")


def pytest_configure(config):
    folder = config.getoption("--native-folder")
    if folder:
        from gtp_vit.kernels import native

        native.load_from(Path(folder))
        assert native.LOAD_ERROR is None, native.LOAD_ERROR


SLOW_EXAMPLES = {"gtp_vit.engines.export.export"}  # docstrings whose example takes over two seconds


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = unless_it_must_run((yield), os.environ.get("GTP_VIT_MUST_RUN", ""))
    hold_to_limit(report, item)
    return report


def unless_it_must_run(report, words):
    """A skipped test fails if its reason has one of these words: what CI provides, it provides for all tests."""
    reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
    if any(word in reason for word in words.split()):
        report.outcome, report.longrepr = "failed", f"it must run here (GTP_VIT_MUST_RUN={words}), but {reason}"
    return report


@pytest.fixture
def two_threads():
    """Threads inside a kernel or a product."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def mha_fast_path():
    """nn.MultiheadAttention as users have it."""
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(False)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with real weights, images and the outputs of the original implementations."""
    folder = os.environ.get("GTP_VIT_DATA")
    if not folder:
        pytest.skip("GTP_VIT_DATA is not set: real weights and goldens are not here")
    path = Path(folder)
    if not (path / "golden").is_dir():
        pytest.fail(f"GTP_VIT_DATA={folder} has no folder golden")
    return path


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): a folder that make(folder) has filled, one time for all workers of pytest-xdist."""
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    root.mkdir(exist_ok=True)

    def folder(name, make):
        with FileLock(root / f"{name}.lock"):
            if not (root / name).is_dir():
                begun = root / f"{name}-begun"
                begun.mkdir()
                make(begun)
                begun.rename(root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def fashion(once):
    """A folder with what `gtp-vit export` makes of the embedded model; its answer is beside it."""
    from gtp_vit.cli.app import ExitCode, main

    def make(folder):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(["export", "--output", str(folder / "out"), "--images", "16", "--json"])
        assert code == ExitCode.OK, err.getvalue()
        (folder / "answer.json").write_text(out.getvalue())

    return once("fashion", make) / "out"
