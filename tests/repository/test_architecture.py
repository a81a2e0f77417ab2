"""Promises about the code itself: who imports whom, how heavy an import is, what a file says of itself."""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gtp_vit
from gtp_vit.cli.app import COMMANDS

SOURCE = Path(gtp_vit.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# Each room may import itself, errors, version, and what stands behind it. A room is a file or a folder; what
# learns of a model is a room inside GTP+'s, whose settings and arithmetic need no model.
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "jsonable": set(),
    "plugins": set(),
    "tensors": set(),
    "weights": set(),
    "kernels": {"tensors"},
    "core": {"kernels", "tensors"},
    "methods": {"core", "kernels", "plugins", "tensors", "weights"},
    "backbones": {"core", "plugins", "tensors", "weights"},
    "recipes": {"core", "methods", "backbones"},
    "patching": {"core", "methods", "backbones", "kernels", "recipes"},
    "runs": {"patching", "recipes", "methods"},
    "models": {"backbones", "core", "kernels", "patching", "recipes", "runs", "weights"},
    "data": {"patching", "runs"},
    "profiling": {"core", "methods", "backbones", "patching", "kernels"},
    "metrics": {"core", "methods", "patching", "runs", "data", "tensors"},
    "methods/gtp_plus/learning": {"core", "methods", "metrics", "patching", "recipes", "runs", "tuning"},
    "engines": {"core", "data", "methods", "metrics", "models", "patching", "profiling", "runs", "tensors"},
    "embeddings": {"core", "patching", "runs", "data", "tensors"},
    "platforms": {"backbones", "core", "data", "embeddings", "engines", "models", "patching", "recipes", "runs"},
    "tuning": {
        *("core", "data", "engines", "methods", "methods/gtp_plus/learning", "metrics", "patching", "profiling"),
        *("recipes", "runs"),
    },
    "report": {"core", "engines", "metrics", "profiling", "recipes", "runs", "tuning"},
    "training": {"core", "data", "methods", "metrics", "models", "patching", "profiling", "recipes", "runs"},
    "testing": {"backbones", "core", "methods", "patching", "profiling"},
    "demo": {
        *("backbones", "core", "data", "engines", "methods", "metrics", "models", "patching", "profiling", "recipes"),
        *("report", "tensors"),
    },
    "cli": {
        *("backbones", "core", "data", "demo", "embeddings", "engines", "methods", "methods/gtp_plus/learning"),
        *("metrics", "models", "patching", "profiling", "recipes", "report", "runs", "training", "tuning"),
    },
}


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def room_of(module: str) -> str:
    """The room of a module, by its path from the package on: the innermost folder that is one."""
    parts = module.removesuffix(".py").split("/")
    paths = ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    return next((path for path in paths if path in MAY_IMPORT), parts[0])


def room_of_file(path: Path) -> str:
    return room_of(path.relative_to(SOURCE).as_posix())


def test_imports_point_one_way():
    for path in FILES:
        room = room_of_file(path)
        if room != "__init__":
            allowed = MAY_IMPORT[room] | {room, "errors", "jsonable", "version"}
            ours = {
                name.replace(".", "/").removeprefix("gtp_vit/") for name in imports(path) if name.startswith("gtp_vit.")
            }
            assert not [name for name in ours if room_of(name) not in allowed], path


