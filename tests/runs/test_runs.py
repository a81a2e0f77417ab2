"""A run that resumes is the same run: weights, images, settings, version. Nothing of anybody else's is touched."""

import json
import os
import shutil
import subprocess
import time

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import DynamicViT, GTPError, create_model, patch
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.open import DataSettings, open_images, open_with_transform
from gtp_vit.data.transforms import make_transform
from gtp_vit.metrics import evaluate as evaluation
from gtp_vit.runs import distributed
from gtp_vit.runs import identity as identities
from gtp_vit.runs.files import Lock, check_writable, write_atomically
from gtp_vit.runs.fingerprint import tensors_fingerprint
from gtp_vit.runs.identity import differences, images_identity, run_identity
from gtp_vit.runs.journal import MAGIC, Journal
from gtp_vit.tuning import local_search
from support.process import run_python, start_python

pytestmark = pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")


def pictures(root, count=12):
    """Small pictures of 4 classes."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / f"class{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    return root


def weights(path, seed):
    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), path)
    return path


@pytest.fixture
def place(tmp_path):
    """A folder with pictures and weights, and results of nobody yet."""
    pictures(tmp_path / "data")
    weights(tmp_path / "w.safetensors", 0)
    return tmp_path


def words(place, command="evaluate", *more):
    found = [command, "test_vit", "--num-classes", "4", "--checkpoint", str(place / "w.safetensors"), "--workers", "0"]
    found += ["--data-dir", str(place / "data"), "-b", "3"]
    if command == "evaluate":
        found += ["--method", "gtp", "--propagate", "4", "--results-file", str(place / "r.json")]
    if command == "compare":
        found += ["--methods", "gtp", "--macs", "0.8", "--rounds", "0", "--output", str(place)]
    if command == "tune":
        found += ["--macs", "0.8", "--search-passes", "7", "--output", str(place / "r.json")]
    return [*found, *more]


def interrupted(command, after=2):
    """Run a command that is interrupted after some batches."""
    calls = []

    def stop(real):
        def run(*arguments):
            calls.append(1)
            if len(calls) > after:
                raise KeyboardInterrupt
            return real(*arguments)

        return run

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(evaluation, "_run", stop(evaluation._run))
        monkey.setattr(local_search.DamageEvaluator, "damage", stop(local_search.DamageEvaluator.damage))
        assert main(command) == ExitCode.INTERRUPTED


JOURNALS = {"evaluate": "r.json.journal", "compare": "results.csv.journal", "tune": "r.json.journal"}


@pytest.mark.parametrize("command", JOURNALS)
def test_other_weights_under_the_same_name_are_refused(place, capsys, command):
    if command == "tune":
        pictures(place / "data", 24)
    interrupted(words(place, command))
    journal = place / JOURNALS[command]
    before = journal.read_bytes()
    weights(place / "w.safetensors", 1)
    capsys.readouterr()
    assert main(words(place, command)) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "is of a different run: weights was" in error
    assert "--restart" in error
    assert error.count("\n") == 1
    assert journal.read_bytes() == before  # nothing is lost

    assert main(words(place, command, "--restart")) == ExitCode.OK
    assert not journal.exists()
    if command == "evaluate":
        found = json.loads((place / "r.json").read_text())
        (place / "r.json").unlink()
        assert main(words(place, command)) == ExitCode.OK
        assert json.loads((place / "r.json").read_text()) == found


@pytest.mark.parametrize("change", ["larger", "gone", "more", "other class", "crop", "settings", "version", "batch"])
def test_whatever_changes_a_figure_is_refused(place, capsys, monkeypatch, change):
    interrupted(words(place))
    data, more = place / "data", []
    if change == "larger":
        with (data / "class1" / "5.png").open("ab") as file:
            file.write(b"more")
    elif change == "gone":
        (data / "class1" / "5.png").unlink()
    elif change == "more":
        shutil.copy(data / "class1" / "5.png", data / "class1" / "6.png")
    elif change == "other class":
        (data / "class1" / "5.png").rename(data / "class2" / "5.png")
    elif change == "crop":
        more = ["--crop-pct", "0.5"]
    elif change == "settings":
        more = ["--alpha", "0.3"]
    elif change == "version":
        monkeypatch.setattr(identities, "__version__", "0.0.1")
    capsys.readouterr()
    line = words(place, "evaluate", *more)
    if change == "batch":
        line[line.index("-b") + 1] = "4"
    assert main(line) == ExitCode.USAGE
    what = {"crop": "preprocessing", "settings": "methods gtp alpha was 0.2 and is 0.3", "version": "version"}
    assert (
        f"different run: {what.get(change, 'batch_size' if change == 'batch' else 'images')}" in capsys.readouterr().err
    )


def test_the_same_weights_and_images_elsewhere_are_the_same_run(place, capsys):
    interrupted(words(place))
    (place / "w.safetensors").rename(place / "v.safetensors")
    (place / "data").rename(place / "images")
    moved = [word.replace("/w.safe", "/v.safe").replace("/data", "/images") for word in words(place)]
    calls = []
    with pytest.MonkeyPatch.context() as monkey:
        run = evaluation._run
        monkey.setattr(evaluation, "_run", lambda *a: calls.append(1) or run(*a))
        assert main(moved) == ExitCode.OK
    assert len(calls) == 2  # of four
    capsys.readouterr()


def test_learned_parts_of_a_method_are_part_of_the_identity(place):
    model = create_model("test_vit", num_classes=4)
    dataset = InMemoryDataset(torch.zeros(2, 3, 160, 160), torch.zeros(2))
    fast = patch(model, DynamicViT())
    before = run_identity("test_vit", {"unreduced": model, "dynamicvit": fast}, dataset)
    with torch.no_grad():
        next(fast.reducer.parameters()).add_(1)
    after = run_identity("test_vit", {"unreduced": model, "dynamicvit": fast}, dataset)
    assert differences(before.to_dict(), after.to_dict()).startswith("learned dynamicvit was")


def test_what_a_model_does_with_its_weights_is_part_of_the_identity():
    """Weights and sizes are the same in all of them."""
    images = torch.zeros(2, 3, 160, 160)

    def of(change):
        torch.manual_seed(0)
        model = create_model("test_vit", num_classes=4)
        change(model)
        return run_identity("test_vit", model, images).architecture

    class Configuration:
        def __init__(self, theta, place):
            self.stored = {"theta": theta, "_name_or_path": place, "vision": {"_name_or_path": place}}

        def to_dict(self):
            return self.stored

    changes = [
        lambda model: None,
        lambda model: setattr(model.blocks[0].mlp, "act", torch.nn.ReLU()),
        lambda model: setattr(model.norm, "eps", 1e-3),
        lambda model: model.register_buffer("table", torch.zeros(2), persistent=False),
        lambda model: model.register_buffer("table", torch.ones(2), persistent=False),
        lambda model: setattr(model, "config", Configuration(1, "here")),
        lambda model: setattr(model, "config", Configuration(2, "here")),
    ]
    assert len({of(change) for change in changes}) == len(changes)
    assert of(changes[0]) == of(lambda model: setattr(model, "helper", print))
    assert of(changes[-1]) == of(lambda model: setattr(model, "config", Configuration(2, "there")))


def test_files_that_a_method_names_are_part_of_the_identity_by_their_content(tmp_path):
    """The settings of a search have a method that no model has yet."""
    model, images = create_model("test_vit", num_classes=4), torch.zeros(2, 3, 160, 160)
    (tmp_path / "parts").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "parts")

    def of():
        named = {"method": "dynamicvit", "predictors": str(tmp_path / "link")}
        return run_identity("test_vit", model, images, plans=[{"of": named}]).to_dict()

    before = of()
    (tmp_path / "parts").write_bytes(b"2")
    assert differences(before, of()).startswith("learned ")


def test_a_link_that_leads_to_another_image_changes_the_identity(tmp_path):
    """Both have the same size, and no other name is in the folder."""
    generator = np.random.default_rng(0)
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    for name in ("one.bmp", "two.bmp"):  # of one size
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "store" / name)
        shutil.copytree(tmp_path / "store", tmp_path / name.partition(".")[0], dirs_exist_ok=True)
    model, link, folder = (
        create_model("test_vit", num_classes=4),
        tmp_path / "data" / "a" / "x.bmp",
        tmp_path / "data" / "b",
    )

    def of(root=tmp_path / "data"):
        return images_identity(open_images(model, DataSettings(data_dir=root, labels=False))).images

    def lead(path, target):
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    lead(folder, tmp_path / "one")
    lead(link, tmp_path / "store" / "one.bmp")
    first = of()
    assert of() == first
    lead(link, tmp_path / "store" / "two.bmp")
    second = of()
    lead(folder, tmp_path / "two")
    (tmp_path / "two" / "two.bmp").unlink(missing_ok=True)
    assert len({first, second, of()}) == 3
    (tmp_path / "elsewhere").symlink_to(tmp_path / "data")  # the folder itself may be reached by a link
    assert of(tmp_path / "elsewhere") == of()


def test_a_fingerprint_sees_names_types_shapes_and_every_value():
    base = {"a": torch.arange(6.0), "b": torch.zeros((), dtype=torch.int64)}
    changed = base["a"].clone()
    changed[5] = torch.nextafter(changed[5], torch.tensor(9.0))
    others = [
        {"a": changed, "b": base["b"]},
        {"a": base["a"].view(2, 3), "b": base["b"]},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"].to(torch.bfloat16), "b": base["b"]},
        {"a": base["a"], "b": base["b"] + 1},
    ]
    assert len({tensors_fingerprint(one) for one in [base, *others]}) == 6
    assert tensors_fingerprint(dict(reversed(base.items()))) == tensors_fingerprint(base)


def test_the_identity_of_images_follows_limits_and_subsets(place):
    model = create_model("test_vit", num_classes=4)

    def of(limit=0, places=None):
        dataset = open_images(model, DataSettings(data_dir=place / "data", limit=limit))
        return images_identity(dataset if places is None else torch.utils.data.Subset(dataset, places)).images

    assert len({of(), of(5), of(6), of(places=[1, 2]), of(places=[1, 3])}) == 5
    assert of(5) == of(5)
    before = of(2)
    (place / "data" / "class3" / "3.png").write_bytes(b"changed")  # behind the limit
    assert of(2) == before


class Everywhere:
    """A data set as torchvision's, whose folder may hold others, too."""

    def __init__(self, root):
        self.root = root

    def __len__(self):
        return 9

    def __getitem__(self, place):
        return Image.new("RGB", (8, 8)), 0


