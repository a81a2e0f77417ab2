"""What somebody meets in the first hour: a word in the wrong place, a stream that is closed, a file that is broken."""

import sys

from gtp_vit.cli.app import Exit, main


def refused(words, capsys):
    assert main(words) == Exit.USAGE
    return capsys.readouterr().err


def test_a_picture_before_the_model_is_called_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = refused(["visualise", "cat.jpg", "dog.PNG"], capsys)
    assert "cat.jpg is a picture, and the model comes first: gtp-vit visualise fashion_vit cat.jpg dog.PNG" in said
    assert "does not show where its patches go" in refused(["visualise", "model.onnx", "cat.jpg"], capsys)


def test_a_closed_standard_output_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["methods"]) == Exit.FAILED
    assert capsys.readouterr().err.startswith("gtp-vit: standard output is closed")
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["methods"]) == Exit.FAILED  # nobody can be told
    sys.stderr.close()
