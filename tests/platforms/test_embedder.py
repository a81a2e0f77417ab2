"""gtp_vit.Embedder: the vectors of gtp-vit embed for every kind of table, and a reason where there is none."""

import copy
import io
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import gtp_vit
from gtp_vit import GTP, Embedder, GTPError
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.engines.program import torch_can_export
from gtp_vit.platforms import embedder as module

COUNT, BATCH = 11, 4
SIZES = {"checkpoint": "vit.safetensors", "img_size": 64, "num_classes": 4}


def settings(folder, **more):
    return {**SIZES, "checkpoint": folder / "vit.safetensors", "batch_size": BATCH, **more}


def make(folder, **more):
    return Embedder("test_vit", GTP(propagate=2), **settings(folder, **more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of several modes, one of which is none, and weights."""
    path, generator = tmp_path_factory.mktemp("embedder"), np.random.default_rng(0)
    (path / "images").mkdir()
    for number in range(COUNT):
        shape = ((40, 50, 3), (50, 40), (30, 30, 4))[number % 3]
        picture = Image.fromarray(generator.integers(0, 255, shape, dtype=np.uint8))
        picture.save(path / "images" / f"{number:02}.png")
    (path / "images" / "05.png").write_bytes(b"no picture")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", img_size=64, num_classes=4).state_dict(), path / "vit.safetensors")
    return path


@pytest.fixture(scope="module")
def written(folder):
    """What `gtp-vit embed` writes: vectors by name."""
    words = ["embed", "test_vit", "--img-size", "64", "--num-classes", "4", "--workers", "0", "-b", str(BATCH)]
    words += ["--checkpoint", str(folder / "vit.safetensors"), "--data-dir", str(folder / "images")]
    words += ["--method", "gtp", "--propagate", "2", "--output", str(folder / "out")]
    assert main(words) == ExitCode.INCOMPLETE
    (shard,) = gtp_vit.read_embeddings(folder / "out")
    return dict(zip(shard.names, shard.embeddings, strict=True)), dict(shard.header.run)


@pytest.fixture(scope="module")
def embed(folder):
    return make(folder)


def paths(folder):
    return sorted((folder / "images").iterdir())


def content(folder):
    return [path.read_bytes() for path in paths(folder)]


def same(folder, written, vectors, errors):
    """All vectors have the bits of the command, and the one picture that is none has a reason."""
    for path, vector, error in zip(paths(folder), vectors, errors, strict=True):
        if path.name == "05.png":
            assert vector is None or np.isnan(vector).all()
            assert error == "no picture that Pillow knows begins with b'no pictu'"
        else:
            assert error is None
            assert np.asarray(vector, np.float32).tobytes() == written[0][path.name].tobytes(), path.name


def test_bytes_have_the_bits_of_the_command(folder, written, embed):
    table = {"id": list(range(COUNT)), "image": content(folder)}
    result = embed(table)
    assert list(result) == ["id", "image", "embedding", "embedding_error"]
    assert result["id"] is table["id"]
    assert result["embedding"][5] is None
    same(folder, written, result["embedding"], result["embedding_error"])


def test_a_numpy_column_gets_one_array_with_nan_for_no_embedding(folder, written, embed):
    images = np.array(content(folder), object)
    result = embed({"image": images})
    assert result["embedding"].shape == (COUNT, 64)
    assert result["embedding"].dtype == np.float32
    assert result["embedding_error"].dtype == object
    same(folder, written, result["embedding"], result["embedding_error"])


@pytest.mark.parametrize("kind", ["Table", "RecordBatch"])
@pytest.mark.parametrize("fixed_size", [False, True])
def test_arrow_gets_lists_and_null(folder, written, kind, fixed_size):
    pyarrow, embed = pytest.importorskip("pyarrow"), make(folder, fixed_size=fixed_size)
    batch = getattr(pyarrow, kind).from_pydict({"id": list(range(COUNT)), "image": content(folder)})
    result = embed(batch)
    assert isinstance(result, type(batch))
    assert result.schema == embed.schema(batch.schema)
    name = "fixed_size_list<item: float>[64]" if fixed_size else "list<item: float>"
    assert str(result.schema.field("embedding").type) == name
    assert result["id"].equals(batch["id"])
    assert result["embedding"].null_count == 1
    same(folder, written, result["embedding"].to_pylist(), result["embedding_error"].to_pylist())


def test_null_comes_back_from_parquet(embed, tmp_path):
    """pyarrow 25 and 26 write lists of fixed length with nulls that they cannot read: so the default has any length."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    result = embed(pyarrow.table({"image": pyarrow.array([b"", None], pyarrow.binary())}))
    parquet.write_table(result, tmp_path / "file.parquet")
    assert parquet.read_table(tmp_path / "file.parquet").equals(result)


def test_pandas_keeps_its_index(folder, written, embed):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"image": content(folder)}, index=range(100, 100 + COUNT))
    result = embed(table)
    assert list(result.index) == list(table.index)
    assert list(table.columns) == ["image"]
    missing = result["embedding_error"].isna()
    reasons = [None if none else text for none, text in zip(missing, result["embedding_error"], strict=True)]
    same(folder, written, result["embedding"], reasons)


