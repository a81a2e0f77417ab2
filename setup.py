"""Builds the native kernels: one shared library for each instruction set, with no header but the compiler's own.

Each is optional: where one cannot be built (no compiler, a different processor), installing continues without it, and
the package runs on torch operators.
"""

import importlib.util
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPP = "src/gtp_vit/kernels/cpp"


def load_sources():
    """gtp_vit.kernels.sources without gtp_vit itself, which needs torch."""
    spec = importlib.util.spec_from_file_location("sources", Path(CPP).parent / "sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sources = load_sources()


class Build(build_ext):
    """Names libraries by what they are built from, and removes those of older sources."""

    def get_ext_filename(self, fullname):
        *packages, name = fullname.split(".")
        return str(Path(*packages, sources.library(name.removeprefix("_"))))

    def run(self):
        for folder in (Path(self.build_lib) / "gtp_vit/kernels", Path(CPP).parent):
            for path in sources.libraries(folder):
                if path.name not in map(sources.library, sources.INSTRUCTION_SETS):
                    path.unlink()
        super().run()


x86 = platform.machine().lower() in ("x86_64", "amd64")
setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            f"gtp_vit.kernels._{name}",
            [f"{CPP}/api.cpp"],
            depends=[str(path) for path in sorted(Path(CPP).glob("*.h"))],
            extra_compile_args=[*sources.FLAGS, *flags],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
        for name, flags in sources.INSTRUCTION_SETS.items()
        if x86 or name == "portable"
    ],
    # The libraries know nothing of Python: one wheel serves every version.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