class Stream(torch.utils.data.IterableDataset):
    """A data set as timm's streams, which may have no folder at all."""

    def __init__(self, root):
        self.reader = type("Reader", (), {"root": root})()

    def __iter__(self):
        yield Image.new("RGB", (8, 8)), 0


@pytest.mark.parametrize("kind", [Everywhere, Stream])
def test_data_sets_and_splits_in_one_folder_have_identities_of_their_own(tmp_path, monkeypatch, kind):
    (tmp_path / "all of them").write_bytes(b"one file")
    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, root, **__: kind(root))

    def of(name, split):
        settings = DataSettings(data_dir=tmp_path, dataset=name, split=split, limit=5)
        return images_identity(open_with_transform(settings, None, (3, 8, 8))).images

    named = [("torch/mnist", "train"), ("torch/mnist", "validation"), ("torch/kmnist", "train")]
    assert len({of(*each) for each in named}) == 3
    assert of(*named[0]) == of(*named[0])


def test_the_preparation_of_grey_images_is_the_same_text_every_time():
    config = {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.5,), "interpolation": "bicubic", "crop_pct": 1.0}
    one, two, other = (str(make_transform({**config, "crop_pct": crop})) for crop in (1.0, 1.0, 0.9))
    assert one == two != other
    assert " at 0x" not in one


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("evaluate", b"my own notes\nof last week"),
        ("compare", b'{"model": "of an older version"}\n'),
        ("tune", b"\0\0\0"),
    ],
)
def test_a_file_that_is_no_journal_is_never_touched(place, capsys, command, content):
    path = place / JOURNALS[command]
    path.write_bytes(content)
    if command == "tune":
        pictures(place / "data", 24)
    for more in ([], ["--restart"]):
        assert main(words(place, command, *more)) == ExitCode.USAGE
        assert f"{path} exists and is not a journal of this version" in capsys.readouterr().err
        assert path.read_bytes() == content


