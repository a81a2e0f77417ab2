"""AOTInductor: a program that torch compiles to machine code, for the same torch and the same kind of processor."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gtp_vit.engines.attachment import PLACE, attach, read_attachment, traced_graph
from gtp_vit.engines.engine import F32, Array, Engine, Precision, Run, UsageExample
from gtp_vit.engines.graph import StoredFile
from gtp_vit.errors import GTPError

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

COMPILERS = ("g++", "clang++")
PYTHON_EXAMPLE = """\
import torch

model = torch._inductor.aoti_load_package("{file}")
with torch.no_grad():
    outputs = model(torch.from_numpy(images))"""
CPP_EXAMPLE = """\
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

torch::inductor::AOTIModelPackageLoader model("{file}");
auto outputs = model.run({{images}})[0];"""
NATIVE = "It is machine code: run only files that you trust, on a processor like the one that it was made on"


class AOTInductor(Engine):
    """Files that end in .pt2."""

    name = "aotinductor"
    title = "AOTInductor"
    format = "aotinductor"
    suffix = ".pt2"
    precisions: ClassVar[Mapping[str, Precision]] = {"f32": F32}
    packages = ("torch",)
    extra = "aotinductor"
    metadata_place = PLACE

    def convert(
        self,
        program: Program,
        path: Path,
        precision: str,
        images: Array | None,
        metadata: str,
        *,
        tune_smoothing: bool = True,
    ) -> None:
        import torch
        from torch._inductor.utils import fresh_cache

        compiler = os.environ.get("CXX", "g++" if shutil.which("g++") else "clang++")
        own_compiler = torch._inductor.config.patch({"cpp.cxx": (None, compiler)})
        with fresh_cache(dir=str(program.folder)), own_compiler:  # nothing of it stays
            torch._inductor.aoti_compile_and_package(program.exported, package_path=str(path))
        with zipfile.ZipFile(path) as archive:
            top = archive.namelist()[0].split("/")[0]  # torch wants all in one folder
        attach(path, metadata, traced_graph(program, eight_bits=False), f"{top}/extra/")

    def load(self, path: Path, precision: str, threads: int, batch: int | None) -> Run:
        import torch

        _check_torch(read_attachment(path).metadata)
        if threads:
            torch.set_num_threads(threads)
        model = torch._inductor.aoti_load_package(str(path))
        _delete_extracted()

        def run(images: Array) -> Array:
            with torch.no_grad():
                outputs: Any = model(torch.from_numpy(images))
            return outputs.numpy()

        return run

    def open(self, path: Path) -> StoredFile:
        return read_attachment(path)

    def examples(self, file: str, precision: str) -> tuple[UsageExample, ...]:
        return (
            UsageExample("python", PYTHON_EXAMPLE.format(file=file), NATIVE),
            UsageExample("cpp", CPP_EXAMPLE.format(file=file), "With libtorch of the same version; not run here"),
        )

    def missing(self) -> str | None:
        if "CXX" in os.environ or any(map(shutil.which, COMPILERS)):
            return super().missing()
        return "needs a C++ compiler, which is not installed: install g++ or clang++, or name one in CXX"


def _check_torch(metadata: str | None) -> None:
    """Raise GTPError if a file was compiled for another torch: what it would do is not known."""
    exported_with = json.loads(metadata).get("versions", {}).get("torch") if metadata else None
    here = importlib.metadata.version("torch")
    if exported_with is not None and exported_with != here:
        raise GTPError(f"it was compiled for torch {exported_with}, and this is torch {here}")


def _delete_extracted() -> None:
    """Delete the folders into which torch has extracted libraries: they are loaded, and a kill would leave them."""
    with contextlib.suppress(OSError):  # only Linux has this list
        loaded = Path("/proc/self/maps").read_text()
        for folder in set(re.findall(r"(/\S+/\w{6})/[^/\s]+/data/aotinductor/\S+\.so", loaded)):
            shutil.rmtree(folder, ignore_errors=True)
