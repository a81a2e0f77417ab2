"""Fingerprints: short hashes of lines of text, of tensors and of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

LENGTH = 16  # hexadecimal digits


def lines_fingerprint(lines: Iterable[str]) -> str:
    """A hash of some texts in their order; names of files may hold bytes that are no text."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()[:LENGTH]


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(memoryview(raw.numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()[:LENGTH]


def content_fingerprint(path: Path) -> str:
    """A hash of what is in a file, behind whatever links."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:LENGTH]
    except OSError:  # whoever needs the file says so
        return "cannot be read"
