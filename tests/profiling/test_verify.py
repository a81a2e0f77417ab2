"""benchmark --verify without a GPU: all but the times, on a CPU or with a GPU that is pretended."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gtp_vit import GTP, GTPPlus, ToMe, patch
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.kernels import Ops
from gtp_vit.profiling import operator_equality, verify
from gtp_vit.profiling.benchmark import Timing, interleave
from gtp_vit.profiling.operator_equality import Sizes, compare_operators, worst_of
from gtp_vit.report.verification import markdown
from gtp_vit.testing import families

SMALL = Sizes(side=4, channels=32, removed=3)
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter


@pytest.fixture
def only(monkeypatch):
    """only(operator, case): the comparison of one operator in one case, without Triton's slow interpreter if asked."""

    def choose(operator, case, *, triton=False):
        every = list(operator_equality._cases(SMALL))
        few = [each for each in every if each[:2] == (operator, case)]
        assert few, (operator, case)
        monkeypatch.setattr(operator_equality, "_cases", lambda sizes: iter(few))
        if not triton:
            monkeypatch.setattr(operator_equality.triton_set, "why_not", lambda *arguments: "not now")

    return choose


OPERATORS = ["gtp_plus_merge", "gtp_plus_merge_by_probe", "gtp_reduce", "attention statistics", "tome"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_equals_itself_on_a_cpu(operator, only):
    only(operator, "random")
    rows = compare_operators(CPU, sizes=SMALL)
    assert [row.dtype for row in rows] == ["float32", "float16", "bfloat16"]
    assert all(row.passed and row.different_tokens == row.largest_error == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_kernel_equals_its_reference_in_every_dtype(operator, only):
    only(operator, "random", triton=True)
    rows = compare_operators(CPU, sizes=SMALL, runs=2)
    assert len(rows) == 6
    assert all(row.passed and row.same_bits for row in rows)


def test_a_kernel_that_takes_another_token_fails(only, monkeypatch):
    only("gtp_plus_merge", "random")
    monkeypatch.setattr(operator_equality.triton_set, "why_not", lambda *arguments: None)
    real = operator_equality._gtp_plus
    calls = []

    def swapped(ops, operands):
        merged = list(real(Ops.TORCH, operands))
        calls.append(ops)
        if ops is Ops.TRITON:
            merged[4] = merged[4].flip(1)
        return tuple(merged)

    cases = [(name, case, swapped, operands) for name, case, _, operands in operator_equality._cases(SMALL)]
    monkeypatch.setattr(operator_equality, "_cases", lambda sizes: iter(cases))
    rows = [row for row in compare_operators(CPU, sizes=SMALL) if row.against == "reference on this device"]
    assert [row.passed for row in rows] == [False] * 3
    assert rows[0].different_tokens > 0
    assert calls.count(Ops.TRITON) == 3 * operator_equality.RUNS


def test_other_bits_in_another_run_fail(only, monkeypatch):
    only("tome", "random")
    monkeypatch.setattr(operator_equality.triton_set, "why_not", lambda *arguments: None)
    real = operator_equality._tome
    turn = iter(range(1000))

    def unsteady(ops, operands):
        merged = list(real(Ops.TORCH, operands))
        if ops is Ops.TRITON:
            merged[0] = merged[0] + 1e-5 * (next(turn) % 2)
        return tuple(merged)

    cases = [(name, case, unsteady, operands) for name, case, _, operands in operator_equality._cases(SMALL)]
    monkeypatch.setattr(operator_equality, "_cases", lambda sizes: iter(cases))
    first = compare_operators(CPU, sizes=SMALL)[0]
    assert not first.same_bits
    assert not first.passed
    assert first.different_tokens == 0


def test_the_worst_case_stands_for_an_operator(only):
    only("gtp_reduce", "ties")
    rows = compare_operators(CPU, sizes=SMALL)
    bad = operator_equality.dataclasses.replace(rows[0], largest_error=7.0, passed=False)
    (worst, *_) = worst_of([*rows, bad])
    assert (worst.case, worst.largest_error, worst.passed) == ("all", 7.0, False)


# The checks of a model -----------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    model = families.make("vit")
    return model, patch(model, GTPPlus(remove=7), quiet=True), families.images("vit")


def test_what_a_cpu_cannot_show_is_neither_passed_nor_failed(pair):
    model, fast, images = pair
    with torch.no_grad():
        assert verify.no_synchronisation(fast, images) == (None, "there is nothing to wait for on cpu")
        assert verify.launches(model, fast, images)[0] is None
        assert verify.cuda_graph(fast, images) == (None, "cpu has no CUDA graphs")


@pytest.mark.time_limit(6)
@pytest.mark.parametrize(
    "method",
    [GTPPlus(remove=7), *(pytest.param(each, marks=pytest.mark.slow) for each in (GTP(propagate=7), ToMe(r=7)))],
    ids=str,
)
def test_a_model_is_one_graph(method, pair):
    fast = patch(pair[0], method, quiet=True)
    with torch.no_grad():
        passed, detail = verify.compiled(fast, pair[2], backend="eager")
    assert passed
    assert detail.endswith("in one graph; traced, not compiled")


def test_a_check_that_raises_has_failed():
    def broken():
        raise RuntimeError("no memory\nmore")

    assert verify._attempt("CUDA graph", broken) == verify.Check("CUDA graph", False, "RuntimeError: no memory")


def test_a_batch_for_which_memory_is_too_small_is_left_out(pair, monkeypatch):
    model, fast, images = pair
    for name in ("compare_operators", "compiled"):
        monkeypatch.setattr(verify, name, lambda *arguments, **options: [] if options else (True, ""))

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(verify, "speeds", full)
    report = verify.verify(model, fast, images, batch_sizes=(2,))
    assert report.checks[-1] == verify.Check("speed at batch 2", None, "not enough memory for all models and modes")
    assert report.failed == []


def test_kernels_are_counted_without_copies():
    names = ["Memcpy HtoD", "ampere_gemm", "fmha_cutlassF_f16", "Memset (Device)", "merge_kernel"]
    assert verify._count_kernels(names) == (3, "fmha_cutlassF_f16")
    assert verify._count_kernels(["a"]) == (1, "")


@pytest.mark.parametrize(("own", "passed"), [(45 + 4 * 8, True), (400, False)])
def test_launches_are_held_to_the_budget(own, passed, pair, monkeypatch):
    model, fast, _ = pair
    images = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(verify, "_profiled", lambda one, images: (45 if one is model else own, "flash"))
    result, detail = verify.launches(model, fast, images)
    assert result is passed
    assert detail.startswith(f"{own} a forward pass, 45 unreduced, at most ")
    assert detail.endswith("attention by flash")


def test_outputs_that_differ_fail():
    one = torch.ones(2, 3)
    assert verify._same_outputs(one, one, torch.float32) == (
        True,
        "largest difference from eager mode 0.0e+00 of the largest output",
    )
    assert not verify._same_outputs(1.01 * one, one, torch.float32)[0]


def test_times_by_another_clock():
    seconds = iter(range(1, 100))
    samples = interleave(
        {"a": lambda: None, "b": lambda: None}, rounds=3, warmup=1, seconds_of=lambda call: float(next(seconds))
    )
    assert sorted(samples["a"] + samples["b"]) == [3, 4, 5, 6, 7, 8]


def timing(name, speedup):
    return Timing(name, 10.0 / speedup, (9.0, 11.0), speedup, (speedup, speedup), speedup)


def test_the_share_of_slicings_gain():
    rows = [
        verify.Speed(64, "eager", name, timing(name, speed), None)
        for name, speed in (("unreduced", 1.0), ("slicing", 1.8), ("gtp_plus", 1.4))
    ]
    assert dict(verify.kept_gain(rows)) == {(64, "eager"): pytest.approx(0.5)}
    assert verify.kept_gain(rows[:1] + rows[2:]) == {}
    report = verify.Verification({"device": "A100"}, speeds=rows)
    assert verify.line_of(report, torch.float16) == (
        "A100, fp16, batch 64, eager: gtp_plus 1.40 (slicing 1.80); all checks passed"
    )
    report.checks = [verify.Check("CUDA graph", False, "")]
    assert verify.line_of(report, torch.float16).endswith("; FAILED: CUDA graph")


def test_a_report_as_markdown(only):
    only("gtp_reduce", "ties")
    report = verify.Verification({"device": "A100"}, [verify.Check("launches", None, "a | b")])
    report.speeds = [verify.Speed(64, "eager", "gtp", timing("gtp", 1.25), 812.4)]
    report.line = "A100, fp16"
    text = markdown(report, compare_operators(CPU, sizes=SMALL), {(64, "eager"): 0.5})
    assert "| launches | not here | a / b |" in text
    assert "| gtp_reduce, reference | float32 | reference on a CPU | 0.00% | 0e+00 | yes | passed |" in text
    assert "| 64 | eager | gtp | 8.00 | 9.00 .. 11.00 | 8000 | 1.25 | 1.25 .. 1.25 | 50% | 812 |" in text


# The command ----------------------------------------------------------------------------------------------------------


WORDS = ["benchmark", "test_vit", "--verify", "--rounds", "3", "-b", "1", "--method", "gtp", "--propagate", "7"]


@pytest.fixture
def no_operators(monkeypatch):
    """Without the comparison of operators, which has its own tests."""
    monkeypatch.setattr(verify, "compare_operators", lambda device, **settings: [])


@pytest.mark.slow
def test_the_command_prints_a_report_and_writes_it(tmp_path, capsys, no_operators):
    assert main([*WORDS, "--report", str(tmp_path / "gpu.md")]) == ExitCode.OK
    out = capsys.readouterr().out
    text = (tmp_path / "gpu.md").read_text()
    assert text in out
    assert "| torch.compile | passed |" in text
    assert "| CUDA graph | not here | cpu has no CUDA graphs |" in text
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [check["name"] for check in found["checks"]] == [
        "operators",
        "no synchronisation",
        "launches",
        "CUDA graph",
        "torch.compile",
    ]
    assert {row["model"] for row in found["speeds"]} == {"unreduced", "gtp", "slicing"}
    assert found["line"].endswith("all checks passed")


@pytest.mark.slow
def test_a_failed_check_is_exit_code_1(capsys, no_operators, monkeypatch):
    monkeypatch.setattr(verify, "compiled", lambda fast, images: (False, "two graphs"))
    assert main([*WORDS, "--json"]) == ExitCode.FAILED
    captured = capsys.readouterr()
    assert json.loads(captured.out)["line"].endswith("FAILED: torch.compile")
    assert captured.err.splitlines()[-1] == "gtp-vit: 1 of 5 checks failed: torch.compile (two graphs)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--verify", "--engine", "onnxruntime"], "--verify is for torch; leave out --engine onnxruntime"),
        (["--verify", "--compile"], "--verify times eager and compiled models; leave out --compile"),
        (["--report", "x.md"], "--report is for --verify; give that, too"),
        (["--verify", "--report", "x.html"], "--report is x.html; its name must end in .md"),
        (["--verify", "--html", "x.html"], "--verify has a report in Markdown; give --report FILE.md, not --html"),
    ],
)
def test_flags_that_make_no_sense_with_it(words, message, capsys):
    assert main(["benchmark", "test_vit", *words]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_the_machine_says_which_kernels_run_and_why(pair, monkeypatch):
    _, fast, _ = pair
    about = verify.machine(torch.device("meta"), fast)
    assert about["Triton"] == "the tokens are on meta; Triton kernels are for CUDA"
    assert about["kernels"]
    properties = SimpleNamespace(name="A100", major=8, minor=0, total_memory=40 * 2**30, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    answer = SimpleNamespace(stdout="580.1, 1410 MHz, 400.00 W\n")
    monkeypatch.setattr(verify.subprocess, "run", lambda *words, **options: answer)
    about = verify.machine(torch.device("cuda"), fast)
    assert (about["device"], about["compute capability"], about["memory"]) == ("A100", "8.0", "40 GB")
    assert (about["driver"], about["clock"], about["power limit"]) == ("580.1", "1410 MHz", "400.00 W")
    assert isinstance(fast, nn.Module)