def modules_of(path: Path) -> set[str]:
    """The modules of the package that a file imports when it is imported, as paths from the package on."""
    names = set()
    for node in top_level(syntax(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gtp_vit":
            names |= {(node.module, f"{node.module}.{alias.name}") for alias in node.names}
    known = {each.relative_to(SOURCE).with_suffix("").as_posix().removesuffix("/__init__"): each for each in FILES}
    spelled = ([one.replace(".", "/").removeprefix("gtp_vit/") for one in pair] for pair in names)
    files = {known.get(whole, known.get(module)) for module, whole in spelled}
    return {each.relative_to(SOURCE).as_posix() for each in files if each is not None}


def top_level(tree: ast.Module):
    """The statements that run on import; not those for type checkers alone."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]


def test_no_cycle():
    """TopologicalSorter raises CycleError with the files in a circle."""
    graph = {path.relative_to(SOURCE).as_posix(): modules_of(path) for path in FILES}
    order = list(graphlib.TopologicalSorter({name: needs - {name} for name, needs in graph.items()}).static_order())
    assert len(order) == len(FILES)
    assert order.index("errors.py") < order.index("core/loop.py") < order.index("patching.py")


def test_no_command_imports_a_sibling():
    """What two of them need belongs into the folder above, or into a part that a page or a program can use, too."""
    commands = SOURCE / "cli/commands"
    for path in FILES:
        if path.parent == commands or room_of_file(path) == "cli":
            assert not any(name.startswith("gtp_vit.cli.commands") for name in imports(path)), path


def test_a_command_is_a_file():
    files = {path.stem for path in (SOURCE / "cli/commands").glob("*.py")} - {"__init__"}
    assert files == set(COMMANDS)


def test_packages_are_empty_but_for_registries():
    """A folder's __init__ says what is in it; registries are there, where a new file and its line are side by side."""
    with_code = {
        path.parent.relative_to(SOURCE).as_posix() for path in FILES if path.name == "__init__.py" and code_in(path)
    }
    assert with_code == {".", "backbones", "engines", "kernels", "methods"}


def code_in(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(syntax(path)))


def test_only_the_command_line_imports_the_command_line():
    for path in FILES:
        if room_of_file(path) != "cli":
            assert not any(name.startswith("gtp_vit.cli") for name in imports(path)), path


# What backbones call a model and its parts.
PARTS_OF_A_MODEL = {"model", "block", "attn", "attention", "encoder", "transformer", "embed", "tower"}


def root_of(node):
    """The name at the start of a.b.c."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def hosts_own() -> set[str]:
    """Names that models of timm and others have for their parts: what backbones read of them, unless we use it too."""
    read, ours = set(), set()
    for path in FILES:
        for node in ast.walk(syntax(path)):
            if room_of_file(path) == "backbones":
                if isinstance(node, ast.Attribute) and root_of(node) in PARTS_OF_A_MODEL:
                    read.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                    if root_of(node.args[0]) in PARTS_OF_A_MODEL and isinstance(node.args[1], ast.Constant):
                        read.add(node.args[1].value)
                elif isinstance(node, ast.Set):  # of children that are known
                    named = [each.value if isinstance(each, ast.Starred) else each for each in node.elts]
                    named = [one for each in named for one in (each.elts if isinstance(each, ast.Tuple) else [each])]
                    read |= {each.value for each in named if isinstance(each, ast.Constant)}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
                ours |= {each.arg for each in getattr(node, "args", ast.arguments([], [])).args}
            elif isinstance(node, ast.AnnAssign):
                ours.add(getattr(node.target, "id", getattr(node.target, "attr", "")))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                ours.add(node.attr)
    of_torch = {*dir(torch.nn.Linear(1, 1)), *dir(torch.nn.Conv2d(1, 1, 1)), *dir(torch.Tensor)}
    return {name for name in read - ours - of_torch if name and not name.startswith("_")} | OURS_TOO


# Words that only a model's own are read of a model.
OF_A_MODEL = {"blocks", "norm", "head", "attn", "mlp", "norm_pre", "head_drop", "forward_intermediates"}
MODELS = {"model", "plain", "fast", "tower", "root", "student", "teacher", "block", "original"}
OURS_TOO = {"num_classes", "grad_checkpointing", "img_size", "patch_size"}
SETTINGS = {"flags", "settings", "self", "options", "processor"}  # what ours are read from


def attributes(path: Path) -> set[str]:
    """Names of attributes that a file reads of something that is not settings."""
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Attribute):
            of_model = isinstance(node.value, ast.Name) and node.value.id in MODELS
            found |= {f"model.{node.attr}"} if node.attr in OF_A_MODEL and of_model else set()
            ours = node.attr in OURS_TOO and isinstance(node.value, ast.Name) and node.value.id in SETTINGS
            found |= set() if ours else {node.attr}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found |= {
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return found


@pytest.mark.time_limit(4)
def test_only_backbones_read_a_models_attributes():
    """Others ask the backbone. Networks of our own are made where they are, and the test kit looks at models itself."""
    for path in FILES:
        if room_of_file(path) not in ("backbones", "models", "testing"):
            read = attributes(path)
            assert not read & hosts_own(), path
            assert not [name for name in read if name.startswith("model.")], path


def test_the_package_does_not_need_the_programs_of_the_repository():
    """reproduction is not in the wheel, and neither are the others."""
    for path in FILES:
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"reproduction", "benchmarks", "tests", "training"}, path


def test_reports_get_data_and_run_nothing():
    """Whoever asks for a report measures what is in it: of rooms that run models it imports types, and no module."""
    for path in (SOURCE / "report").glob("*.py"):
        names = {name.removeprefix("gtp_vit.") for name in imports(path)}
        measuring = {name for name in names if name.startswith(("profiling.", "tuning.", "metrics.evaluate", "core."))}
        assert all(name.split(".")[-1][0].isupper() for name in measuring), path
        assert not names & {"torch.nn", "models", "patching"}, path


def test_files_say_what_they_are():
    assert not [path for path in FILES if not ast.get_docstring(syntax(path))]


# Of gradio, git, timm and the repository; and of messages.
NAMED_ELSEWHERE = {"launch", "GIT_DIR", "validate.py", "setup.py", "rotary_keys.py"}


def test_what_comments_name_exists():
    """Names in backticks, constants with an underscore and files of the package: renaming forgets them."""
    texts, words = [], {path.name for path in FILES}
    for path in FILES:
        code = path.read_text()
        own = [text for node in ast.walk(syntax(path)) if (text := docstring_of(node)) is not None]
        own += re.findall(r"(?<=\s)# .*", code)
        for text in own:
            code = code.replace(text, "")
        texts += own
        words |= {*re.findall(r"\w+", code), path.stem}
    quoted = [re.split(r"[(=]", each)[0] for text in texts for each in re.findall(r"`([^`\n]+)`", text)]
    named = {name for each in quoted if "..." not in each for name in re.findall(r"[A-Za-z_]\w*", each)}
    named |= {name for text in texts for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b|\b[a-z_]+\.py\b", text)}
    assert named - words == NAMED_ELSEWHERE


def docstring_of(node: ast.AST) -> str | None:
    """As it is written."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return None
    return ast.get_docstring(node, clean=False)


def test_a_files_docstring_begins_with_no_other_name():
    """ "tune: the schedule of ..." stands in tune.py, or where the function is."""
    for path in FILES:
        name, colon, _ = (ast.get_docstring(syntax(path)) or "").partition(": ")
        if colon and name.isidentifier() and name.islower():
            defined = {node.name for node in syntax(path).body if isinstance(node, ast.FunctionDef)}
            assert name in {path.stem, *defined}, path


def test_errors_call_settings_by_their_names():
    """What a method checks by name is a setting of its own, or an argument, so that users find it."""
    for path in (SOURCE / "methods").rglob("*.py"):
        nodes = list(ast.walk(syntax(path)))
        fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
        fields |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
        checks = [call for call in calls if ast.unparse(call.func) in ("check_name", "check_range", "check_layers")]
        checked = {call.args[0].value for call in checks if isinstance(call.args[0], ast.Constant)}
        assert checked <= {*fields, "selection", "method"}, path


def test_no_kernel_file_is_called_like_a_standard_module():
    """make runs kernels/sources.py as a script, which puts its folder in front of the standard library."""
    assert not {path.stem for path in SOURCE.glob("kernels/*.py")} & sys.stdlib_module_names


@pytest.mark.time_limit(5)
def test_importing_the_package_imports_torch_only():
    """And of its own modules those that `patch` needs."""
    code = (
        "import sys, json, gtp_vit; first = 'torch' in sys.modules; gtp_vit.patch; "
        "print(json.dumps([first, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    torch_at_once, modules = json.loads(done.stdout)
    loaded = {name.split(".")[0] for name in modules}
    assert not torch_at_once
    assert "torch" in loaded
    assert len([name for name in modules if name.split(".")[0] == "gtp_vit"]) <= 74
    assert not {"timm", "torchvision", "PIL", "safetensors", "huggingface_hub", "transformers", "open_clip"} & loaded


def parameters(function: ast.FunctionDef) -> int:
    own = function.args
    return len([*own.posonlyargs, *own.args, *own.kwonlyargs]) + bool(own.vararg) + bool(own.kwarg)


def public_functions(path: Path) -> list[ast.FunctionDef]:
    """Functions and methods that others may call, but not the operators, whose arguments are those of a schema."""
    operators = {
        name.id
        for call in ast.walk(syntax(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Operator"
        for argument in call.args
        for name in ast.walk(argument)
        if isinstance(name, ast.Name)
    }
    functions = [node for node in ast.walk(syntax(path)) if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return [node for node in functions if node.name not in operators]


# A change of any field: written out, as its docstring says.
MANY_PARAMETERS = {"core/tokens.py": {"replace"}}


def test_no_public_function_has_more_than_8_parameters():
    """Except where foreign signatures are repeated, and where arguments are the tensors of an operator's schema."""
    for path in FILES:
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith(("backbones/", "kernels/")):
            many = {function.name for function in public_functions(path) if parameters(function) > 8}
            assert many == MANY_PARAMETERS.get(place, set()), place


def test_type_checkers_see_the_public_names():
    """The imports that only type checkers see, and the table that `__getattr__` reads, are the same."""
    (block,) = (node for node in syntax(SOURCE / "__init__.py").body if isinstance(node, ast.If))
    imported = [(node.module, alias.name) for node in block.body for alias in node.names]
    homes = gtp_vit.MODULES_OF_NAMES.items()
    assert imported == [(f"gtp_vit.{module}", name) for module, names in homes for name in names.split()]


def test_public_names():
    assert " ".join(sorted(gtp_vit.__all__)) == (
        "ATC ATS DiffRate DynamicViT EViT Embedder EvoViT GTP GTPError GTPPlus Identity MCTF METHODS Method PPT PiToMe "
        "PictureFolder Recipe ScheduleLimits SearchConfig Target TimingConfig ToFu ToMe Tracking TrainingConfig "
        "TriLevel UnsupportedModelError adapt_processor calibrate create_model embed export finetune is_patched "
        "load_pretrained macs make_method method_from_dict patch read_embeddings read_recipe save_checkpoint trace "
        "tune tune_and_patch unpatch"
    )


def test_every_public_name_is_documented():
    for name in gtp_vit.__all__:
        assert name == "METHODS" or getattr(gtp_vit, name).__doc__, name
    assert set(gtp_vit.__all__) <= set(dir(gtp_vit))
    with pytest.raises(AttributeError, match="pach"):
        gtp_vit.pach  # noqa: B018


# mypy checks nothing about a value that is Any. This number may only fall.
MOST_ANY = 300


def test_few_values_outside_the_backbones_have_no_type():
    """Backbones read models of other libraries; the rest of the package knows what it has."""
    count = {
        path.relative_to(SOURCE).as_posix(): sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(syntax(path))
        )
        for path in FILES
        if room_of_file(path) != "backbones"
    }
    assert sum(count.values()) <= MOST_ANY, sorted(count.items(), key=lambda item: -item[1])[:10]
