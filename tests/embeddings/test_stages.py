"""gtp-vit embed --profile: every stage has its own time, and nothing is kept."""

import json
import time

import numpy as np
import pytest
from PIL import Image

from gtp_vit import create_model
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.stages import STAGES, time_stages
from gtp_vit.embeddings.writer import Layout


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number in range(6):
        Image.fromarray(np.full((30, 30), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "3.png").write_bytes(b"no picture")
    return folder


def slow(function, seconds):
    def call(*arguments, **settings):
        time.sleep(seconds)
        return function(*arguments, **settings)

    return call


@pytest.mark.parametrize("stage", ["read", "resize", "model"])
def test_the_time_of_a_stage_is_its_own(photos, monkeypatch, stage):
    """Two batches, six reads, and five pictures that can be resized, each 30 ms longer."""
    dataset = open_images(create_model("fashion_vit"), DataSettings(photos, split="", labels=False))
    embedder = BatchEmbedder(create_model("fashion_vit"))
    target, name, calls = {
        "read": (dataset.reader, "open", 6),
        "resize": (dataset, "transform", 5),
        "model": (embedder, "_run", 2),
    }[stage]
    monkeypatch.setattr(target, name, slow(getattr(target, name), 0.03))
    times = time_stages(embedder, dataset, {}, Layout(batch_size=4))
    assert (times.images, times.unreadable) == (6, 1)
    assert tuple(times.seconds) == STAGES
    assert times.seconds[stage] >= 0.03 * calls
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_the_command_prints_the_stages_and_writes_nothing(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["embed", "--data-dir", str(photos), "--profile", "--json"]) == ExitCode.OK
    result = json.loads(capsys.readouterr().out)
    assert (result["images"], result["unreadable"], list(result["seconds"])) == (6, 1, list(STAGES))
    assert not list(tmp_path.iterdir())
    assert main(["embed", "--profile"]) == ExitCode.USAGE
    assert "--profile times files of pictures" in capsys.readouterr().err


def test_a_run_does_not_write_to_a_url(photos, tmp_path, monkeypatch, capsys):
    """Nor to a folder that is called like one."""
    monkeypatch.chdir(tmp_path)
    assert main(["embed", "--data-dir", str(photos), "--output", "s3://bucket/vectors"]) == ExitCode.USAGE
    assert "--output is s3://bucket/vectors; a run locks and resumes its folder on a disk" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