def test_a_folder_in_place_of_the_journal(place, capsys):
    (place / "r.json.journal").mkdir()
    assert main(words(place)) == ExitCode.USAGE
    assert "is not a file" in capsys.readouterr().err


def journal_of_three(path):
    with Journal(path, {"model": "a"}) as journal:
        journal.keep_when_done = True
        for number in range(3):
            journal.append({"number": number})
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("damage", ["no json", "another digit", "cut"])
def test_a_damaged_line_in_the_middle_is_reported(tmp_path, damage):
    path = tmp_path / "j"
    lines = journal_of_three(path)
    lines[3] = {"no json": b"xx\n", "another digit": lines[3].replace(b":1", b":7"), "cut": lines[3][:12]}[damage]
    path.write_bytes(b"".join(lines))
    with Journal(path, {"model": "a"}) as journal:
        journal.keep_when_done = True
        assert journal.entries == [{"number": 0}]
        kept, after = "1 finished pieces of work before it are kept", "it and 1 after it are dropped and measured again"
        after = after.replace("1 after", "0 after") if damage == "cut" else after  # it swallows the next line
        assert f"line 4 of {path} is damaged: {kept}, {after}" in journal.damage_report
        journal.append({"number": 1})
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == [{"number": 0}, {"number": 1}]
        assert journal.damage_report == ""


