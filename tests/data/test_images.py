"""Pictures as they are found in folders: of every kind, beside other files, pipes and devices."""

import os
import signal
import socket

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.datasets import ImageFolder

from gtp_vit import GTPError
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import ImageDataset, StreamingImageDataset
from gtp_vit.data.image_file import decode, load_picture, open_picture
from gtp_vit.data.items import collate
from gtp_vit.data.loader import batches, take_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.data.reader import OpenedImage, Reader
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.runs import distributed

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 2}
GREY = np.linspace(0, 65535, 40 * 40).reshape(40, 40).astype(np.uint16)  # from black to white
EIGHT = np.rint(GREY / 257).astype(np.uint8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SIZES).eval()


@pytest.fixture
def folder(tmp_path):
    """Two classes of two pictures each."""
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(EIGHT).save(path)
    return tmp_path / "images"


def read(model, folder):
    """Names of the pictures that were read, and what is said of the others."""
    dataset = open_images(model, DataSettings(data_dir=folder))
    (batch,) = batches(dataset, batch_size=100, workers=0)
    return [dataset.reader.name(place) for place in batch.indices.tolist()], list(batch.unreadable.values())


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    if ending == "pgm":  # Pillow 10 cannot write it
        path.write_bytes(b"P5 40 40 65535\n" + GREY.astype(">u2").tobytes())
    else:
        Image.fromarray(GREY).save(path)
    found = np.asarray(load_picture(path))
    assert found.shape == (40, 40, 3)
    np.testing.assert_array_equal(found, EIGHT[:, :, None].repeat(3, axis=2))


def test_sixteen_bits_of_big_endian_tiff_and_of_decoded_pictures_are_scaled(tmp_path):
    path = tmp_path / "x.tif"
    big = Image.frombytes("I;16B", (40, 40), GREY.astype(">u2").tobytes())
    big.save(path)
    np.testing.assert_array_equal(np.asarray(load_picture(path))[:, :, 0], EIGHT)
    Image.fromarray(GREY).save(path, tiffinfo={262: 0})  # says that 0 is white
    np.testing.assert_array_equal(np.asarray(load_picture(path))[:, :, 0], 255 - EIGHT)
    np.testing.assert_array_equal(np.asarray(decode(Image.fromarray(GREY)))[:, :, 0], EIGHT)
    stream = StreamingImageDataset(
        [(Image.fromarray(GREY), 1)], lambda image: torch.tensor(np.asarray(image)), (3, 40, 40)
    )
    np.testing.assert_array_equal(next(iter(stream)).image[:, :, 0], EIGHT)


@pytest.mark.parametrize("values", [GREY.astype(np.int32), (GREY / 65535).astype(np.float32)], ids=["int32", "float32"])
def test_grey_without_a_known_white_is_reported(tmp_path, values):
    path = tmp_path / "x.tif"
    Image.fromarray(values).save(path)
    with pytest.raises(GTPError, match=r"x.tif cannot be read: its grey values .* do not say what is white"):
        open_picture(path)


def test_the_usual_modes_become_rgb(tmp_path):
    colour = Image.merge("RGB", [Image.fromarray(EIGHT)] * 3)
    for mode, ending in (("CMYK", "jpg"), ("LA", "png"), ("P", "gif"), ("RGBA", "webp"), ("1", "bmp")):
        path = tmp_path / f"{mode}.{ending}"
        colour.convert("RGBA" if mode == "RGBA" else "L" if mode == "1" else "RGB").convert(mode).save(path)
        assert load_picture(path).mode == "RGB"
    still = [Image.new("L", (40, 40), shade) for shade in (10, 200)]
    still[0].save(tmp_path / "moving.gif", save_all=True, append_images=still[1:])
    assert np.asarray(load_picture(tmp_path / "moving.gif")).max() == 10  # the first picture


def test_pictures_of_all_kinds_are_read_in_folders(model, folder):
    picture = Image.fromarray(EIGHT).convert("RGB")
    more = ["webp", "bmp", "tiff", "tif", "gif", "ppm", "jpg", "JPEG"]
    for ending in more:
        picture.save(folder / "a" / f"x.{ending}")
    names, problems = read(model, folder)
    assert {name.split(".")[-1] for name in names} == {"png", *more}
    assert (len(names), problems) == (12, [])


