"""Names of files reach a terminal, a log or a page as text: what is in them controls nothing."""

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from gtp_vit.cli import render
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.demo.markup import message_html
from gtp_vit.errors import printable
from gtp_vit.report.page import paragraph, table

EVIL = "esc\x1b[31mRED\x1b]0;pwn\x07\x9b2J\u202egpj.\r\x00"
SIGNS = ("\x1b", "\x07", "\x9b", "\u202e", "\r", "\x00")


def test_what_controls_is_escaped_and_all_else_stays():
    said = printable(EVIL)
    assert not set(SIGNS) & set(said)
    assert said.startswith("esc\\x1b[31mRED\\x1b]0;pwn\\x07\\x9b2J\\u202egpj.")
    for text in ("ein Bär, 猫.jpg", "👩\u200d🔬", "a\tb\nc", "─│"):
        assert printable(text) == text
    assert printable("\udcff") == "\\udcff"  # a byte of a name that is no text
    printable("\udcff").encode()


@pytest.mark.filterwarnings("default")
def test_commands_print_names_of_files_as_text(tmp_path, capsys):
    save_file(timm.create_model("vit_tiny_patch16_224", img_size=32).state_dict(), tmp_path / "w.safetensors")
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "good.png")
    evil = EVIL.replace("\x00", "")
    (folder / f"{evil}.png").write_bytes(b"broken")
    (folder / f"{evil}.txt").write_bytes(b"no picture")
    (folder / f"{evil}-link.png").symlink_to("good.png")
    words = ["vit_tiny_patch16_224", "--checkpoint", str(tmp_path / "w.safetensors"), "--img-size", "32"]
    words += ["--data-dir", str(folder), "--workers", "0", "--output", str(tmp_path / "v")]
    assert main(["embed", *words]) == ExitCode.INCOMPLETE
    said = "".join(capsys.readouterr())
    for ending in (".png: ", ".txt", "-link.png is the same as good.png"):  # unreadable, no picture, a link
        assert f"\\x9b2J\\u202egpj.\\x0d{ending}" in said
    assert not set(SIGNS) & set(said)


def test_tables_and_pages_show_names_as_text(capsys):
    render.print_table(EVIL, ["a"], [[EVIL]])
    render.print_text(EVIL)
    for said in (capsys.readouterr().out, paragraph(EVIL), table(["a"], [[EVIL]]), message_html(EVIL)):
        assert not set(SIGNS) & set(said)
        assert "\\x1b[31m" in said