def opened(path):
    return b"no picture" if path.name == "05.png" else Image.open(path)


@pytest.mark.parametrize(
    "cell",
    [
        lambda path: path,
        str,
        opened,
        lambda path: path.read_bytes() if path.name == "05.png" else np.asarray(Image.open(path)),
        lambda path: {"bytes": path.read_bytes(), "path": "elsewhere.png"},
        lambda path: {"bytes": None if path.name != "05.png" else path.read_bytes(), "path": str(path)},
        lambda path: memoryview(path.read_bytes()),
    ],
    ids=["path", "name", "PIL", "array", "dict of bytes", "dict of a path", "memoryview"],
)
def test_every_kind_of_cell_has_the_same_bits(folder, written, embed, cell):
    vectors, errors = embed.vectors([cell(path) for path in paths(folder)])
    if "cannot identify" in (errors[5] or ""):  # of a name, Pillow says which
        errors[5] = "no picture that Pillow knows begins with b'no pictu'"
    same(folder, written, vectors, errors)


def test_a_tensor_column_of_arrow_has_the_bits_of_its_arrays(embed):
    pyarrow = pytest.importorskip("pyarrow")
    arrays = np.random.default_rng(0).integers(0, 255, (3, 20, 30, 3), dtype=np.uint8)
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(arrays)
    result = embed(pyarrow.table({"image": column}))
    assert result["embedding"].null_count == 0
    stored = np.array(result["embedding"].to_pylist(), np.float32)
    assert stored.tobytes() == embed({"image": arrays})["embedding"].tobytes()


def png_that_claims(width, height):
    """One pixel, under a header of another size."""
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    stored = bytearray(file.getvalue())
    stored[16:24] = struct.pack(">II", width, height)
    stored[29:33] = struct.pack(">I", zlib.crc32(stored[12:29]))
    return bytes(stored)


BAD = {
    "null": None,
    "zero bytes": b"",
    "a float; give bytes, a path, a PIL image, or a uint8 array": 0.5,
    "an array of float32 [4, 4, 3]; give uint8 [height, width] or [height, width, 1, 3 or 4]": np.zeros(
        (4, 4, 3), np.float32
    ),
    "an array of uint8 [3, 4, 4, 4]; give uint8 [height, width] or [height, width, 1, 3 or 4]": np.zeros(
        (3, 4, 4, 4), np.uint8
    ),
}