def test_pictures_that_pillow_cannot_decode_are_counted(model, folder):
    (folder / "a" / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic")
    names, problems = read(model, folder)
    assert len(names) == 4
    assert [problem.split(":")[0] for problem in problems] == ["a/phone.heic"]


def test_other_files_are_named_in_one_line(model, folder):
    (folder / "notes.txt").write_text("boxes")
    (folder / "b" / "boxes.xml").write_text("boxes")
    (folder / "b" / ".DS_Store").write_text("")
    with pytest.warns(UserWarning, match=r"^not read in .*: b.boxes.xml, and 1 more like it$"):
        assert read(model, folder)[1] == []


@pytest.fixture
def pipe(folder):
    os.mkfifo(folder / "a" / "pipe.jpg")
    return folder / "a" / "pipe.jpg"


def test_pipes_sockets_and_devices_are_unreadable_and_nobody_waits_for_them(model, folder, pipe, monkeypatch):
    (folder / "b" / "device.png").symlink_to("/dev/zero")
    (folder / "b" / "nothing.png").symlink_to("nowhere")
    monkeypatch.chdir(folder / "a")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.png")  # a whole path may be too long for a socket
        names, problems = read(model, folder)
    assert len(names) == 4
    named = {problem.split(":")[0]: problem for problem in problems}
    assert set(named) == {"a/pipe.jpg", "a/s.png", "b/device.png", "b/nothing.png"}
    assert "it is not a file but a folder, pipe, socket or device" in named["a/pipe.jpg"]


def test_torchvisions_folders_are_read_as_ours(model, folder, pipe):
    Image.fromarray(GREY).save(folder / "a" / "grey16.png")
    dataset = open_images(model, DataSettings(data_dir=folder, dataset="torch/image_folder"))
    plain = dataset.reader.dataset
    assert isinstance(plain, ImageFolder)
    names = [os.path.basename(path) for path, _ in plain.samples]
    assert np.asarray(plain[names.index("grey16.png")][0]).min() == 0
    assert "it is not a file" in dataset[names.index("pipe.jpg")].error


def test_visualise_does_not_wait_for_a_pipe(pipe, tmp_path, capsys):
    words = ["visualise", "test_vit", str(pipe), "--checkpoint", weights(tmp_path), "--num-classes", "2"]
    assert main([*words, "--output", str(tmp_path / "v")]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"gtp-vit: {pipe} cannot be read: it is not a file but a folder, pipe, socket or device\n"
    )


def weights(tmp_path):
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.safetensors")
    return str(tmp_path / "vit.safetensors")


@pytest.mark.filterwarnings("default:not read in")
def test_what_was_not_read_shows_in_the_command(folder, pipe, tmp_path, capsys):
    (folder / "notes.txt").write_text("boxes")
    words = ["evaluate", "test_vit", "--num-classes", "2", "--checkpoint", weights(tmp_path), "--data-dir", str(folder)]
    assert main([*words, "--remove", "4", "--workers", "0"]) == ExitCode.INCOMPLETE
    note, error = capsys.readouterr().err.splitlines()
    assert note == f"gtp-vit: not read in {folder}, because it does not look like a picture: notes.txt"
    assert "1 of the images could not be read and were left out: a/pipe.jpg" in error


def test_a_folder_without_pictures_says_what_is_wanted(model, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("boxes")
    with pytest.raises(GTPError, match=r"no images in .*; give a folder with one folder of images for each class$"):
        open_images(model, DataSettings(data_dir=tmp_path))


def test_the_launchers_signal_is_no_unreadable_image(model):
    class Stopped(Reader):
        """The signal arrives while an image is read."""

        def __len__(self):
            return 4

        def open(self, index):
            os.kill(os.getpid(), signal.SIGTERM)

    images = ImageDataset(Stopped(), lambda image: torch.zeros(3, 32, 32), (3, 32, 32))
    with (
        pytest.raises(GTPError, match="process 0 of 2 was told to stop"),
        distributed._explain_lost_processes("process 0 of 2"),
    ):
        evaluate({UNREDUCED: model}, images, workers=0)


@pytest.mark.parametrize("label", [-1, None])
def test_a_split_without_labels_is_refused_in_words(model, label):
    class Unlabelled(Reader):
        def __len__(self):
            return 4

        def open(self, index):
            return OpenedImage("name", Image.new("RGB", (32, 32)), label if index else 0)

    images = ImageDataset(Unlabelled(), lambda image: torch.zeros(3, 32, 32), (3, 32, 32))
    with pytest.raises(GTPError, match=r"an image has label -1, which means no label.*--split"):
        evaluate({UNREDUCED: model}, images, workers=0)


def test_the_first_images_are_those_that_can_be_read_and_are_where_the_model_is(model, folder):
    (folder / "a" / "0.png").write_bytes(b"no picture")
    dataset = open_images(model, DataSettings(data_dir=folder))
    found = take_images(dataset, 2, model.to("meta", torch.bfloat16))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.bfloat16, (2, 3, 32, 32))
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(GTPError, match="none of the images could be read"):
        take_images(dataset, 2, model)


def in_shared_memory(items):
    return collate(items).images.is_shared()


def test_readers_put_batches_where_the_other_process_reads_them(model, folder):
    """Else a reader's heap has gaps between images that stay and batches that go, and it grows by a batch a batch."""
    found = open_images(model, DataSettings(folder, split=""))
    readers = torch.utils.data.DataLoader(found, 2, num_workers=1, collate_fn=in_shared_memory)
    assert list(readers) == [True, True]
    assert not in_shared_memory([found[0], found[1]])  # no other process, no copy
