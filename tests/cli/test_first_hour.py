"""What somebody meets in the first hour: a word in the wrong place, a stream that is closed, a file that is broken."""

import json
import sys

from gtp_vit import create_model, macs
from gtp_vit.cli.app import ExitCode, main


def refused(words, capsys):
    assert main(words) == ExitCode.USAGE
    return capsys.readouterr().err


def test_a_picture_before_the_model_is_called_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = refused(["visualise", "cat.jpg", "dog.PNG"], capsys)
    assert "cat.jpg is a picture, and the model comes first: gtp-vit visualise fashion_vit cat.jpg dog.PNG" in said
    assert "does not show where its patches go" in refused(["visualise", "model.onnx", "cat.jpg"], capsys)


def test_a_closed_standard_output_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["methods"]) == ExitCode.FAILED
    assert capsys.readouterr().err.startswith("gtp-vit: standard output is closed")
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["methods"]) == ExitCode.FAILED  # nobody can be told
    sys.stderr.close()


def test_macs_takes_the_model_inside_the_package_as_every_command_does(capsys):
    assert main(["macs", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["flags"]["model"] == "fashion_vit"
    assert found["unreduced"] == macs(create_model("fashion_vit", meta=True)).total


def test_one_file_is_not_one_files(tmp_path, capsys):
    words = ["embed", "--limit", "2", "--batch-size", "2", "--workers", "0", "--output", str(tmp_path / "v")]
    assert main(words) == ExitCode.OK
    assert "and 1 file beside it" in " ".join(capsys.readouterr().out.split())
    words[words.index("--batch-size") + 1] = "1"
    assert main([*words, "--restart", "--shard-size", "1"]) == ExitCode.OK
    assert "and 2 files beside it" in " ".join(capsys.readouterr().out.split())
