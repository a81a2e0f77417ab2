"""One rule for EXIF: pictures are turned upright as it says, by every reader, unless --ignore-exif."""

import dataclasses
import io
import json
import tarfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import gtp_vit
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.data.dataset import StreamingImageDataset
from gtp_vit.data.image_file import ORIENTATION, decode, load_picture
from gtp_vit.data.library_readers import TorchvisionReader
from gtp_vit.data.open import DataSettings, open_with_transform
from gtp_vit.demo import upload
from gtp_vit.runs.identity import images_identity

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 2}
HALVES = np.zeros((16, 24), dtype=np.uint8)
HALVES[:8] = 200  # bright above, dark below
TURNS = {  # EXIF's number -> how the picture lies in the file
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def turned(number=6, ending="png", grey=HALVES):
    """The bytes of a picture that was held upright, as a camera stores it."""
    picture = Image.fromarray(grey)
    stored = picture if TURNS[number] is None else picture.transpose(TURNS[number])
    exif = Image.Exif()
    exif[ORIENTATION] = number
    data = io.BytesIO()
    stored.save(data, {"jpg": "JPEG"}.get(ending, ending.upper()), exif=exif)
    return data.getvalue()


def grey_of(picture):
    return np.asarray(picture.convert("L")).astype(int)


def is_upright(picture):
    found = grey_of(picture)
    return found.shape == HALVES.shape and abs(found - HALVES).max() < 30


def lies(picture):
    """Is it 24 high and 16 wide, as it is stored?"""
    return grey_of(picture).shape == HALVES.T.shape


@pytest.fixture
def folder(tmp_path):
    for name in ("a/0.png", "b/0.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(turned())
    return tmp_path / "images"


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    from safetensors.torch import save_file

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    return ["vit_tiny_patch16_224", "--checkpoint", str(tmp_path / "w.safetensors"), "--img-size", "32"]


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("number", TURNS)
def test_every_orientation_becomes_upright_once(tmp_path, number, ending):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(turned(number, ending))
    found = load_picture(path)
    assert is_upright(found)
    assert is_upright(decode(found))  # whoever decodes it again does not turn it twice


def test_sixteen_bits_are_turned_too(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(turned(6, grey=HALVES.astype(np.uint16) * 257))
    assert is_upright(load_picture(path))
    picture, notes = upload.read_upload(path)
    assert is_upright(picture)
    assert "It was turned upright, as its EXIF data say." in notes


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0nonsense", b"", b"Exif\0\0II*\0\xff\xff\xff\xff"], ids=["text", "none", "cut"]
)
def test_exif_that_cannot_be_read_turns_nothing(tmp_path, exif):
    path = tmp_path / "x.jpg"
    Image.fromarray(HALVES).save(path, exif=exif)
    assert is_upright(load_picture(path))


def test_an_orientation_that_does_not_exist_turns_nothing(tmp_path):
    for number in (0, 9, 300):
        exif = Image.Exif()
        exif[ORIENTATION] = number
        Image.fromarray(HALVES).save(tmp_path / "x.jpg", exif=exif)
        assert is_upright(load_picture(tmp_path / "x.jpg"))


def seen_by(dataset):
    """What the transform of a data set is given."""
    found = []
    dataset.transform = lambda picture: (found.append(picture), torch.zeros(3, 32, 32))[1]
    items = (
        [dataset[0]]
        if hasattr(dataset, "__getitem__") and not isinstance(dataset, StreamingImageDataset)
        else [*dataset]
    )
    assert not items[0].error
    return found[0]


@pytest.mark.parametrize("ignore", [False, True])
def test_every_reader_obeys_the_rule(tmp_path, folder, ignore):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        member = tarfile.TarInfo("0.png")
        member.size = len(turned())
        tar.addfile(member, io.BytesIO(turned()))

    def opened(**settings):
        return open_with_transform(DataSettings(labels=False, ignore_exif=ignore, **settings), None, (3, 32, 32))

    pictures = {
        "folder": seen_by(opened(data_dir=folder)),
        "torchvision": seen_by(opened(data_dir=folder, dataset="torch/image_folder")),
        "stream": seen_by(
            StreamingImageDataset([(Image.open(io.BytesIO(turned())), 0)], None, (3, 32, 32), ignore_exif=ignore)
        ),
    }
    if pytest.importorskip("webdataset"):
        pictures["tars"] = seen_by(opened(data_dir=tmp_path, dataset="wds/", split="*.tar"))
    for name, picture in pictures.items():
        assert lies(picture) if ignore else is_upright(picture), name


@pytest.mark.parametrize("ignore", [False, True])
def test_hugging_face_data_sets_obey_the_rule(tmp_path, folder, ignore):
    datasets = pytest.importorskip("datasets")
    from gtp_vit.data.dataset import ImageDataset
    from gtp_vit.data.library_readers import HuggingFaceReader

    class Reader:
        dataset = datasets.Dataset.from_dict({"image": [{"bytes": turned(), "path": None}]})
        root, image_key, class_to_idx, label_key = "", "image", {}, "label"

    picture = seen_by(ImageDataset(HuggingFaceReader(Reader()), None, (3, 32, 32), ignore_exif=ignore))
    assert lies(picture) if ignore else is_upright(picture)


def test_torchvision_and_ours_turn_a_picture_once_together(folder):
    from torchvision.datasets import ImageFolder

    picture = TorchvisionReader(ImageFolder(str(folder))).open(0).file
    assert is_upright(picture)
    assert is_upright(decode(picture))


def test_the_identity_of_a_run_says_which_rule_it_followed(folder):
    def identity(ignore):
        return images_identity(
            open_with_transform(DataSettings(folder, labels=False, ignore_exif=ignore), None, (3, 32, 32))
        )

    one, other = identity(False), identity(True)
    assert one.orientation == "as EXIF says"
    assert other == dataclasses.replace(one, orientation="as stored")


def test_commands_take_the_flag_and_refuse_to_mix(tmp_path, folder, checkpoint, capsys):
    output = str(tmp_path / "v")
    words = [
        "embed",
        *checkpoint,
        "--num-classes",
        "2",
        "--data-dir",
        str(folder),
        "--workers",
        "0",
        "--output",
        output,
    ]
    assert main(words) == ExitCode.OK
    assert json.loads((tmp_path / "v" / "manifest.json").read_text())["run"]["orientation"] == "as EXIF says"
    upright = next(gtp_vit.read_embeddings(output)).embeddings
    capsys.readouterr()
    assert main([*words, "--ignore-exif"]) == ExitCode.USAGE
    assert "orientation was as EXIF says and is as stored" in capsys.readouterr().err
    assert main([*words, "--ignore-exif", "--restart"]) == ExitCode.OK
    assert not np.allclose(upright, next(gtp_vit.read_embeddings(output)).embeddings, atol=1e-4)


def test_python_has_the_same_rule(folder):
    model = timm.create_model("vit_tiny_patch16_224", **SIZES).eval()

    def vector(images):
        (batch,) = gtp_vit.embed(model, images, workers=0)
        return batch.embeddings

    assert not torch.allclose(vector(folder), vector(gtp_vit.PictureFolder(folder, ignore_exif=True)), atol=1e-4)