def test_the_command_says_what_it_dropped(place, capsys):
    interrupted(words(place), after=3)
    journal = place / "r.json.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"damaged\n", *lines[3:]]))
    capsys.readouterr()
    assert main(words(place)) == ExitCode.OK
    assert "line 3 of" in capsys.readouterr().err
    assert json.loads((place / "r.json").read_text())[0]["images"] == 12


def test_a_line_that_a_kill_cut_off_is_dropped_quietly(tmp_path):
    path = tmp_path / "j"
    lines = journal_of_three(path)
    path.write_bytes(b"".join(lines)[:-5])
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == [{"number": 0}, {"number": 1}]
        assert journal.damage_report == ""


def test_a_journal_without_its_first_line_is_refused(tmp_path):
    path = tmp_path / "j"
    lines = journal_of_three(path)
    for rest in (lines[2:], []):
        damaged = b"".join([lines[0], b"my diary\n", *rest])
        path.write_bytes(damaged)
        with pytest.raises(GTPError, match="the first line of"):
            Journal(path, {"model": "a"})
        assert path.read_bytes() == damaged
    with Journal(path, {"model": "a"}, restart=True) as journal:
        assert journal.entries == []


@pytest.mark.parametrize("length", [0, 1, len(MAGIC), len(MAGIC) + 9])
def test_a_journal_whose_beginning_was_cut_off_by_a_kill_begins_anew(tmp_path, length):
    path = tmp_path / "j"
    whole = b"".join(journal_of_three(path))
    path.write_bytes(whole[:length])
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == []
        journal.append({"number": 0})
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])


