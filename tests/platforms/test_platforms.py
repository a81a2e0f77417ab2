"""The Embedder in real engines, as the scripts in examples/ use it: all pictures, each with its bits and its reason."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gtp_vit import Embedder

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT, BATCH = 12, 4
# Ray asks the network which version is the newest, and prints progress; Spark and others look for a home.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "DAFT_ANALYTICS_ENABLED": "0", "DAFT_PROGRESS_BAR": "0", "RAY_DEDUP_LOGS": "0"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pictures of one size, one of which is none."""
    folder, generator = tmp_path_factory.mktemp("platform") / "photos", np.random.default_rng(0)
    folder.mkdir()
    for number in range(COUNT):
        picture = Image.fromarray(generator.integers(0, 255, (30, 40, 3), dtype=np.uint8))
        picture.save(folder / f"{number:02}.png")
    (folder / "05.png").write_bytes(b"no picture")
    return folder


def run(name, *words):
    """A script of examples/ in a process of its own."""
    words = [sys.executable, EXAMPLES / f"{name}.py", *words, "--model", "fashion_vit"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env={**os.environ, **QUIET})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def engine(name, extra):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'gtp-vit[{extra}]'")


def check(rows, photos, **settings):
    """Every picture once, with the vector that it has in this process, in a batch of any composition."""
    embed = Embedder("fashion_vit", **settings)
    rows = sorted((Path(path).name, vector, error) for path, vector, error in rows)
    assert [name for name, _, _ in rows] == [path.name for path in sorted(photos.iterdir())]
    (name, vector, error) = rows.pop(5)
    assert (name, vector, error) == ("05.png", None, "no picture that Pillow knows begins with b'no pictu'")
    alone = embed.vectors([photos / name for name, _, _ in rows]).vectors
    np.testing.assert_allclose(np.array([vector for _, vector, _ in rows], np.float32), alone, rtol=0, atol=1e-5)
    assert not any(error for _, _, error in rows)


def rows_of(folder, *names):
    from pyarrow import parquet

    table = parquet.read_table(folder)
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def test_ray(photos, tmp_path):
    engine("ray", "ray")
    run("embed_with_ray", photos, tmp_path / "out", "--batch-size", BATCH)
    check(rows_of(tmp_path / "out", "path", "embedding", "embedding_error"), photos)


def test_daft(photos, tmp_path):
    engine("daft", "daft")
    run("embed_with_daft", photos, tmp_path / "out", "--batch-size", BATCH)
    check(rows_of(tmp_path / "out", "path", "embedding", "embedding_error"), photos)


def test_spark(photos, tmp_path):
    engine("pyspark", "spark")
    if shutil.which("java") is None:
        pytest.skip("no java here: install Debian's package default-jre-headless")
    run("embed_with_spark", photos, tmp_path / "out", "--batch-size", BATCH)
    check(rows_of(tmp_path / "out", "path", "embedding", "embedding_error"), photos)


def test_lance(photos, tmp_path):
    engine("lance", "lance")
    import lance

    run("embed_with_lance", photos, tmp_path / "photos.lance", "--batch-size", BATCH)
    table = lance.dataset(tmp_path / "photos.lance").to_table()
    names = ["path", "image", "embedding", "embedding_error"]
    assert table.schema.names == names
    check(zip(*(table[name].to_pylist() for name in names if name != "image"), strict=True), photos)
    assert not (tmp_path / "photos.checkpoint").exists()


def test_lancedb(photos, tmp_path):
    engine("lancedb", "lance")
    said = run("search_with_lancedb", photos, tmp_path / "db", photos / "03.png", "--count", "2")
    assert said.splitlines()[0] == f"1.0000\t{photos / '03.png'}"
    assert len(said.splitlines()) == 2
    again = run("search_with_lancedb", photos, tmp_path / "db", photos / "07.png", "--count", "1")
    assert again == f"1.0000\t{photos / '07.png'}\n"


KILLED = '''
import os, signal, sys
from pathlib import Path
import gtp_vit, ray

class Dies:
    """An actor that is killed in the middle of its second batch, once in the whole job."""

    def __init__(self, embed, marker):
        self.embed, self.marker, self.batches = embed, Path(marker), 0

    def __call__(self, batch):
        result = self.embed(batch).drop_columns(["bytes"])
        self.batches += 1
        if self.batches == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

folder, output, marker = sys.argv[1:]
ray.data.read_binary_files(folder, include_paths=True).map_batches(
    Dies, fn_constructor_args=(gtp_vit.Embedder("fashion_vit", image="bytes", batch_size=4), marker), batch_size=4,
    batch_format="pyarrow", compute=ray.data.ActorPoolStrategy(size=1), num_cpus=1,
).write_parquet(output)
'''


def test_a_killed_ray_actor_loses_nothing_and_changes_no_vector(photos, tmp_path):
    """Also nothing twice: the batch that it was at is computed again."""
    engine("ray", "ray")
    words = [sys.executable, "-c", KILLED, photos, tmp_path / "out", tmp_path / "killed"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env={**os.environ, **QUIET})
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    check(rows_of(tmp_path / "out", "path", "embedding", "embedding_error"), photos)