def test_what_is_no_image_says_why_and_the_others_are_embedded(embed):
    good = np.full((20, 20, 3), 7, np.uint8)
    vectors, errors = embed.vectors([*BAD.values(), float("nan"), {"bytes": None, "path": None}, good])
    assert errors == [*BAD, "null", "null", None]
    assert np.isnan(vectors[:-1]).all()
    assert np.isfinite(vectors[-1]).all()


def test_an_image_of_900_million_pixels_is_not_decoded(embed):
    _, (pillows, ours) = embed.vectors([png_that_claims(30_000, 30_000), png_that_claims(10_000, 9_000)])
    assert pillows.startswith("Image size (900000000 pixels) exceeds limit")
    assert ours == "10,000 x 9,000 pixels are more than 89 million; make it smaller"


def test_an_empty_batch_and_one_without_an_image_have_the_columns(embed):
    pyarrow = pytest.importorskip("pyarrow")
    empty = pyarrow.table({"image": pyarrow.array([], pyarrow.binary())})
    assert embed(empty).schema == embed.schema(empty.schema)
    nothing = pyarrow.table({"image": pyarrow.array([None, None], pyarrow.binary())})
    assert embed(nothing)["embedding"].null_count == 2
    assert embed({"image": np.empty(0, object)})["embedding"].shape == (0, 64)


def test_a_column_that_is_missing_or_there_already_is_an_error(embed):
    with pytest.raises(GTPError, match=r"^the table has no column 'image', but 'id', 'picture'$"):
        embed({"id": [1], "picture": [b""]})
    with pytest.raises(GTPError, match="'embedding_error' already; remove it, or give output another name"):
        embed({"image": [b""], "embedding_error": [None]})
    with pytest.raises(GTPError, match="a batch is a list; give a dict of columns"):
        embed([b""])


def test_settings_are_checked_where_it_is_made(folder):
    with pytest.raises(GTPError, match="dtype"):
        make(folder, dtype="int8")
    with pytest.raises(GTPError, match="unknown model 'test_vitt'"):
        Embedder("test_vitt")
    with pytest.raises(GTPError, match="unreduced cannot be combined with method"):
        Embedder("test_vit", "gtp", unreduced=True)
    with pytest.raises(GTPError, match="are both 'image'"):
        Embedder("test_vit", output="image")
    with pytest.raises(GTPError, match=r"num_classes was fixed when model\.onnx was exported"):
        Embedder("model.onnx", num_classes=3)


def test_the_schema_is_known_without_weights(tmp_path):
    """The checkpoint is not there."""
    embed = Embedder(
        "test_vit", checkpoint=tmp_path / "none.safetensors", img_size=64, dtype="float16", fixed_size=True
    )
    assert embed.dimensions == 64
    pytest.importorskip("pyarrow")
    embedding, error = embed.schema()
    assert (embedding.name, str(embedding.type)) == ("embedding", "fixed_size_list<item: halffloat>[64]")
    assert (error.name, str(error.type)) == ("embedding_error", "string")
    assert Embedder("test_vit", logits=True, num_classes=4).dimensions == 4


def test_weights_that_a_worker_lacks_are_named_with_the_worker(tmp_path):
    path = tmp_path / "none.safetensors"
    embed = pickle.loads(pickle.dumps(Embedder("test_vit", checkpoint=path)))
    with pytest.raises(GTPError) as error:
        embed({"image": [b""]})
    text = str(error.value)
    assert text.startswith(f"worker {socket.gethostname()} cannot load test_vit: ")
    assert text.endswith(f"every worker needs {path}, and here it is missing")


def test_a_pickle_is_light_and_its_copies_share_one_model_in_a_process(folder, written):
    embed = make(folder)
    before = pickle.dumps(embed)
    embed.vectors(content(folder))
    assert len(before) < 2000
    assert len(pickle.dumps(embed)) < 2000
    copies = [pickle.loads(before), copy.deepcopy(embed)]
    for other in copies:
        same(folder, written, *other.vectors(content(folder)))
        assert other._model is embed._model


