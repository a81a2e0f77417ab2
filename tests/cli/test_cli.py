"""The command, through its entry point."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from gtp_vit import GTP, patch
from gtp_vit.cli import model_flags
from gtp_vit.cli.app import COMMANDS, ExitCode, main
from gtp_vit.cli.commands import benchmark, evaluate
from gtp_vit.cli.flags import parse_flags, parse_with_method
from gtp_vit.cli.measure_flags import with_flags
from gtp_vit.cli.target_flags import target_flags
from gtp_vit.errors import SettingError
from gtp_vit.profiling.benchmark import Timing, interleave, speedups_over
from gtp_vit.profiling.macs import layer_costs
from gtp_vit.report.timing import BatchTiming, verdict
from gtp_vit.testing import families

TINY = ["test_vit", "--method", "gtp", "--propagate", "4"]


def run(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_no_command_shows_the_commands(capsys):
    code, out, _ = run(capsys)
    assert code == ExitCode.USAGE
    assert all(command in out for command in COMMANDS)
    assert run(capsys, "--help")[0] == ExitCode.OK


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (ExitCode.OK, "gtp-vit")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == ExitCode.OK
    assert f"gtp-vit {command}" in out


def test_benchmark_shows_layers_times_and_a_verdict(capsys):
    code, out, _ = run(capsys, "benchmark", *TINY, "--batch-size", "2", "--rounds", "3")
    assert code == ExitCode.OK
    assert "layer 5" in out
    assert "speed-up" in out
    assert any(word in out for word in ("times as fast", "no gain here", "no clear difference"))


@pytest.mark.slow
def test_benchmark_sweeps_batches_and_writes_a_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    words = ["benchmark", *TINY, "-b", "1", "2", "--rounds", "3", "--dtype", "bfloat16", "--html", str(page)]
    code, out, _ = run(capsys, *words)
    assert code == ExitCode.OK
    assert "batch 1:" in out
    assert "batch 2:" in out
    assert "Cost of each layer" in page.read_text()


def test_benchmark_as_json(capsys):
    code, out, _ = run(capsys, "benchmark", *TINY, "-b", "1", "--rounds", "3", "--threads", "1", "--json")
    result = json.loads(out)
    assert code == ExitCode.OK
    assert result["settings"]["method"] == "gtp"
    assert result["settings"]["propagate"] == 4
    (entry,) = result["timed"]
    assert [timing["name"] for timing in entry["timings"]] == ["unreduced", "gtp", "slicing"]
    assert len(result["verdicts"]) == 1
    assert result["macs"]["gtp"] < result["macs"]["unreduced"]


@pytest.mark.slow
def test_macs_with_other_methods_and_schedules(capsys):
    def total(*words):
        code, out, _ = run(capsys, "macs", "test_vit", "--json", *words)
        assert code == ExitCode.OK
        return json.loads(out)

    def listed(*schedule):
        return total("--method", "gtp", "--propagate", *schedule)["gtp"]

    assert listed("linear:2:6") == listed("2", "3", "4", "4", "5", "6")
    identity = total("--method", "identity")
    assert identity["identity"] < identity["unreduced"]
    assert total("--method=identity", "--no-shorten-last-block")["identity"] == identity["unreduced"]
    assert total("--convention", "torchprofile")["gtp_plus"] > total()["gtp_plus"]
    assert "total" in run(capsys, "macs", "test_vit")[1]
    assert total("--method", "tome", "--r", "4")["tome"] > total("--method", "tome", "--r", "8")["tome"]
    assert "total" in run(capsys, "macs", "lvvit_s", "--method", "evit", "--keep-rate", "0.5")[1]


def test_benchmark_of_a_method_whose_token_count_depends_on_the_image(capsys):
    code, out, _ = run(
        capsys, "benchmark", "test_vit", "--method", "ats", "--rounds", "3", "--batch-size", "2", "--json"
    )
    assert code == ExitCode.OK
    assert json.loads(out)["macs"]["ats"] > 0
    assert "layer 5" in run(capsys, "benchmark", "test_vit", "--method", "ats", "--rounds", "3")[1]
    words = ["benchmark", "lvvit_t", "--img-size", "32", "--method", "tome", "--r", "0", "--rounds", "3"]
    assert run(capsys, *words)[0] == ExitCode.OK


@pytest.mark.slow
def test_check_says_whether_bf16_works(capsys):
    code, out, _ = run(capsys, "check", "--json")
    found = json.loads(out)
    assert code == ExitCode.OK
    # the tests run with ONEDNN_MAX_CPU_ISA set, which avoids the trap
    assert found["bf16"] == "works"
    assert found["threads"] == 2 or found["threads"] == 1
    assert run(capsys, "check")[0] == ExitCode.OK


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "unknown command 'bench'; did you mean 'benchmark'"),
        (["macs", "deit_smal_patch16_224"], "the nearest are deit_small_patch16_224"),
        (["evaluate", "--num-classes", "9"], "fashion_vit has its own size and classes; remove num_classes"),
        (["macs", "test_vit", "--method", "gpt"], "unknown method 'gpt'; did you mean 'ppt' or 'gtp'"),
        (["macs", "test_vit", "--method", "ats"], "ATS keeps a different number of tokens in each image"),
        (["macs", "lvvit_x"], "the nearest are lvvit_t"),
        (["macs", "test_vit", "--method", "evit", "--keep-rate", "1.5"], "keep_rate is 1.5"),
        (["macs", "test_vit", "--remove", "40"], "largest constant number for this model is"),
        (["macs", "test_vit", "--method", "gtp", "--select", "mixd"], "did you mean 'mixed'"),
        (["evaluate", "test_vit", "--data-dir", "."], "test_vit has random weights; give --pretrained or --checkpoint"),
        (["evaluate", "test_vit", "--checkpoint", "no.pth", "--data-dir", "."], "there is no file no.pth"),
        (["evaluate", "--results-file", "x.txt"], "must end in .csv or .json"),
        (["compare", "--macs", "1.5"], "--macs is 1.5"),
        (["compare", "--rounds", "2"], "give 0, or at least 3"),
        (["methods", "tom"], "unknown method 'tom'; did you mean 'tome'"),
        (["models", "deitt_small*"], "no model is called"),
        (["visualise", "test_vit", "x.jpg"], "has random weights"),
        (["macs", "test_resnet"], "ResNet is not a supported ViT"),
        (
            ["macs", "test_vit", "--method", "gtp", "--graph", "spacial"],
            "unknown --graph 'spacial'; did you mean 'spatial'",
        ),
        (["macs", "test_vit", "--method=gtp", "--graph=spacial"], "did you mean 'spatial'"),
        (["macs", "test_vit", "--method", "gtp", "--graf", "mixed"], "unknown flag '--graf'; did you mean '--graph'"),
        (["macs", "test_vit", "--convention", "torchprofil"], "did you mean 'torchprofile'"),
        (["check", "--jason"], "did you mean '--json'"),
        (["macs", "deit_small_patch16_224.foo"], "timm cannot create 'deit_small_patch16_224.foo'"),
        (["macs", "foo/bar"], "unknown model 'foo/bar'"),
        (["benchmark", "test_vit", "--batch-size", "0"], "--batch-size is 0"),
        (["benchmark", "test_vit", "--rounds", "1"], "rounds is 1"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_two(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == ExitCode.USAGE
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_unexpected_errors_get_one_line_and_exit_code_one(capsys, monkeypatch):
    def fail(words):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(benchmark, "main", fail)
    code, _, err = run(capsys, "benchmark")
    assert (code, err) == (ExitCode.FAILED, "gtp-vit: RuntimeError: out of luck (--debug shows where)\n")


@pytest.mark.slow
def test_a_closed_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)  # before anything is written, so that it certainly fails
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gtp_vit.cli.app", "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, b"")


def test_debug_shows_the_traceback():
    with pytest.raises(SettingError):
        main(["benchmark", "test_vit", "--batch-size", "0", "--debug"])


@pytest.mark.time_limit(5)
def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "gtp_vit.cli.app", "--version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"gtp-vit ")


def test_interrupting_leaves_no_traceback(capsys, monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "main", interrupt)
    code, _, err = run(capsys, "benchmark")
    assert code == ExitCode.INTERRUPTED
    assert err == "gtp-vit: interrupted; run it again\n"
    monkeypatch.setattr(evaluate, "main", interrupt)
    assert "with --results-file what was finished is kept" in run(capsys, "evaluate")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_every_help_text_can_be_parsed(command):
    options = getattr(importlib.import_module(f"gtp_vit.cli.commands.{command}"), command.capitalize())
    options = with_flags(options, target_flags()) if command == "tune" else options
    examples = re.findall(rf"^ *(?:torchrun .*app|gtp-vit) {command}\b(.*?)(?:   .*)?$", options.__doc__, re.M)
    assert examples
    for example in examples:
        words = shlex.split(example)
        found = parse_with_method(options, words)[0] if hasattr(options, "method") else parse_flags(options, words)
        if "--model" in words:
            assert found.model == words[words.index("--model") + 1]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--html", "FILE/x.html"],
        ["compare", "--output", "FILE"],
        ["benchmark", "--html", "FILE/x.html"],
        ["tune", "--output", "FILE/x.json"],
        ["visualise", "--output", "FILE"],
    ],
)
def test_places_that_cannot_be_written_are_refused_before_the_work(capsys, tmp_path, monkeypatch, words):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(model_flags, "create_model", lambda *_, **__: pytest.fail("it began to work"))
    code, out, err = run(capsys, *(word.replace("FILE", str(tmp_path / "file")) for word in words))
    assert (code, out) == (ExitCode.USAGE, "")
    assert "cannot write" in err
    assert err.count("\n") == 1


def test_what_is_not_finite_is_null_in_json(capsys):
    code, out, _ = run(capsys, "evaluate", "--limit", "1", "--json")
    assert code == ExitCode.OK
    rows = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["rows"]
    assert rows[1]["kl_low"] is None  # one image has no interval


def timing(low, middle, high):
    return Timing("gtp", 1.0, (1.0, 1.0), middle, (low, high), middle)


def test_the_verdict_can_say_that_we_are_slower_and_why():
    model, images = families.make("vit"), families.images("vit")

    def words(method, *quartiles, loading=False, shorten_last_block=True, device="cpu"):
        entry = BatchTiming(4, loading, [timing(1, 1, 1), timing(*quartiles)])
        fast = patch(model, method, shorten_last_block=shorten_last_block)
        return verdict(entry, layer_costs(model, fast, images=images), fast.kernels, device)

    assert words(GTP(propagate=9), 1.2, 1.3, 1.4) == "batch 4: gtp is 1.30 times as fast as the unreduced model here."
    slower = words(GTP(propagate=9), 0.8, 0.9, 0.95)
    assert slower.startswith("batch 4: no gain here, gtp is slower (0.90), because ")
    assert "the native kernels did not run" in slower  # gradients are on here; the command asks as it timed
    on_a_gpu = words(GTP(propagate=9), 0.8, 0.9, 0.95, device="cuda")
    assert "native kernels did not run" not in on_a_gpu
    assert "its own small operators take their time on cuda" in on_a_gpu
    assert "% of the MACs are saved" in words(GTP(propagate=(0, 0, 0, 1)), 0.9, 1.05, 1.2, shorten_last_block=False)
    assert "reading and preprocessing" in words(GTP(propagate=9), 0.9, 1.05, 1.2, loading=True)
    with torch.no_grad():
        assert "with 64 patches" in words(GTP(propagate=9), 0.8, 0.9, 0.95)


def test_a_candidate_is_compared_with_the_baseline_of_its_round():
    samples = {"base": [1.0, 2.0, 4.0, 8.0], "twice as fast": [0.5, 1.0, 2.0, 4.0]}
    base, fast = speedups_over(samples, "base")
    assert (base.speedup, fast.speedup, fast.speedup_quartiles, fast.best_speedup) == (1, 2, (2, 2), 2)
    assert (fast.milliseconds, fast.faster, base.faster) == (1500, True, None)


def test_interleaving_runs_every_candidate_every_round_and_needs_two():
    calls = []
    found = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=5, warmup=1)
    assert sorted(calls) == ["a"] * 6 + ["b"] * 6
    assert [len(seconds) for seconds in found.values()] == [5, 5]
    with pytest.raises(SettingError, match="baseline"):
        interleave({"a": lambda: None})


def test_a_library_without_a_list_of_models_is_named_once(capsys):
    """It has several families; their classes stand behind one sentence."""
    assert main(["models", "--help"]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Hugging Face's models cannot be listed: hf:NAME takes ViT, DeiT, ") == 1
    assert text.count("cannot be listed") == 1
    assert "Qwen3_5MoeVisionModel. " in text
