"""Promises about the code itself: who imports whom, how heavy an import is, what a file says of itself."""

import ast
import json
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import gtp_vit

SOURCE = Path(gtp_vit.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# Each part may import itself, errors, and what stands behind it.
MAY_IMPORT = {
    "errors": set(),
    "tensors": set(),
    "paper": {"tensors"},
    "kernels": {"paper", "tensors"},
    "core": {"paper", "kernels", "tensors"},
    "methods": {"core", "paper", "kernels", "tensors"},
    "backbones": {"core"},
    "models": {"core"},
    "recipes": {"core", "methods", "backbones"},
    "patch": {"core", "methods", "backbones", "kernels", "recipes"},
    "embedded": set(),
    "tools": {"core", "methods", "backbones", "models", "embedded", "patch", "kernels", "paper", "recipes", "tensors"},
    "training": {"core", "methods", "patch", "recipes", "tools"},
    "cli": {"core", "methods", "backbones", "embedded", "patch", "recipes", "tools", "training"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for name in imports(path):
        if name.startswith("gtp_vit."):
            other = name.split(".")[1]
            assert other in MAY_IMPORT[part] | {part, "errors"} or name == "gtp_vit.__version__", name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_say_what_they_are(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_importing_the_package_imports_torch_only():
    code = "import sys, json, gtp_vit; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "torch" in loaded
    assert not {"timm", "torchvision", "rich", "tyro", "PIL", "safetensors", "huggingface_hub"} & set(loaded)


def test_public_names():
    public = [name for name, value in vars(gtp_vit).items() if not name.startswith("_") and not ismodule(value)]
    assert " ".join(sorted(public)) == (
        "ATS DiffRate DynamicViT EViT EvoViT GTP GTPError GTPPlus Identity Limits METHODS Method PPT Recipe ToMe "
        "Training TriLevel UnsupportedBackbone accelerate create_model finetune is_patched macs make_method "
        "method_from_dict patch read_recipe save_checkpoint trace tune unpatch"
    )


def test_every_public_name_is_documented():
    for name, value in vars(gtp_vit).items():
        if not name.startswith("_") and not ismodule(value) and name != "METHODS":
            assert value.__doc__, name