def test_a_new_embedder_reads_its_weights_anew(folder, tmp_path):
    """A checkpoint may have been written over."""
    weights = timm.create_model("test_vit", img_size=64, num_classes=4).state_dict()
    save_file(weights, tmp_path / "vit.safetensors")
    image = [np.full((20, 20, 3), 7, np.uint8)]
    old = make(tmp_path).vectors(image).vectors
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "vit.safetensors")
    assert not np.allclose(make(tmp_path).vectors(image).vectors, old)
    for _ in range(3):
        make(tmp_path).vectors(image)
    assert len(module._LOADED) <= module.MAX_LOADED


def test_a_worker_with_another_version_or_other_weights_is_refused(folder, written, monkeypatch):
    embed = make(folder, fingerprint=written[1]["weights"])
    assert embed.vectors(content(folder)[:1]).errors == [None]
    with pytest.raises(GTPError, match="other weights of test_vit: weights was 0123 and is"):
        make(folder, fingerprint="0123").vectors([b""])
    stored = pickle.dumps(embed)
    monkeypatch.setattr(module, "__version__", "99.0")
    with pytest.raises(GTPError, match=rf"worker {socket.gethostname()} has 99\.0; install the same version"):
        pickle.loads(stored)


def test_the_identity_is_that_of_the_manifest(embed, written):
    of_images_and_files = {"images", "format", "batch_size", "shard_size"}
    assert embed.identity() == {key: value for key, value in written[1].items() if key not in of_images_and_files}


def test_a_recipe_is_read_where_it_is_made(tmp_path):
    """A worker does not need its file."""
    recipe = shutil.copy(Path(__file__).parents[1] / "formats/recipe-1.json", tmp_path)
    embed = pickle.dumps(Embedder("fashion_vit", recipe))
    Path(recipe).unlink()
    loaded = pickle.loads(embed)
    assert loaded.vectors([np.zeros((28, 28), np.uint8)]).errors == [None]
    assert loaded.identity()["method"]["remove"] == [0, 0, 15, 21, 20, 19, 14, 8, 5, 9, 2, 0]


def test_normalised_halves_are_what_they_say(folder):
    vectors, _ = make(folder, normalise=True, dtype="float16").vectors(content(folder)[:3])
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=2e-3)


@pytest.mark.slow
def test_the_driver_loads_no_model(folder):
    """Neither torch modules nor weights: making and pickling one imports timm for the names alone."""
    code = (
        "import pickle, sys, torch; made = []; init = torch.nn.Module.__init__\n"
        "def counted(self, *a, **k): made.append(type(self).__name__); init(self, *a, **k)\n"
        "import gtp_vit; embed = gtp_vit.Embedder('vit_large_patch16_224'); "
        "torch.nn.Module.__init__ = counted; pickle.dumps(gtp_vit.Embedder('vit_large_patch16_224')); print(made)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(not torch_can_export(), reason="this torch cannot export")
def test_an_exported_file_has_the_bits_of_the_command(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    words = ["--img-size", "64", "--num-classes", "4", "--checkpoint", str(folder / "vit.safetensors")]
    words += ["--method", "gtp", "--propagate", "2", "--format", "onnx", "--output", str(tmp_path)]
    assert main(["export", "test_vit", *words]) == 0
    (file,) = tmp_path.glob("*.onnx")
    embed = Embedder(file, batch_size=BATCH)
    assert embed.dimensions == 4
    words = ["embed", str(file), "-b", str(BATCH), "--data-dir", str(folder / "images"), "--workers", "0"]
    assert main([*words, "--output", str(tmp_path / "out")]) == ExitCode.INCOMPLETE
    (shard,) = gtp_vit.read_embeddings(tmp_path / "out")
    vectors, errors = embed.vectors(content(folder))
    same(folder, (dict(zip(shard.names, shard.embeddings, strict=True)), {}), vectors, errors)
