"""What a compiled file says of itself is in a zip archive at its end."""

import json
import zipfile

import pytest

from gtp_vit.engines.attachment import attach, read_attachment
from gtp_vit.engines.graph import Graph, Port
from gtp_vit.errors import GTPError

GRAPH = Graph(
    (Port("images", "float32", (1, 3, 8, 8)),), (Port("logits", "float32", (1, 10)),), macs=7, eight_bits=False
)


def test_a_program_keeps_its_bytes_and_any_unzip_reads_the_rest(tmp_path):
    path = tmp_path / "x.pte"
    path.write_bytes(b"a program")
    attach(path, '{"a": 1}', GRAPH)
    assert path.read_bytes()[:9] == b"a program"
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["gtp_vit.json", "graph.json"]
        assert archive.read("gtp_vit.json") == b'{"a": 1}'
        assert json.loads(archive.read("graph.json")) == {
            "inputs": [{"name": "images", "type": "float32", "shape": [1, 3, 8, 8]}],
            "outputs": [{"name": "logits", "type": "float32", "shape": [1, 10]}],
            "macs": 7,
            "eight_bits": False,
        }
    stored = read_attachment(path)
    assert stored.metadata == '{"a": 1}'
    assert stored.graph() == GRAPH


def test_an_archive_of_torch_gets_two_more_entries_in_its_own_folder(tmp_path):
    path = tmp_path / "x.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/version", "1")
    attach(path, "{}", GRAPH, "x/extra/")
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["x/version", "x/extra/gtp_vit.json", "x/extra/graph.json"]
    assert read_attachment(path).graph() == GRAPH


def test_a_file_that_is_cut_off_cannot_be_read(tmp_path):
    path = tmp_path / "x.pte"
    path.write_bytes(b"a program")
    attach(path, "{}", GRAPH)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(zipfile.BadZipFile):
        read_attachment(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [("{}", "graph.inputs is missing"), ('{"inputs": 3}', "graph.inputs is 3; it must be a list")],
)
def test_a_graph_that_is_not_right_is_named(tmp_path, entry, message):
    path = tmp_path / "x.pte"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("graph.json", entry)
    stored = read_attachment(path)
    assert stored.metadata is None
    with pytest.raises(GTPError, match=message):
        stored.graph()
