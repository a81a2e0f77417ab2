"""Images behind URLs and in Parquet files: the same vectors as from a folder on a disk."""

import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import gtp_vit
from gtp_vit import GTPError
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.data.stores import StoreReader, url_of

COUNT = 10


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of pictures, one of which is none, on a disk and in memory://photos."""
    folder, generator = tmp_path_factory.mktemp("stores") / "photos", np.random.default_rng(0)
    for number in range(COUNT):
        path = folder / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (30, 40), dtype=np.uint8)).save(path)
    (folder / "class1" / "5.png").write_bytes(b"no picture")
    memory = fsspec.filesystem("memory")
    memory.put(f"{folder}/", "/photos/", recursive=True)
    memory.pipe("/photos/class0/notes.txt", b"not a picture")
    yield folder
    memory.rm("/photos", recursive=True)


def embed(output, *words):
    words = ["embed", "fashion_vit", "--workers", "0", "-b", "4", *map(str, words)]
    assert main([*words, "--output", str(output)]) == ExitCode.INCOMPLETE
    (shard,) = gtp_vit.read_embeddings(output)
    return shard


@pytest.fixture(scope="module")
def on_disk(photos, tmp_path_factory):
    return embed(tmp_path_factory.mktemp("out") / "vectors", "--data-dir", photos)


def test_a_url_survives_pathlib_and_a_folder_is_none(tmp_path, monkeypatch):
    assert url_of(Path("s3://bucket/photos")) == "s3://bucket/photos"
    assert url_of("memory://photos/a.png") == "memory://photos/a.png"
    assert [url_of(path) for path in ("photos", "/photos", "C:/photos", "a/b:/c")] == [None] * 4
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    assert url_of(Path("s3://bucket")) is None


def test_a_store_gives_the_names_labels_and_bits_of_a_disk(photos, on_disk, tmp_path):
    shard = embed(tmp_path / "out", "--data-dir", "memory://photos")
    assert shard.names == on_disk.names
    assert len(shard.names) == COUNT - 1
    np.testing.assert_array_equal(shard.labels, on_disk.labels)
    assert shard.embeddings.tobytes() == on_disk.embeddings.tobytes()
    (problem,) = shard.header.unreadable.values()
    assert problem == "class1/5.png: cannot identify image file of 10 bytes"


def test_a_store_that_changed_is_another_run(photos, tmp_path, capsys):
    embed(tmp_path / "out", "--data-dir", "memory://photos")
    fsspec.filesystem("memory").pipe("/photos/class1/5.png", b"another")
    words = ["embed", "fashion_vit", "--workers", "0", "-b", "4", "--data-dir", "memory://photos"]
    assert main([*words, "--output", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "images" in capsys.readouterr().err
    fsspec.filesystem("memory").pipe("/photos/class1/5.png", b"no picture")


def test_a_split_of_a_store_is_a_folder_in_it(photos):
    assert StoreReader("memory://photos", "class1").names == [f"{number}.png" for number in (1, 3, 5, 7, 9)]
    assert len(StoreReader("memory://photos", "validation")) == COUNT


def test_what_a_store_lacks_is_an_error_with_its_url(tmp_path):
    def message(*words):
        model, settings = gtp_vit.create_model("fashion_vit"), DataSettings(*words)
        with pytest.raises(GTPError) as error:
            open_images(model, settings)
        return str(error.value)

    assert message(Path("memory://empty")) == (
        "no images in memory://empty; give a folder with one folder of images for each class"
    )
    assert message(Path("nothing://bucket")).startswith("nothing://bucket cannot be opened: Protocol not known")
    assert message(Path("memory://photos"), "wds/") == (
        "wds/ cannot be read from memory://photos; folders of images and parquet/COLUMN can"
    )


def written_parquet(photos, folder, structs):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = sorted((path for path in photos.rglob("*.png")), key=lambda path: (path.parent.name, int(path.stem)))
    images = [path.read_bytes() for path in paths]
    images = [{"bytes": image, "path": "same.png"} for image in images] if structs else images
    folder.mkdir()
    for number, rows in enumerate((slice(0, 7), slice(7, 10))):
        columns = {"picture": images[rows], "label": [int(path.parent.name[-1]) for path in paths[rows]]}
        columns |= {} if structs else {"name": [str(path.relative_to(photos)) for path in paths[rows]]}
        parquet.write_table(pyarrow.table(columns), folder / f"{number}.parquet", row_group_size=3)
    return folder


@pytest.mark.parametrize("structs", [False, True], ids=["bytes", "structs"])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_parquet_gives_the_labels_and_bits_of_a_folder(photos, on_disk, tmp_path, structs, place):
    """Row groups and files end inside batches."""
    folder = written_parquet(photos, tmp_path / "rows", structs)
    if place == "memory":
        fsspec.filesystem("memory").put(f"{folder}/", "/rows/", recursive=True)
        shutil.rmtree(folder)
        folder = "memory://rows"
    shard = embed(tmp_path / "out", "--data-dir", folder, "--dataset", "parquet/picture", "--split", "")
    assert shard.names == (("same.png",) * (COUNT - 1) if structs else on_disk.names)
    np.testing.assert_array_equal(shard.labels, on_disk.labels)
    assert shard.embeddings.tobytes() == on_disk.embeddings.tobytes()


def test_a_column_that_is_not_there_is_named_with_those_that_are(photos, tmp_path, capsys):
    folder = written_parquet(photos, tmp_path / "rows", structs=False)
    words = ["embed", "fashion_vit", "--data-dir", str(folder), "--dataset", "parquet/image"]
    assert main([*words, "--output", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "0.parquet has no column 'image', but picture, label, name" in capsys.readouterr().err


def test_an_embedder_takes_urls(photos):
    vectors, errors = gtp_vit.Embedder("fashion_vit").vectors(
        ["memory://photos/class0/0.png", "memory://photos/no.png"]
    )
    assert np.isfinite(vectors[0]).all()
    assert errors[0] is None
    assert errors[1] is not None
