"""A disk that is full, places that may not be read or written, and kills in the middle: clear errors, nothing mixed."""

import contextlib
import json
import os
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from gtp_vit import GTPError
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.loader import batches
from gtp_vit.data.open import DataSettings, open_with_transform
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.manifest import read_embeddings
from gtp_vit.embeddings.writer import Layout, embed_to_folder
from gtp_vit.runs.files import check_writable, write_atomically
from gtp_vit.runs.journal import Journal
from gtp_vit.training.checkpoint import STATE, read_state, write_state

NOBODY = 65534


@contextlib.contextmanager
def full_at(size):
    """No file can grow beyond this many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def open_to_all():
    """A folder that another user can enter; pytest's own are for their owner alone."""
    folder = Path(tempfile.mkdtemp(prefix="gtp-vit-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def another_user():
    """The rights of a user who owns nothing; root may do anything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path):
    path = tmp_path / "r.json"
    write_atomically(path, "old")
    with full_at(100), pytest.raises(GTPError, match=r"cannot write .*free some disk space"):
        write_atomically(path, "x" * 1000)
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "old"


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    write_state(tmp_path, {"run": {"a": 1}, "step": 1, "student": torch.zeros(4)})
    with full_at(4000), pytest.raises(GTPError, match=r"cannot write"):
        write_state(tmp_path, {"run": {"a": 1}, "step": 2, "student": torch.zeros(4000)})
    assert read_state(tmp_path, {"a": 1})["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == [STATE]


def test_a_full_disk_keeps_the_journal_whole(tmp_path):
    journal = Journal(tmp_path / "j", {"model": "a"})
    journal.append(1)
    with full_at((tmp_path / "j").stat().st_size + 10), pytest.raises(GTPError, match=r"cannot write"):
        journal.append("x" * 1000)
    journal.append(2)
    journal.close(finished=False)
    again = Journal(tmp_path / "j", {"model": "a"})
    assert (again.entries, again.damage_report) == ([1, 2], "")
    again.close(finished=True)


def test_a_run_on_a_full_disk_resumes_when_there_is_room(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, embed_dim=24, depth=2).eval()
    images = InMemoryDataset(torch.randn(12, 3, 32, 32), torch.arange(12))

    def embed(folder):
        return embed_to_folder(
            folder, BatchEmbedder(model), images, {"model": "a" * 300}, Layout(batch_size=4, shard_size=4), workers=0
        )

    embed(tmp_path / "whole")
    shard = tmp_path / "whole" / "embeddings-000000.safetensors"
    with full_at(shard.stat().st_size - 1), pytest.raises(GTPError, match=r"cannot write .*free some disk space"):
        embed(tmp_path / "v")
    assert not (tmp_path / "v").exists()
    embed(tmp_path / "v")
    for one, other in zip(read_embeddings(tmp_path / "whole"), read_embeddings(tmp_path / "v"), strict=True):
        np.testing.assert_array_equal(one.embeddings, other.embeddings)


def test_places_that_may_not_be_written_are_refused_and_nothing_is_made(open_to_all):
    os.chmod(open_to_all, 0o555)
    with another_user():
        for path in (open_to_all / "r.json", open_to_all / "deep" / "er" / "r.json"):
            with pytest.raises(GTPError, match=r"cannot write .*Permission denied; choose another path"):
                check_writable(path)
            with pytest.raises(GTPError, match=r"cannot write .*Permission denied"):
                write_atomically(path, "x")
            with pytest.raises(GTPError, match=r"cannot write .*Permission denied"):
                Journal(path, {"model": "a"})
    os.chmod(open_to_all, 0o755)
    assert list(open_to_all.iterdir()) == []


def test_pictures_and_folders_that_may_not_be_read_are_named(open_to_all):
    for name in ("a/0.png", "a/1.png", "b/2.png", "closed/3.png"):
        path = open_to_all / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
    (open_to_all / "a" / "1.png").chmod(0o000)
    (open_to_all / "closed").chmod(0o000)
    settings = DataSettings(open_to_all, split="", labels=False)
    with another_user():
        with pytest.warns(UserWarning, match="so that pictures may be missing: closed; give yourself the permission"):
            dataset = open_with_transform(settings, lambda picture: torch.zeros(3, 8, 8), (3, 8, 8))
        (batch,) = batches(dataset, batch_size=9, workers=0)
    assert list(batch.names) == ["a/0.png", "b/2.png"]
    assert [text.split(":")[0] for text in batch.unreadable.values()] == ["a/1.png"]
    assert "Permission denied" in next(iter(batch.unreadable.values()))


def test_a_journal_that_may_not_be_read_is_left_alone(open_to_all):
    path = open_to_all / "j"
    Journal(path, {"model": "a"}).close(finished=False)
    path.chmod(0o000)
    before = path.read_bytes() if os.geteuid() == 0 else None
    with another_user(), pytest.raises(GTPError, match=r"cannot (read|write)"):
        Journal(path, {"model": "a"})
    path.chmod(0o600)
    assert before in (None, path.read_bytes())
    assert json.dumps({"model": "a"}, separators=(",", ":")).encode() in path.read_bytes()


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_nothing_else(tmp_path):
    path, others = tmp_path / "state.pt", [".state.pt.original", ".state.pt.bxt0baif", ".weights.pt.bxt0baif.part"]
    for other in others:
        (tmp_path / other).write_text("of somebody else")
    process = os.fork()
    if not process:
        os.fsync = lambda _: time.sleep(600)
        try:
            write_atomically(path, b"half of it")
        finally:
            os._exit(1)
    while not (left := {each.name for each in tmp_path.iterdir()} - set(others)):
        time.sleep(0.01)
    while not (tmp_path / min(left)).stat().st_size:  # then it is locked, too
        time.sleep(0.01)
    write_atomically(path, b"new")  # the first writer lives
    assert {each.name for each in tmp_path.iterdir()} == {*others, *left, "state.pt"}
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    write_atomically(path, b"newer")
    assert {each.name for each in tmp_path.iterdir()} == {*others, "state.pt"}
    assert path.read_bytes() == b"newer"
