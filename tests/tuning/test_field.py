"""compare --tuned: rivals as published and as tuned."""

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from gtp_vit import read_recipe
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.cli.commands import compare as command
from gtp_vit.tuning.all_methods import tunable_methods


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A small model with random weights, images to compare on and others to tune on."""
    from PIL import Image

    root = tmp_path_factory.mktemp("tuned")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), root / "w.safetensors")
    generator = np.random.default_rng(0)
    for kind, count in (("val", 2), ("train", 10)):
        for label in range(2):
            (root / kind / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / kind / str(label) / f"{number}.png")
    model = ["test_vit", "--num-classes", "2", "--checkpoint", str(root / "w.safetensors"), "--workers", "0"]
    folders = ["--data-dir", str(root / "val"), "--calibration-dir", str(root / "train")]
    budget = ["--macs", "0.8", "--rounds", "0", "--tuning-images", "20", "--search-passes", "8"]
    return [*model, *folders, *budget]


@pytest.mark.slow
def test_methods_are_compared_as_published_and_as_tuned(words, tmp_path, capsys, monkeypatch):
    line = ["compare", *words, "--tuned", "--methods", "tome", "evit", "atc", "--output", str(tmp_path)]
    real = command.run
    with monkeypatch.context() as patched:  # killed after the searches
        patched.setattr(command, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(line) == ExitCode.INTERRUPTED
    assert (tmp_path / "tuning.journal").exists()
    with monkeypatch.context() as patched:  # nothing is measured again
        patched.setattr(command, "run", real)
        patched.setattr("gtp_vit.tuning.local_search.encode_arrays", None)  # called for what is new
        assert main(line) == ExitCode.OK
    assert not list(tmp_path.glob("*.journal"))
    capsys.readouterr()
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in rows[1:]] == ["tome", "evit", "atc", "tome, tuned", "atc, tuned"]
    whole = rows[0]["gmacs"]
    assert all(0.75 * whole < row["gmacs"] < 0.83 * whole for row in rows[1:])
    for name in ("tome", "atc"):
        recipe = read_recipe(next(tmp_path.glob(f"tuned-{name}-*.json")))
        assert recipe.method.name == name
        assert recipe.measured.images == 16  # a fifth was held out


@pytest.mark.slow
def test_a_method_out_of_reach_as_published_is_compared_as_tuned(words, tmp_path, capsys, monkeypatch):
    there = words.index("--macs") + 1
    line = ["compare", *words[:there], "0.5", *words[there + 1 :], "--tuned", "--json"]
    assert main([*line, "--methods", "tome", "--output", str(tmp_path)]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"][1:]] == ["tome, tuned"]
    (why,) = found["left_out"]
    assert "cannot be reached by tome here" in why
    monkeypatch.setattr(command, "tune_all", None)  # refused before anything is searched
    line[line.index("0.5")] = "0.3"
    for method, message in (("evit", "evit cannot be compared here"), ("nope", "unknown method 'nope'")):
        assert main([*line, "--methods", "tome", method]) == ExitCode.USAGE
        assert message in capsys.readouterr().err
    monkeypatch.setattr(command, "tune_all", lambda *_: ([], ["tome, tuned: not"]))
    assert main([*line, "--methods", "tome"]) == ExitCode.USAGE
    assert "no method can be compared here: tome at" in capsys.readouterr().err


def test_flags_of_tuning_that_make_no_sense_are_refused(words, capsys):
    same = [*words]
    same[same.index("--calibration-dir") + 1] = same[same.index("--data-dir") + 1]
    without = words[: words.index("--calibration-dir")] + words[words.index("--macs") :]
    cases = [
        ([*same, "--tuned"], "tune on other images than those that are compared"),
        ([*without, "--tuned"], "--tuned and --calibration-dir go together"),
        (words, "--tuned and --calibration-dir go together"),
        ([*words[: words.index("--tuning-images")], "--tuned", "--tuning-images", "3"], "--tuning-images is 3"),
        ([*words[: words.index("--search-passes")], "--tuned", "--search-passes", "0"], "--search-passes is 0"),
    ]
    for line, message in cases:
        assert main(["compare", *line]) == ExitCode.USAGE
        assert message in capsys.readouterr().err


def test_every_method_with_a_schedule_can_be_tuned():
    assert tunable_methods(()) == ["gtp", "gtp_plus", "tome", "mctf", "pitome", "tofu", "atc"]
    assert tunable_methods(["evit", "atc"]) == ["atc"]
