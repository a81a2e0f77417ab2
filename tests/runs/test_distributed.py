"""Two processes on the loopback: the same metrics and gradients as one, and a killed one loses nothing."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import GTP, GTPError, TrainingConfig, finetune
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.loader import batches
from gtp_vit.metrics import evaluate as evaluation
from gtp_vit.runs import distributed
from gtp_vit.testing import families
from gtp_vit.training.trainer import Trainer

SETTINGS = {"epochs": 2, "batch_size": 8, "micro_batch": 2, "repeats": 1, "lr": 1e-3, "distill": 0.5, "save_every": 2}
SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import test_distributed as own
from gtp_vit.cli.app import main
from gtp_vit.runs import distributed
from gtp_vit.training.trainer import Trainer

torch.set_num_threads(1)
train_step = Trainer.train_step

def die(self, step, *rest):
    if step == 5 and distributed.rank_and_world_size()[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, step, *rest)

if sys.argv[2] == "resume":
    with distributed.process_group():
        own.stop_and_resume(Path(sys.argv[3]))
    sys.exit(0)
if sys.argv[2] == "kill":
    Trainer.train_step = die
    from gtp_vit.cli.commands import finetune
    finetune.main = lambda words: own.go_together(sys.argv[3])
    sys.exit(main(["finetune"]))
with distributed.process_group():
    own.go(sys.argv[3])
    sys.exit(main(sys.argv[4:]))
"""


def go(output):
    """24 images, three steps an epoch, parts of two images."""
    images = InMemoryDataset(families.images("vit", 24), torch.arange(24) % 10)
    held_out = InMemoryDataset(families.images("vit", 7), torch.arange(7))
    settings = TrainingConfig(**SETTINGS)
    return finetune(
        families.make("vit"), GTP(propagate=8), images, settings, output=output, validation=held_out, workers=0
    )


def go_together(output):
    with distributed.process_group():
        go(output)


