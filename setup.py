"""Builds the native kernels: one shared library for each instruction set, with no header but the compiler's own.

Each is optional: where one cannot be built (no compiler, another processor), installing goes on without it, and the
package runs on torch operators.
"""

import platform

from setuptools import Extension, setup

FLAGS = [
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wno-psabi",
]
INSTRUCTION_SETS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
SOURCES = "src/gtp_vit/kernels/cpp"
HEADERS = ("attention", "conserve", "graph", "parallel", "products", "reduce", "threshold", "vector", "workspace")

x86 = platform.machine().lower() in ("x86_64", "amd64")
setup(
    ext_modules=[
        Extension(
            f"gtp_vit.kernels._{name}",
            [f"{SOURCES}/api.cpp"],
            depends=[f"{SOURCES}/{header}.h" for header in HEADERS],
            extra_compile_args=FLAGS + flags,
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.items()
        if x86 or name == "portable"
    ]
)
