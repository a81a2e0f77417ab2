"""gtp-vit embed --to-npy: numpy files with metadata, row by row what the run wrote, on a disk and in a store."""

import io
import json

import fsspec
import numpy as np
import pytest

import gtp_vit
from gtp_vit.cli.app import ExitCode, main

parquet = pytest.importorskip("pyarrow.parquet")
NAMES = [
    "img_emb/img_emb_0000.npy",
    "metadata/metadata_0000.parquet",
    "img_emb/img_emb_0001.npy",
    "metadata/metadata_0001.parquet",
]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """Seven images in two files."""
    folder = tmp_path_factory.mktemp("npy") / "vectors"
    words = ["embed", "--limit", "7", "--workers", "0", "-b", "4", "--shard-size", "4", "--output", str(folder)]
    assert main(words) == ExitCode.OK
    return folder


def test_the_rows_are_those_of_the_run(vectors, tmp_path, capsys):
    assert main(["embed", "--to-npy", str(vectors), "--output", str(tmp_path / "index"), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["files"] == NAMES
    shards = list(gtp_vit.read_embeddings(vectors))
    assert [len(shard.names) for shard in shards] == [4, 3]
    for shard, vector_file, metadata_file in zip(shards, NAMES[::2], NAMES[1::2], strict=True):
        np.testing.assert_array_equal(np.load(tmp_path / "index" / vector_file), shard.embeddings)
        table = parquet.read_table(tmp_path / "index" / metadata_file)
        assert table.column_names == ["image_path", "index", "label"]
        assert table["image_path"].to_pylist() == list(shard.names)
        assert table["index"].to_pylist() == shard.indices.tolist()
        assert table["label"].to_pylist() == shard.labels.tolist()


def test_a_store_gets_the_same_bytes_also_twice(vectors, tmp_path):
    main(["embed", "--to-npy", str(vectors), "--output", str(tmp_path / "index")])
    store = fsspec.filesystem("memory")
    for _ in range(2):
        assert main(["embed", "--to-npy", str(vectors), "--output", "memory://index"]) == ExitCode.OK
        assert sorted(store.find("/index")) == sorted(f"/index/{name}" for name in NAMES)
        for name in NAMES:
            assert store.cat_file(f"/index/{name}") == (tmp_path / "index" / name).read_bytes()
    assert np.load(io.BytesIO(store.cat_file(f"/index/{NAMES[0]}"))).shape == (4, 64)
    store.rm("/index", recursive=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "x", "--normalise"], "--to-npy copies a folder and embeds nothing; remove --normalise"),
        (["test_vit", "--output", "x"], "--to-npy copies a folder and embeds nothing; remove test_vit"),
        ([], "--output is missing; give the folder or URL to write to"),
        (["--output", "nothing://bucket"], "nothing://bucket/img_emb/img_emb_0000.npy cannot be opened: Protocol"),
    ],
)
def test_what_makes_no_sense_is_refused(vectors, capsys, words, said):
    assert main(["embed", "--to-npy", str(vectors), *words]) == ExitCode.USAGE
    assert said in capsys.readouterr().err