def stop_and_resume(output):
    """In each of two processes: a run that keeps no outputs, and one that is stopped and resumed."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("gtp_vit.metrics.output_cache.MAX_BYTES", 0)
        go(output / "whole")
    own = output / ("parts" if distributed.is_rank_zero() else "unseen")  # as on two machines without a common disk
    train_step, sent = Trainer.train_step, []

    def stop(self, step, *rest):
        if step == 4:
            raise KeyboardInterrupt
        return train_step(self, step, *rest)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Trainer, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            go(own)
    assert own.exists() == distributed.is_rank_zero()
    broadcast, gathered = torch.distributed.broadcast_object_list, torch.distributed.all_gather_object

    def weigh(box, *rest):
        sent.append(len(pickle.dumps(box)))
        return broadcast(box, *rest)

    def weigh_gathered(found, value):
        sent.append(len(pickle.dumps(value)))
        return gathered(found, value)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(torch.distributed, "broadcast_object_list", weigh)
        monkey.setattr(torch.distributed, "all_gather_object", weigh_gathered)
        found = go(own)
    log = [entry.to_dict() for entry in found.log]
    (output / f"{distributed.rank_and_world_size()[0]}.json").write_text(json.dumps({"sent": sent, "log": log}))
    torch.save({"student": found.model.state_dict()}, output / f"{distributed.rank_and_world_size()[0]}.pt")


def launch(tmp_path, *words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(Path(__file__).parent), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, from beginning to end."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, go(folder)


def assert_same_run(folder, alone):
    """To rounding: weights, gradients (of which AdamW keeps a running mean) and every figure of the log."""
    one, other = state(alone[0]), state(folder)
    assert one["step"] == other["step"] == 6
    for key, value in one["student"].items():
        if key.endswith("attn.qkv.bias"):
            continue  # that of keys changes nothing; its gradient is rounding, of which AdamW makes whole steps
        torch.testing.assert_close(other["student"][key], value, rtol=0, atol=2e-5)
    for key, moments in one["optimizer"]["state"].items():
        mean = moments["exp_avg"]
        error = (other["optimizer"]["state"][key]["exp_avg"] - mean).abs().max()
        assert error <= 1e-4 * mean.abs().max() + 1e-7
    figures = {entry["step"]: entry for entry in other["log"] if entry["kind"] == "validation"}
    assert set(figures) == {0, 3, 6}
    for entry in alone[1].validations():
        for key in ("top1", "agreement", "kl"):
            assert figures[entry.step][key] == pytest.approx(entry.figures[key], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_two_processes_do_what_one_does(alone, tmp_path, capsys):
    folder, weights = tmp_path / "data", tmp_path / "vit.safetensors"
    generator = np.random.default_rng(0)
    for number in range(21):
        path = folder / f"class{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    (folder / "class1" / "5.png").write_bytes(b"no picture")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), weights)
    words = ["evaluate", "test_vit", "--num-classes", "4", "--checkpoint", str(weights), "--data-dir", str(folder)]
    words += ["--workers", "0", "-b", "3", "--remove", "4", "--results-file"]
    assert main([*words, str(tmp_path / "one.json")]) == ExitCode.INCOMPLETE

    # The second run begins in one process, is stopped after two batches, and resumes in two.
    run = evaluation._run
    calls = []

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(evaluation, "_run", stop)
        assert main([*words, str(tmp_path / "two.json")]) == ExitCode.INTERRUPTED
    assert (tmp_path / "two.json.journal").read_bytes().count(b"\n") == 4
    done = launch(tmp_path, "go", tmp_path / "out", *words, tmp_path / "two.json")
    assert (tmp_path / "two.json").exists(), done.stderr
    assert not (tmp_path / "two.json.journal").exists()
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert [row["images"] for row in two] == [20, 20]
    assert [row["unreadable"] for row in two] == [1, 1]
    for left, right in zip(one, two, strict=True):
        for key, value in left.items():
            assert right[key] == (pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value), key
    assert "1 of the images could not be read" in done.stderr
    assert_same_run(tmp_path / "out", alone)
    capsys.readouterr()


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_one_process_finishes_it(alone, tmp_path):
    done = launch(tmp_path, "kill", tmp_path / "out")
    assert done.returncode != 0
    assert "start the same command again, with any number of processes" in done.stderr
    assert f"exitcode  : -{int(signal.SIGKILL)}" in done.stderr  # the launcher says which one it was
    assert state(tmp_path / "out")["step"] == 4
    go(tmp_path / "out")
    assert_same_run(tmp_path / "out", alone)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_send_no_checkpoint_through_pickle(tmp_path):
    done = launch(tmp_path, "resume", tmp_path)
    assert done.returncode == 0, done.stderr
    whole, parts = (state(tmp_path / name) for name in ("whole", "parts"))
    assert whole["student"].keys() == parts["student"].keys()
    for key, value in whole["student"].items():
        assert torch.equal(value, parts["student"][key]), key
    for key, moments in whole["optimizer"]["state"].items():
        assert all(torch.equal(value, parts["optimizer"]["state"][key][name]) for name, value in moments.items())
    figures = [[entry for entry in each["log"] if entry["kind"] == "validation"] for each in (whole, parts)]
    assert figures[0] == figures[1]  # to the last digit, though one keeps the unreduced model's outputs
    size = (tmp_path / "parts" / "state.pt").stat().st_size
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [entry for entry in told["log"] if entry["kind"] == "validation"] == figures[0]
        assert 0 < max(told["sent"]) < size / 10
        weights = torch.load(tmp_path / f"{rank}.pt", weights_only=True)["student"]
        assert all(torch.equal(value, whole["student"][f"model.{key}"]) for key, value in weights.items())


def test_every_image_has_exactly_one_process():
    for dataset in (InMemoryDataset(torch.zeros(11, 1, 2, 2), torch.arange(11)), Numbered(11)):
        for processes in (1, 2, 3, 20):
            shares = [
                list(batches(dataset, batch_size=2, workers=0, skip=1, rank_and_world_size=(rank, processes)))
                for rank in range(processes)
            ]
            places = [place for own in shares for batch in own for place in batch.indices.tolist()]
            assert sorted(places) == list(range(1, 11))
            first = [place for own in shares for batch in own[:1] for place in batch.indices.tolist()]
            assert sorted(first) == list(range(1, 1 + len(first)))  # a round has no holes


class Numbered(torch.utils.data.Dataset):
    """Like a folder of images."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        from gtp_vit.data.items import Item

        return Item(index, torch.zeros(1, 2, 2), index, f"image {index}", "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks go from 0 to"),
        ({"WORLD_SIZE": "many", "RANK": "0"}, "WORLD_SIZE is many"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, variables, message):
    for name in distributed.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if "RANK" in variables:
        variables = {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GTPError, match=message), distributed.process_group():
        pass


def test_processes_that_were_started_differently(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, {"lr": 2}])
    with pytest.raises(GTPError, match="process 0 and process 1 have different settings; start all of them with"):
        distributed.check_same_on_all_ranks("settings", {"lr": 1})


def test_other_errors_are_not_taken_for_a_lost_process():
    with pytest.raises(RuntimeError, match="shapes"), distributed._explain_lost_processes("process 0 of 2"):
        raise RuntimeError("shapes do not fit")
    with (
        pytest.raises(GTPError, match="process 0 of 2 lost another one"),
        distributed._explain_lost_processes("process 0 of 2"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
