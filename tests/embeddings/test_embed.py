"""gtp_vit.embed and gtp-vit embed: what is in the files, and that nothing is lost, twice or of another run."""

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

from gtp_vit import GTP, GTPError, PictureFolder, ToMe, embed, patch, read_embeddings
from gtp_vit.backbones.host import remove_classifier
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.core.backbone import Output
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.library_readers import HuggingFaceReader
from gtp_vit.data.loader import batches
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.data.tar_reader import TarReader, samples_of
from gtp_vit.embeddings import batch_embedder as embedding
from gtp_vit.embeddings.manifest import finished_shards, prepare
from gtp_vit.embeddings.writer import Layout, _lock_folder, embed_to_folder
from gtp_vit.patching import host_of
from gtp_vit.testing import families

SIZES = {"img_size": 64, "num_classes": 4}
COUNT = 23
METHOD = GTP(propagate=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four classes of pictures, one of which is none, and weights."""
    path, generator = tmp_path_factory.mktemp("embed"), np.random.default_rng(0)
    for number in range(COUNT):
        picture = path / "images" / f"class{number % 4}" / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(picture)
    (path / "images" / "class1" / "5.png").write_bytes(b"no picture")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", **SIZES).state_dict(), path / "vit.safetensors")
    return path


def words_for(folder, output, *more):
    words = ["embed", "test_vit", "--img-size", "64", "--num-classes", "4", "--workers", "0", "-b", "4"]
    words += ["--checkpoint", str(folder / "vit.safetensors"), "--shard-size", "8", "--output", str(output)]
    return [
        *words,
        "--method",
        "gtp",
        "--propagate",
        "2",
        *more,
        *(() if "--data-dir" in more else ("--data-dir", str(folder / "images"))),
    ]


def model_of(folder):
    from safetensors.torch import load_file

    model = timm.create_model("test_vit", **SIZES)
    model.load_state_dict(load_file(folder / "vit.safetensors"))
    return model.eval()


@pytest.fixture(scope="module")
def alone(folder):
    """What one process writes in one go."""
    output = folder / "alone"
    assert main(words_for(folder, output)) == ExitCode.INCOMPLETE
    return output


def same_files(one, other):
    """All files of two folders have the same bytes."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_the_files_have_the_features_names_and_labels_of_all_images(folder, alone, capsys):
    manifest = json.loads((alone / "manifest.json").read_text())
    assert sorted(path.name for path in alone.iterdir())[:-1] == [entry["file"] for entry in manifest["shards"]]
    assert (manifest["finished"], manifest["images"], manifest["embedded"]) == (True, COUNT, COUNT - 1)
    assert manifest["classes"] == [f"class{number}" for number in range(4)]
    assert manifest["run"]["output"] == {"kind": "features", "shape": [64], "grid": None}
    ((place, name),) = [(entry["index"], entry["image"]) for entry in manifest["unreadable"]]
    assert name.startswith("class1/5.png: cannot identify image file")
    model = model_of(folder)
    dataset = open_images(model, DataSettings(data_dir=folder / "images", split="", img_size=64))
    remove_classifier(model)
    fast = patch(model, METHOD)
    seen = []
    for shard in read_embeddings(alone):
        assert shard.embeddings.dtype == np.float32
        with torch.no_grad():
            wanted = fast(torch.stack([dataset[int(each)].image for each in shard.indices]))
        torch.testing.assert_close(torch.from_numpy(shard.embeddings), wanted, rtol=0, atol=1e-5)
        for each, own, label in zip(shard.indices, shard.names, shard.labels, strict=True):
            assert own == dataset[int(each)].name
            assert own.startswith(manifest["classes"][label])
        seen += shard.indices.tolist()
    assert seen == [each for each in range(COUNT) if each != place]
    # as a user without this package reads them
    stored = load_file(alone / "embeddings-000001.safetensors")
    with safe_open(alone / "embeddings-000001.safetensors", "numpy") as file:
        names = json.loads(file.metadata()["names"])
    assert stored["embeddings"].shape == (len(names), 64) == (len(stored["indices"]), 64)


def test_the_same_command_again_does_nothing_and_makes_a_deleted_file_again(
    folder, alone, tmp_path, monkeypatch, capsys
):
    output = shutil.copytree(alone, tmp_path / "copy")
    (output / "embeddings-000001.safetensors").unlink()
    assert main([*words_for(folder, output), "--json"]) == ExitCode.INCOMPLETE
    assert json.loads(capsys.readouterr().out)["new"] == 8
    same_files(alone, output)
    monkeypatch.setattr(embedding.BatchEmbedder, "_run", lambda *_: pytest.fail("it was run again"))
    assert main([*words_for(folder, output), "--json"]) == ExitCode.INCOMPLETE
    out, err = capsys.readouterr()
    assert json.loads(out)["new"] == 0
    assert "1 of the images could not be read and were left out: class1/5.png" in err


def test_an_interrupted_run_resumes_and_is_not_read_before_it_has_finished(
    folder, alone, tmp_path, monkeypatch, capsys
):
    run, calls = embedding.BatchEmbedder._run, []

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(*arguments)

    output = tmp_path / "parts"
    with monkeypatch.context() as patched:
        patched.setattr(embedding.BatchEmbedder, "_run", stop)
        assert main(words_for(folder, output)) == ExitCode.INTERRUPTED
    assert "with --output what was finished is kept" in capsys.readouterr().err
    assert sorted(path.name for path in output.iterdir()) == ["embeddings-000000.safetensors", "manifest.json"]
    with pytest.raises(GTPError, match="has not finished; start the same command again"):
        read_embeddings(output)
    (output / ".embeddings-000001.safetensors.abc").write_bytes(b"half of it")  # of a killed process
    assert main(words_for(folder, output)) == ExitCode.INCOMPLETE
    same_files(alone, output)


SCRIPT = """
import os, signal, sys
from gtp_vit.cli.app import main
from gtp_vit.embeddings import batch_embedder
from gtp_vit.embeddings import writer
from gtp_vit.runs import distributed

writer.SECONDS_BETWEEN_REPORTS = 0.01
first, second = sys.argv[1:3]
with distributed.process_group():
    whole = main([*sys.argv[3:], "--output", first])
    assert whole == (3 if distributed.is_rank_zero() else 0), whole
    run, calls = batch_embedder.BatchEmbedder._run, []

    def die(*arguments):
        calls.append(1)
        if len(calls) == 2 and distributed.rank_and_world_size()[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments)

    batch_embedder.BatchEmbedder._run = die
    sys.exit(main([*sys.argv[3:], "--output", second]))
"""


@pytest.mark.slow
def test_two_processes_write_what_one_writes_also_after_one_was_killed(folder, alone, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = words_for(folder, "")
    words = [word for index, word in enumerate(words) if "--output" not in words[max(0, index - 1) : index + 1]]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path / "two"), str(tmp_path / "killed"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert f"exitcode  : -{int(signal.SIGKILL)}" in done.stderr, done.stderr
    same_files(alone, tmp_path / "two")
    assert not (tmp_path / "killed" / "embeddings-000001.safetensors").exists()
    assert main(words_for(folder, tmp_path / "killed")) == ExitCode.INCOMPLETE
    same_files(alone, tmp_path / "killed")


def refused(words, capsys):
    """The one line of a refusal."""
    assert main(words) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_of_another_run_is_refused_and_restarted_on_request(folder, alone, tmp_path, capsys):
    output = shutil.copytree(alone, tmp_path / "copy")
    other = [word if word != "2" else "1" for word in words_for(folder, output)]
    line = refused(other, capsys)
    assert "has embeddings of a different run: method propagate was 2 and is 1; use --restart" in line
    (output / "manifest.json").unlink()  # a shard alone says whose it is
    line = refused(other, capsys)
    assert "embeddings-000000.safetensors is of a different run: method propagate was 2 and is 1; use --restart" in line
    same = {path.name for path in alone.iterdir()} - {path.name for path in output.iterdir()}
    assert same == {"manifest.json"}
    (output / "notes.txt").write_text("mine")
    assert main([*other, "--restart"]) == ExitCode.INCOMPLETE
    assert (output / "notes.txt").read_text() == "mine"
    assert json.loads((output / "manifest.json").read_text())["run"]["method"]["propagate"] == 1


@pytest.mark.parametrize("what", ["half", "foreign", "renamed", "manifest"])
def test_a_file_that_is_not_what_its_name_says_is_refused(folder, alone, tmp_path, capsys, what):
    output = shutil.copytree(alone, tmp_path / "copy")
    shard = output / "embeddings-000001.safetensors"
    if what == "half":
        shard.write_bytes(shard.read_bytes()[:-7])
        assert "embeddings-000001.safetensors is damaged" in refused(words_for(folder, output), capsys)
        assert main([*words_for(folder, output), "--restart"]) == ExitCode.INCOMPLETE
        return
    if what == "renamed":
        shutil.copy(output / "embeddings-000000.safetensors", shard)
        message = "it is shard 0 under another name"
    elif what == "foreign":
        save_file({"weight": torch.zeros(3)}, shard)
        message = "was not written by gtp-vit embed"
        assert message in refused([*words_for(folder, output), "--restart"], capsys)
        assert shard.exists()
    else:
        (output / "manifest.json").write_text("[]")
        message = "manifest.json is not a manifest of gtp-vit embed"
    assert message in refused(words_for(folder, output), capsys)


def test_changed_files_are_found_when_they_are_read(alone, tmp_path):
    output = shutil.copytree(alone, tmp_path / "copy")
    shard = output / "embeddings-000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1  # one bit of an embedding
    shard.write_bytes(content)
    with pytest.raises(GTPError, match="has changed since it was written"):
        next(read_embeddings(output))
    shard.unlink()
    with pytest.raises(GTPError, match="is missing; it may be on another machine"):
        next(read_embeddings(output))


def header_changed(path, change):
    """A safetensors file with another header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def flip(tensor):
    """Changes one bit in the first number of a tensor in a shard."""

    def change(path):
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        begin = json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
        content[8 + length + begin] ^= 1
        path.write_bytes(content)

    return change


def rename(header):
    names = json.loads(header["__metadata__"]["names"])
    header["__metadata__"]["names"] = json.dumps(["class9/9.png", *names[1:]])


def said(change):
    def edit(header):
        about = json.loads(header["__metadata__"]["gtp_vit"])
        change(about)
        header["__metadata__"]["gtp_vit"] = json.dumps(about)

    return lambda path: header_changed(path, edit)


HARM = {
    **{tensor: flip(tensor) for tensor in ("embeddings", "indices", "labels")},
    "name": lambda path: header_changed(path, rename),
    "no names": lambda path: header_changed(path, lambda header: header["__metadata__"].pop("names")),
    "unreadable": said(lambda about: about["unreadable"].update({"3": "class0/3.png: gone"})),
    "no number": said(lambda about: about.pop("shard")),
    "no text": said(lambda about: about.update(not_finite={"1": 2})),
}


@pytest.mark.parametrize("harm", HARM)
def test_every_part_of_a_file_is_proved_when_it_is_read_resumed_and_verified(folder, alone, tmp_path, capsys, harm):
    output = shutil.copytree(alone, tmp_path / "copy")
    shard = output / "embeddings-000000.safetensors"
    HARM[harm](shard)
    wanted = f"{shard} has changed since it was written; delete it and start the same command again"
    with pytest.raises(GTPError) as caught:
        list(read_embeddings(output))
    assert str(caught.value) == wanted
    assert wanted in refused(["embed", "--verify", str(output)], capsys)
    if harm in ("labels", "no number"):  # one of each way in; making a model takes its time
        assert wanted in refused(words_for(folder, output), capsys)
    (output / "manifest.json").unlink()
    with pytest.raises(GTPError, match="has changed since it was written"):
        finished_shards(output, json.loads((alone / "manifest.json").read_text())["run"])


def edit_manifest(change):
    def edit(path):
        stored = json.loads(path.read_text())
        change(stored)
        path.write_text(json.dumps(stored))

    return edit


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored["classes"].reverse(),
        lambda stored: stored["shards"].pop(),
        lambda stored: stored["shards"][0].update(file="../elsewhere/embeddings-000000.safetensors"),
        lambda stored: stored.update(unreadable=[]),
        lambda stored: stored["run"].update(model="another"),
        lambda stored: stored.pop("fingerprint"),
    ],
    ids=["classes", "fewer", "elsewhere", "unreadable", "model", "unproved"],
)
def test_a_manifest_that_was_changed_is_refused(alone, tmp_path, capsys, change):
    output = shutil.copytree(alone, tmp_path / "copy")
    edit_manifest(change)(output / "manifest.json")
    with pytest.raises(GTPError, match=r"manifest\.json has changed since it was written"):
        read_embeddings(output)
    assert "has changed since it was written" in refused(["embed", "--verify", str(output)], capsys)


def test_verify_says_that_all_is_well_or_what_is_not(alone, tmp_path, capsys):
    output = shutil.copytree(alone, tmp_path / "copy")
    assert main(["embed", "--verify", str(output), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["manifest"]["embedded"] == COUNT - 1
    (output / "embeddings-000000.safetensors").unlink()
    flip("indices")(output / "embeddings-000001.safetensors")
    shutil.copy(output / "embeddings-000002.safetensors", output / "embeddings-000009.safetensors")
    line = refused(["embed", "--verify", str(output)], capsys)
    assert "3 of 3 files are not as they were written: " in line
    assert "embeddings-000000.safetensors is missing" in line
    assert "embeddings-000001.safetensors has changed" in line
    assert "embeddings-000009.safetensors is not in manifest.json" in line
    assert "remove --output" in refused(["embed", "--verify", str(output), "--output", "x"], capsys)
    assert "remove test_vit" in refused(["embed", "test_vit", "--verify", str(output)], capsys)
    assert "there is no manifest.json in" in refused(["embed", "--verify", str(tmp_path)], capsys)


def test_files_of_an_earlier_version_say_so(alone, tmp_path, capsys):
    output = shutil.copytree(alone, tmp_path / "copy")
    said(lambda about: about.update(version=1))(output / "embeddings-000000.safetensors")
    with pytest.raises(GTPError, match="has version 1 of these files, and this gtp-vit has 2"):
        list(read_embeddings(output))
    edit_manifest(lambda stored: stored.update(version=1))(output / "manifest.json")
    with pytest.raises(GTPError, match=r"manifest\.json has version 1, and this gtp-vit has 2"):
        read_embeddings(output)


FOREIGN = {
    "text": b"hello",
    "empty": b"",
    "a long header": (2**60).to_bytes(8, "little") + b"{}",
    "another header": (2).to_bytes(8, "little") + b"{}",
    "no header": (4).to_bytes(8, "little") + b"[[[[",
}


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
@pytest.mark.parametrize("content", FOREIGN)
def test_restart_deletes_only_files_whose_header_is_ours(alone, tmp_path, content, ending):
    """Before the first file is deleted, all of them are looked at."""
    pytest.importorskip("pyarrow")
    output = shutil.copytree(alone, tmp_path / "copy")
    (output / f"embeddings-000077.{ending}").write_bytes(FOREIGN[content])
    (output / ".embeddings-mine").write_text("mine")
    (output / ".embeddings-000001.safetensors.x1_y").write_bytes(b"half of it")
    before = {path.name for path in output.iterdir()}
    with pytest.raises(
        GTPError, match=r"embeddings-000077\.\w+ was not written by gtp-vit embed, or its header is dam"
    ):
        prepare(output, {}, restart=True)
    assert {path.name for path in output.iterdir()} == before
    (output / f"embeddings-000077.{ending}").unlink()
    prepare(output, {}, restart=True)
    assert {path.name for path in output.iterdir()} == {".embeddings-mine"}


def test_a_file_of_the_user_called_lock_stays(folder, tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with _lock_folder(tmp_path, {}, restart=False):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


def test_parquet_has_the_same_embeddings(folder, alone, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "parquet"
    assert main(words_for(folder, output, "--format", "parquet")) == ExitCode.INCOMPLETE
    for one, other in zip(read_embeddings(alone), read_embeddings(output), strict=True):
        assert one.names == other.names
        assert np.array_equal(one.embeddings, other.embeddings)
        assert np.array_equal(one.labels, other.labels)
        assert np.array_equal(one.indices, other.indices)
    table = parquet.read_table(output / "embeddings-000000.parquet")
    assert table.column_names == ["name", "index", "embedding", "label"]
    assert main(["embed", "--verify", str(output)]) == ExitCode.OK
    changed = parquet.read_table(output / "embeddings-000000.parquet")
    column = changed["label"].to_numpy() + 1
    at = changed.column_names.index("label")
    kept = (output / "embeddings-000000.parquet").read_bytes()
    parquet.write_table(changed.set_column(at, "label", [column]), output / "embeddings-000000.parquet")
    with pytest.raises(GTPError, match=r"embeddings-000000\.parquet has changed since it was written"):
        list(read_embeddings(output))
    (output / "embeddings-000000.parquet").write_bytes(kept)
    (output / "embeddings-000002.parquet").unlink()
    capsys.readouterr()
    assert main(words_for(folder, output, "--format", "parquet", "--json")) == ExitCode.INCOMPLETE
    assert json.loads(capsys.readouterr().out)["new"] == COUNT - 16
    assert "format was parquet and is safetensors" in refused(words_for(folder, output), capsys)


def test_without_pyarrow_the_command_that_installs_it_is_named(folder, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "pyarrow" else find(name, *rest)
    )
    line = refused(words_for(folder, tmp_path / "x", "--format", "parquet"), capsys)
    assert line.endswith("pip install 'gtp-vit[parquet]'")


class Returns(nn.Module):
    """A model that returns the first numbers of each image."""

    def forward(self, images):
        return images.flatten(1)[:, :5]


def images_with(values):
    """Images of which each begins with one of these numbers."""
    images = torch.ones(len(values), 3, 4, 4)
    images[:, 0, 0, 0] = torch.tensor(values)
    return InMemoryDataset(images, torch.full((len(values),), -1))


def test_embeddings_that_are_not_finite_are_named_and_not_written(tmp_path):
    dataset = images_with([1.0, float("nan"), 1e5, float("inf")])
    embedder = embedding.BatchEmbedder(Returns(), output=Output("features", 5), dtype="float16")
    found = embed_to_folder(tmp_path, embedder, dataset, {}, Layout(batch_size=2, shard_size=2))
    assert found.not_finite == [
        "image 1: its embedding is not finite",
        "image 2: it has numbers up to 1e+05, and float16 ends at 65504; store float32",
        "image 3: its embedding is not finite",
    ]
    one, other = read_embeddings(tmp_path)
    assert (one.names, one.embeddings.dtype, one.labels) == (("image 0",), np.float16, None)
    assert other.embeddings.shape == (0, 5)


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_vectors_of_any_length_are_scaled_to_length_one(factor):
    """In float32 the square of either leaves the range; what was written had length 0, or was called not finite."""
    images = torch.randn(4, 1, 1, 5, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.normalize(images.flatten(1).double(), dim=1).float()
    embedder = embedding.BatchEmbedder(Returns(), output=Output("features", 5), normalise=True)
    (found,) = map(embedder, batches(InMemoryDataset(images * factor, torch.zeros(4)), batch_size=4, workers=0))
    torch.testing.assert_close(found.embeddings, wanted)


def test_the_command_says_so_if_embeddings_are_not_finite(folder, tmp_path, capsys):
    from safetensors.torch import load_file

    weights = load_file(folder / "vit.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "nan.safetensors")
    words = words_for(folder, tmp_path / "out")
    words[words.index("--checkpoint") + 1] = str(tmp_path / "nan.safetensors")
    assert main(words) == ExitCode.INCOMPLETE
    err = capsys.readouterr().err
    assert f"{COUNT - 1} of the images have no finite embedding and were left out: class0/0.png: its embedding" in err
    assert "1 of the images could not be read" in err


def test_a_folder_without_folders_and_what_can_be_stored(folder, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in sorted((folder / "images").rglob("*[02468].png")):
        shutil.copy(path, flat)
    os.rename(flat / "4.png", os.fsencode(flat) + b"/4\xff.png")
    more = ["--data-dir", str(flat), "--normalise", "--dtype", "float16", "--unreduced"]
    words = [
        word
        for word in words_for(folder, tmp_path / "out", *more)
        if word not in ("--method", "gtp", "--propagate", "2")
    ]
    assert main(words) == ExitCode.OK
    shards = list(read_embeddings(tmp_path / "out"))
    names = [name for shard in shards for name in shard.names]
    assert len(names) == 12
    assert "4\\xff.png" in names
    assert all(shard.labels is None for shard in shards)
    lengths = np.concatenate([np.linalg.norm(shard.embeddings.astype(np.float32), axis=1) for shard in shards])
    np.testing.assert_allclose(lengths, 1, atol=2e-3)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["run"]["method"] is None
    assert main([*words, "--restart", "--logits"]) == ExitCode.OK
    assert next(read_embeddings(tmp_path / "out")).embeddings.shape[1] == 4
    assert "class scores, 4 numbers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--unreduced"], "--unreduced cannot be combined with --method"),
        (["--shard-size", "-1"], "--shard-size is -1"),
        (["--patches", "--logits"], "--patches and --logits are two different outputs"),
        (["--patches", "--engine", "onnxruntime"], "--patches needs features before the head; remove --engine"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--dataset", "hfds/x"], "--dataset hfds/x needs a split; give --split"),
        (["--engine", "onnxruntim"], "did you mean 'onnxruntime'?"),
        (["--engine", "openvino", "--device", "cuda"], "openvino runs on a CPU here; remove it"),
        (["--limit", "-1"], "--limit is -1"),
    ],
)
def test_wrong_flags(folder, tmp_path, capsys, more, message):
    words = words_for(folder, tmp_path / "x")
    for flag, alias in (("--shard-size", ""), ("--batch-size", "-b")):
        if flag in more:
            place = words.index(alias or flag)
            del words[place : place + 2]
    assert message in refused([*words, *more], capsys)
    assert not (tmp_path / "x").exists()


def test_models_without_one_vector_for_an_image_are_refused():
    for name in ("all_tokens", "hf_msn_base"):
        with pytest.raises(GTPError, match=r"the model has an output for every token, .* create it with pooling"):
            embed(families.make(name), families.images(name, 2))


class Numbered(torch.utils.data.Dataset):
    """A caller's own data set, one of whose images fails."""

    def __len__(self):
        return 5

    def __getitem__(self, place):
        if place == 3:
            raise OSError("the disk is gone")
        return families.images("vit", 5)[place], 10 + place


@pytest.mark.parametrize("workers", [0, 2])
def test_in_python_batches_come_one_by_one(workers):
    model, images = families.make("vit"), families.images("vit", 5)
    remove_classifier(model)
    fast = patch(model, METHOD)
    found = list(embed(fast, Numbered(), batch_size=2, workers=workers))
    assert [part.indices.tolist() for part in found] == [[0, 1], [2], [4]]
    assert [part.labels.tolist() for part in found] == [[10, 11], [12], [14]]
    assert found[1].unreadable == {3: "image 3: the disk is gone"}
    with torch.no_grad():
        torch.testing.assert_close(found[0].embeddings, fast(images[:2]), rtol=0, atol=1e-6)
    tensors = list(embed(fast, images, batch_size=3))
    assert [part.names for part in tensors] == [("image 0", "image 1", "image 2"), ("image 3", "image 4")]
    probe = nn.Linear(24, 2)
    probe(tensors[0].embeddings).sum().backward()  # they may be trained on
    assert probe.weight.grad is not None


@pytest.mark.parametrize("form", ["safetensors", "parquet"])
def test_patches_are_restored_and_unreduced_ones_are_the_models_own(folder, tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    more = ["--patches", "--unreduced", "--limit", "4", "--format", form]
    words = [word for word in words_for(folder, tmp_path, *more) if word not in ("--method", "gtp", "--propagate", "2")]
    assert main(words) == ExitCode.OK
    (found,) = read_embeddings(tmp_path)
    model = model_of(folder)
    dataset = open_images(model, DataSettings(data_dir=folder / "images", split="", img_size=64))
    images = torch.stack([dataset[place].image for place in range(4)])
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(found.embeddings), model.forward_features(images)[:, 1:], rtol=0, atol=1e-5
        )
    assert json.loads((tmp_path / "manifest.json").read_text())["run"]["output"]["grid"] == [4, 4]
    fast = patch(model, ToMe(r=2), restore=True)
    (part,) = embed(fast, images, patches=True, normalise=True)
    assert part.embeddings.shape == (4, 16, 64)
    torch.testing.assert_close(part.embeddings.norm(dim=2), torch.ones(4, 16))
    with pytest.raises(GTPError, match="patched with restore=True"):
        embed(patch(model, ToMe(r=2)), images, patches=True)


def test_in_python_a_folder_and_wrong_images(folder):
    model = model_of(folder)
    found = list(embed(model, folder / "images", batch_size=8, workers=0))
    assert sum(len(part.names) for part in found) == COUNT - 1
    for wrong in (torch.zeros(2, 3, 64), torch.zeros(2, 1, 64, 64), iter([1]), 5):
        with pytest.raises(GTPError, match="images are"):
            embed(model, wrong)
    with pytest.raises(GTPError, match="dtype is 'int8'; it must be float32 or float16"):
        embed(model, torch.zeros(1, 3, 64, 64), dtype="int8")


def test_in_python_a_folder_with_the_caller_s_transform(folder):
    """For weights of which nobody knows how they want their images."""
    pytest.importorskip("transformers")
    model = families.make("hf_vit")
    remove_classifier(model)
    with pytest.raises(GTPError, match=r"give a function from a picture to a tensor as transform=\.\.\."):
        embed(model, folder / "images")
    shape = families.images("hf_vit", 1).shape[1:]
    shades = []

    def shade(picture):
        shades.append(picture.getpixel((0, 0))[0] / 255)
        return torch.full(shape, shades[-1])

    found = list(embed(model, PictureFolder(folder / "images", transform=shade), batch_size=8, workers=0))
    images = torch.stack([torch.full(shape, each) for each in shades])
    assert sum(len(part.names) for part in found) == len(images) == COUNT - 1
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([part.embeddings for part in found]), model(images).logits)


@pytest.mark.parametrize("name", ["vit", "deit_distilled", "dinov3", "beit", "hf_vit", "hf_dinov2", "torchvision"])
def test_a_classifier_without_its_last_layer_returns_what_that_read(name):
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    model = families.make(name)
    assert host_of(model).output.kind == "classes"
    remove_classifier(model)
    kind, width = host_of(model).output
    assert kind == "features"
    (part,) = embed(patch(model, METHOD), families.images(name, 2))
    assert part.embeddings.shape == (2, width)


def write_tar(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def png(shade):
    file = io.BytesIO()
    Image.new("RGB", (40, 40), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


LONG = "a" * 150  # needs a header of its own


@pytest.mark.filterwarnings("ignore")  # of webdataset itself
def test_web_datasets_have_names_need_no_labels_and_can_be_shared(folder, tmp_path, capsys):
    pytest.importorskip("webdataset")
    shards = tmp_path / "shards"
    shards.mkdir()
    write_tar(
        shards / "0.tar", [(f"{n}.{e}", png(n) if e == "png" else b"x") for n in range(5) for e in ("png", "txt")]
    )
    write_tar(
        shards / "1.tar", [("a/x.jpg", png(9)), ("a/y.json", b"{}"), ("a/z.png", b"none"), (f"{LONG}.png", png(7))]
    )
    output = tmp_path / "out"
    words = words_for(folder, output, "--data-dir", str(shards), "--dataset", "wds/")
    assert main(words) == ExitCode.INCOMPLETE
    names = [name for shard in read_embeddings(output) for name in shard.names]
    assert names == [*(f"0.tar/{number}.png" for number in range(5)), "1.tar/a/x.jpg", f"1.tar/{LONG}.png"]
    manifest = json.loads((output / "manifest.json").read_text())
    assert [entry["image"].split(":")[0] for entry in manifest["unreadable"]] == ["1.tar/a/y", "1.tar/a/z.png"]
    assert "it has no picture, only json" in manifest["unreadable"][0]["image"]
    dataset = open_images(model_of(folder), DataSettings(shards, "wds/", "*.tar", labels=False))
    shares = [
        place
        for rank in range(3)
        for batch in batches(dataset, batch_size=2, workers=0, rank_and_world_size=(rank, 3))
        for place in [*batch.indices.tolist(), *batch.unreadable]
    ]
    assert sorted(shares) == list(range(9))


def test_tar_files_with_labels_and_damaged_ones(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [(f"{n}.{e}", png(n) if e == "jpg" else b"%d" % n) for n in range(4) for e in ("cls", "jpg")])
    reader = TarReader([path], tmp_path)
    assert [reader.open(place).label for place in range(4)] == [0, 1, 2, 3]
    assert [reader.name(place) for place in range(4)] == [f"x.tar/{number}.jpg" for number in range(4)]
    path.write_bytes(path.read_bytes()[: 3 * 2048 - 500])  # in the middle of the third picture
    *whole, broken = samples_of(path)
    assert [sample.name for sample in whole[:2]] == ["0.jpg", "1.jpg"]
    assert "the tar file is damaged after its image" in broken.error


def test_a_damaged_header_in_the_middle_of_a_tar_file_is_not_its_end(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [(f"{n}.jpg", png(n)) for n in range(4)])
    content = bytearray(path.read_bytes())
    content[2 * 1024 + 20] ^= 1  # in the name of the third picture
    path.write_bytes(content)
    *whole, broken = samples_of(path)
    assert [sample.name for sample in whole] == ["0.jpg", "1.jpg"]
    assert broken.error == "the tar file is damaged after its image 2: bad header"


def test_rows_without_a_column_of_labels_are_read():
    class Column:
        column_names = ("image",)

        def __len__(self):
            return 2

        def __getitem__(self, place):
            return {"image": {"bytes": png(place), "path": None if place else "folder/cat.png"}}

    reader = type(
        "R", (), {"dataset": Column(), "root": "", "image_key": "image", "label_key": "label", "class_to_idx": {}}
    )
    rows = HuggingFaceReader(reader)
    assert [rows.open(place).name for place in range(2)] == ["cat.png", "image 1"]
    assert rows.open(0).label is None
