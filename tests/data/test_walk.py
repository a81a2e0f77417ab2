"""Each real image once, whatever links lead to it."""

import json
import os
import warnings

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import GTPError
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.open import DataSettings, open_with_transform

SIZES = {"img_size": 32, "num_classes": 2}


@pytest.fixture
def tree(tmp_path):
    """Two classes of two pictures each."""
    for name in ("a/0.png", "a/1.png", "b/2.png", "b/3.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
    return tmp_path / "images"


def opened(folder, **settings):
    return open_with_transform(DataSettings(folder, split="", labels=False, **settings), None, (3, 8, 8))


def names(folder, **settings):
    reader = opened(folder, **settings).reader
    return [os.path.relpath(path, folder) for path, _ in reader.samples]


ALL = ["a/0.png", "a/1.png", "b/2.png", "b/3.png"]


def test_without_links_nothing_is_said(tree):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(tree) == ALL


def test_a_loop_counts_each_picture_once(tree):
    (tree / "b" / "again").symlink_to("..")
    with pytest.warns(UserWarning, match=r"b/again is the same as the folder itself; counted once \(--count-links"):
        assert names(tree) == ALL
    with pytest.warns(UserWarning, match="b/again is the same"):
        assert names(tree, count_links=True) == ALL  # a loop has no end, so nothing else can be meant


def test_many_loops_end(tree):
    for number in range(6):
        (tree / "a" / f"loop{number}").symlink_to("..")
        (tree / "b" / f"loop{number}").symlink_to("../a")
    with pytest.warns(UserWarning, match="more names like it"):
        assert names(tree) == ALL


def test_a_link_out_of_the_folder_is_followed(tree, tmp_path):
    tree.rename(tmp_path / "elsewhere")
    tree.mkdir()
    (tree / "x").symlink_to(tmp_path / "elsewhere" / "a")
    (tree / "y.png").symlink_to(tmp_path / "elsewhere" / "b" / "2.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(tree) == ["x/0.png", "x/1.png", "y.png"]
        assert opened(tree).reader.class_to_idx == {"": 0, "x": 1}


@pytest.mark.parametrize("make", [os.link, os.symlink], ids=["hard link", "link"])
def test_a_file_with_two_names_is_counted_once_and_named(tree, make):
    make(tree / "b" / "2.png", tree / "a" / "copy.png")
    first, second = sorted(["a/copy.png", "b/2.png"]) if make is os.link else ("b/2.png", "a/copy.png")
    with pytest.warns(UserWarning, match=f"{second} is the same as {first}; counted once"):
        assert names(tree) == sorted({*ALL, first} - {second})
    assert names(tree, count_links=True) == sorted([*ALL, "a/copy.png"])


def test_a_folder_with_two_names_keeps_its_real_one(tree):
    (tree / "0").symlink_to("b")
    with pytest.warns(UserWarning, match="0 is the same as b"):
        assert names(tree) == ALL
    assert names(tree, count_links=True) == ["0/2.png", "0/3.png", *ALL]


def test_a_file_and_its_folder_linked_from_outside_count_once(tree, tmp_path):
    tree.rename(tmp_path / "elsewhere")
    tree.mkdir()
    (tree / "0.png").symlink_to(tmp_path / "elsewhere" / "a" / "0.png")
    (tree / "z").symlink_to(tmp_path / "elsewhere" / "a")
    with pytest.warns(UserWarning, match="0.png is the same as z/0.png"):
        assert names(tree) == ["z/0.png", "z/1.png"]


def test_order_and_classes_are_those_of_timm(tree):
    from timm.data.readers.reader_image_folder import ReaderImageFolder

    for name in ("10.png", "9.PNG", "b/c/1.jpeg", "d/a/7.png"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((tree / "a" / "0.png").read_bytes())
    theirs, ours = ReaderImageFolder(str(tree)), opened(tree).reader
    assert ours.samples == theirs.samples
    assert ours.class_to_idx == theirs.class_to_idx
    assert [ours.name(place) for place in range(8)] == [theirs.filename(place) for place in range(8)]


def test_splits_are_found_as_timm_finds_them(tree):
    (tree / "val").mkdir()
    (tree / "a").rename(tree / "val" / "a")
    for split, wanted in (("validation", 2), ("val", 2), ("train", 4), ("", 4), ("b", 2)):
        assert len(open_with_transform(DataSettings(tree, split=split, labels=False), None, (3, 8, 8))) == wanted


def test_folders_of_torchvision_count_once_and_loops_are_refused(tree):
    os.link(tree / "b" / "2.png", tree / "a" / "copy.png")
    with pytest.warns(UserWarning, match="b/2.png is the same as a/copy.png"):
        assert len(opened(tree, dataset="torch/image_folder")) == 4
    assert len(opened(tree, dataset="torch/image_folder", count_links=True)) == 5
    (tree / "b" / "again").symlink_to("..")
    with pytest.raises(GTPError, match="again is a link to a folder above it"):
        opened(tree, dataset="torch/image_folder")


def test_a_tar_file_with_two_names_is_read_once(tree, tmp_path):
    pytest.importorskip("webdataset")
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.add(tree / "a" / "0.png", "0.png")
    os.symlink("0.tar", tmp_path / "1.tar")
    settings = DataSettings(tmp_path, "wds/", "*.tar", labels=False)
    with pytest.warns(UserWarning, match=r"1.tar is the same as 0.tar"):
        assert len(open_with_transform(settings, None, (3, 8, 8))) == 1


@pytest.mark.filterwarnings("default")  # which a command prints
def test_the_commands_say_so_and_count_once(tree, tmp_path, capsys):
    save_file(timm.create_model("vit_tiny_patch16_224", **SIZES).state_dict(), tmp_path / "w.safetensors")
    (tree / "b" / "again").symlink_to("..")
    os.link(tree / "b" / "2.png", tree / "b" / "copy.png")
    words = ["evaluate", "vit_tiny_patch16_224", "--checkpoint", str(tmp_path / "w.safetensors"), "--img-size", "32"]
    words += ["--num-classes", "2", "--data-dir", str(tree), "--workers", "0", "--json", "--method", "tome", "--r", "1"]
    assert main(words) == ExitCode.OK
    answer = capsys.readouterr()
    assert {row["images"] for row in json.loads(answer.out)["rows"]} == {4}
    assert "names like it; counted once (--count-links counts every name)" in answer.err
    assert main([*words, "--count-links"]) == ExitCode.OK
    assert {row["images"] for row in json.loads(capsys.readouterr().out)["rows"]} == {5}


def test_a_picture_in_place_of_a_folder_is_called_a_file(tree):
    with pytest.raises(GTPError, match=r"0.png is a file; give the folder that it is in"):
        opened(tree / "a" / "0.png")
