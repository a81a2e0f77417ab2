"""Members of tar files and rows of data sets that are broken: each is named with the reason, and the rest is read."""

import io
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from gtp_vit.data.dataset import ImageDataset
from gtp_vit.data.library_readers import HuggingFaceReader
from gtp_vit.data.loader import batches
from gtp_vit.data.open import DataSettings, open_with_transform


def picture():
    data = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(data, "PNG")
    return data.getvalue()


def zeros(_):
    return torch.zeros(3, 8, 8)


def test_bad_members_of_a_web_dataset_are_named(tmp_path):
    pytest.importorskip("webdataset")
    members = {
        "good.png": picture(),
        "good.cls": b"1",
        "empty.png": b"",
        "cut.png": picture()[:40],
        "text.jpg": b"no picture",
        "label.png": picture(),
        "label.cls": b"one",
        "alone.cls": b"3",
        "last.png": picture(),
    }
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    dataset = open_with_transform(DataSettings(tmp_path, "wds/", "*.tar", labels=False), zeros, (3, 8, 8))
    (batch,) = batches(dataset, batch_size=99, workers=0)
    assert [name.split("/")[1].split(".")[0] for name in batch.names] == ["good", "last"]
    found = {text.split(":")[0].split("/")[1].split(".")[0]: text for text in batch.unreadable.values()}
    assert set(found) == {"empty", "cut", "text", "label", "alone"}
    assert "its label, in the .cls file, is b'one'; it must be an integer" in found["label"]
    assert "it has no picture, only cls" in found["alone"]


def test_bad_rows_of_a_hugging_face_data_set_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    rows = [
        {"bytes": picture(), "path": None},
        None,
        {"bytes": None, "path": None},
        {"bytes": b"", "path": ""},
        {"bytes": None, "path": str(tmp_path / "nothing.png")},
        {"bytes": None, "path": str(tmp_path / "pipe.png")},
        {"bytes": b"no picture", "path": "x.png"},
        {"bytes": picture(), "path": "last.png"},
    ]

    class Set(list):
        column_names = ("image",)

    class Reader:
        dataset = Set({"image": row} for row in rows)
        root, image_key, class_to_idx, label_key = "", "image", {}, "label"

    (batch,) = batches(ImageDataset(HuggingFaceReader(Reader()), zeros, (3, 8, 8)), batch_size=99, workers=0)
    assert batch.names == ("image 0", "last.png")
    said = list(batch.unreadable.values())
    assert [text.endswith("the row has no image") for text in said] == [True, True, True, False, False, False]
    assert "No such file" in said[3]
    assert "it is not a file but a folder, pipe, socket or device" in said[4]