def test_differences_show_where_long_texts_differ():
    long = "Compose(" + ", ".join(f"Step{number}()" for number in range(20))
    assert differences({"a": f"{long} x"}, {"a": f"{long} y"}) == (
        "a was ... Step18(), Step19() x and is ... Step18(), Step19() y"
    )
    one, other = {"method": "gtp", "alpha": 0.2}, {"method": "tome", "r": 8}
    assert differences({"x": one}, {"x": other}) == "x was gtp and is tome"
    assert differences({"x": one}, {"x": one | {"alpha": 0.3}}) == "x alpha was 0.2 and is 0.3"
    assert differences({"a": 1}, {"b": 1}) == "a was 1 and is not there, b was not there and is 1"


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_one_lives(tmp_path):
    lock = Lock(tmp_path / "x")
    code = f"from pathlib import Path; from gtp_vit.runs.files import Lock; Lock(Path({str(tmp_path / 'x')!r}))"
    done = run_python(code)
    assert "another run is writing" in done.stderr
    with pytest.raises(GTPError, match="another run is writing"):
        Lock(tmp_path / "x")
    lock.release()
    lock.release()  # twice does no harm
    Lock(tmp_path / "x").release()


# Runs evaluate with readers that outlive it, as those of a killed run do for some seconds.
SLOW = """
import sys, time
from gtp_vit.metrics import evaluate
real = evaluate._run
def slow(*arguments):
    time.sleep(0.3)
    return real(*arguments)
evaluate._run = slow
import torch.utils.data._utils.worker as worker
class Watchdog:
    def is_alive(self):
        return True
worker.ManagerWatchdog = Watchdog
from gtp_vit.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_resumes_at_once_although_its_readers_live_on(place):
    pictures(place / "data", 60)
    line = [word if word != "0" else "1" for word in words(place)]  # one reader
    journal = place / "r.json.journal"
    child = start_python(SLOW, *line)
    deadline = time.time() + 120
    while time.time() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.05)
    child.kill()
    child.join()
    readers = subprocess.run(["pgrep", "-g", str(child.pid)], capture_output=True, text=True, check=False).stdout
    assert readers.split(), "the readers are gone: this test would prove nothing"
    try:
        assert main(line) == ExitCode.OK
    finally:
        subprocess.run(["pkill", "-KILL", "-g", str(child.pid)], check=False)
    assert json.loads((place / "r.json").read_text())[0]["images"] == 60


@pytest.mark.slow
def test_a_full_disk_is_named_and_keeps_what_was_finished(place):
    """A limit on the size of files stands in for the disk."""
    interrupted(words(place), after=2)
    journal = place / "r.json.journal"
    before = journal.read_bytes()

    # torch writes files of its own when it is imported, so the limit comes after that.
    code = (
        "import resource, sys, torch.distributed.nn\n"
        "from gtp_vit.cli.app import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 20}, {len(before) + 20}))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run_python(code, *words(place))
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert f"cannot write {journal}: File too large; choose another path or free some disk space" in done.stderr
    assert journal.read_bytes() == before  # the part that fitted was taken back
    calls = []
    with pytest.MonkeyPatch.context() as monkey:
        run = evaluation._run
        monkey.setattr(evaluation, "_run", lambda *a: calls.append(1) or run(*a))
        assert main(words(place)) == ExitCode.OK
    assert len(calls) == 2  # of four


def test_processes_with_different_weights_are_refused(place, capsys, monkeypatch):
    """Many machines, many copies of a checkpoint; each process tells the others what it has."""
    monkeypatch.setattr(distributed, "rank_and_world_size", lambda: (0, 2))
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, {**value, "weights": "0123456789abcdef"}])
    assert main(words(place)) == ExitCode.USAGE
    assert "process 0 and process 1 have different weights, images or settings" in capsys.readouterr().err
    assert not (place / "r.json.journal").exists()


def test_what_is_no_ordinary_file_is_never_replaced(tmp_path):
    """Root could replace a device like /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (check_writable, lambda path: write_atomically(path, "text")):
        with pytest.raises(GTPError, match=r"cannot write .*pipe: it is not a regular file"):
            write(pipe)
        assert pipe.is_fifo()
