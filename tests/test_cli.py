"""The command, through its entry point."""

import json
import subprocess
import sys

import pytest

from gtp_vit.cli import benchmark
from gtp_vit.cli.app import COMMANDS, Exit, main
from gtp_vit.errors import BadSetting
from gtp_vit.tools.benchmark import Timing, against, interleave

TINY = ["test_vit", "--propagate", "4"]


def run(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_no_command_shows_the_commands(capsys):
    code, out, _ = run(capsys)
    assert code == Exit.USAGE
    assert all(command in out for command in COMMANDS)
    assert run(capsys, "--help")[0] == Exit.OK


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (Exit.OK, "gtp-vit")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == Exit.OK
    assert f"gtp-vit {command}" in out


def test_benchmark_shows_layers_times_and_a_verdict(capsys):
    code, out, _ = run(capsys, "benchmark", *TINY, "--batch-size", "2", "--rounds", "3")
    assert code == Exit.OK
    assert "layer 5" in out
    assert "speed-up" in out
    assert any(word in out for word in ("times as fast", "No gain", "No clear difference"))


def test_benchmark_as_json(capsys):
    code, out, _ = run(capsys, "benchmark", *TINY, "-b", "1", "--rounds", "3", "--threads", "1", "--json")
    result = json.loads(out)
    assert code == Exit.OK
    assert result["settings"]["method"] == "gtp"
    assert result["settings"]["propagate"] == 4
    assert [timing["name"] for timing in result["timings"]] == ["unreduced", "gtp"]
    assert result["macs"]["gtp"] < result["macs"]["unreduced"]


def test_macs_with_other_methods_and_schedules(capsys):
    def total(*words):
        code, out, _ = run(capsys, "macs", "test_vit", "--json", *words)
        assert code == Exit.OK
        return json.loads(out)

    assert total("--propagate", "linear:2:6")["gtp"] == total("--propagate", "2", "3", "4", "4", "5", "6")["gtp"]
    identity = total("--method", "identity")
    assert identity["identity"] < identity["unreduced"]
    assert total("--method=identity", "--no-lossless")["identity"] == identity["unreduced"]
    assert total("--convention", "torchprofile")["gtp"] > total()["gtp"]
    assert "total" in run(capsys, "macs", "test_vit")[1]
    assert total("--method", "tome", "--r", "4")["tome"] > total("--method", "tome", "--r", "8")["tome"]
    assert "total" in run(capsys, "macs", "lvvit_s", "--method", "evit", "--keep-rate", "0.5")[1]


def test_benchmark_of_a_method_whose_token_count_depends_on_the_image(capsys):
    code, out, _ = run(
        capsys, "benchmark", "test_vit", "--method", "ats", "--rounds", "3", "--batch-size", "2", "--json"
    )
    assert code == Exit.OK
    assert json.loads(out)["macs"]["ats"] > 0
    assert "layer 5" in run(capsys, "benchmark", "test_vit", "--method", "ats", "--rounds", "3")[1]
    words = ["benchmark", "lvvit_t", "--img-size", "32", "--method", "tome", "--r", "0", "--rounds", "3"]
    assert run(capsys, *words)[0] == Exit.OK


def test_check_says_whether_bf16_works(capsys):
    code, out, _ = run(capsys, "check", "--json")
    found = json.loads(out)
    assert code == Exit.OK
    # the tests run with ONEDNN_MAX_CPU_ISA set, which avoids the trap
    assert found["bf16"] == "works"
    assert found["threads"] == 2 or found["threads"] == 1
    assert run(capsys, "check")[0] == Exit.OK


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "unknown command 'bench'; did you mean 'benchmark'"),
        (["macs", "deit_smal_patch16_224"], "did you mean 'deit_small_patch16_224'"),
        (["macs", "test_vit", "--method", "gpt"], "unknown method 'gpt'; did you mean 'ppt' or 'gtp'"),
        (["macs", "test_vit", "--method", "ats"], "ATS keeps another number of tokens in each image"),
        (["macs", "lvvit_x"], "did you mean 'lvvit_t'"),
        (["macs", "test_vit", "--method", "evit", "--keep-rate", "1.5"], "keep_rate is 1.5"),
        (["macs", "test_vit", "--propagate", "40"], "largest constant number for this model is"),
        (["macs", "test_vit", "--select", "mixd"], "did you mean 'mixed'"),
        (["macs", "test_resnet"], "ResNet is not a supported ViT"),
        (["macs", "test_vit", "--graph", "spacial"], "unknown --graph 'spacial'; did you mean 'spatial'"),
        (["macs", "test_vit", "--graph=spacial"], "did you mean 'spatial'"),
        (["macs", "test_vit", "--graf", "mixed"], "unknown flag '--graf'; did you mean '--graph'"),
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
    assert code == Exit.USAGE
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_values_of_the_wrong_type_are_refused_by_the_parser(capsys):
    code, _, err = run(capsys, "macs", "--alpha", "much")
    assert code == Exit.USAGE
    assert "--alpha" in err


def test_unexpected_errors_get_one_line_and_exit_code_one(capsys, monkeypatch):
    def fail(words):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(benchmark, "main", fail)
    code, _, err = run(capsys, "benchmark")
    assert (code, err) == (Exit.FAILED, "gtp-vit: RuntimeError: out of luck (--debug shows where)\n")


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m gtp_vit.cli.app --help | head -1", shell=True, capture_output=True, check=True
    )
    assert done.stderr == b""


def test_debug_shows_the_traceback():
    with pytest.raises(BadSetting):
        main(["benchmark", "test_vit", "--batch-size", "0", "--debug"])


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "gtp_vit.cli.app", "--version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"gtp-vit ")


def test_interrupting_leaves_no_traceback(capsys, monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "main", interrupt)
    code, _, err = run(capsys, "benchmark")
    assert (code, err) == (Exit.INTERRUPTED, "gtp-vit: interrupted\n")


def timing(low, middle, high):
    return Timing("gtp", 1.0, (1.0, 1.0), middle, (low, high), middle)


def test_the_verdict_can_say_that_we_are_slower():
    assert benchmark.verdict(timing(1.2, 1.3, 1.4)) == "gtp is 1.30 times as fast as the unreduced model here."
    assert "slower" in benchmark.verdict(timing(0.8, 0.9, 0.95))
    assert "No clear difference" in benchmark.verdict(timing(0.9, 1.05, 1.2))


def test_a_candidate_is_compared_with_the_baseline_of_its_round():
    samples = {"base": [1.0, 2.0, 4.0, 8.0], "twice as fast": [0.5, 1.0, 2.0, 4.0]}
    base, fast = against(samples, "base")
    assert (base.speedup, fast.speedup, fast.speedup_quartiles, fast.best_speedup) == (1, 2, (2, 2), 2)
    assert (fast.milliseconds, fast.faster, base.faster) == (1500, True, None)


def test_interleaving_runs_every_candidate_every_round_and_needs_two():
    calls = []
    found = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=5, warmup=1)
    assert sorted(calls) == ["a"] * 6 + ["b"] * 6
    assert [len(seconds) for seconds in found.values()] == [5, 5]
    with pytest.raises(BadSetting, match="baseline"):
        interleave({"a": lambda: None})
