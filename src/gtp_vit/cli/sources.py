"""Dataclasses as their source code declares them, read without importing anything.

Python keeps no docstring of a field, so help texts come from here; and a misspelled flag is refused from here before
torch, which takes seconds, is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gtp_vit.errors import unknown_flag

PACKAGE = Path(__file__).resolve().parent.parent
# Flags that choose one of a registry, whose settings are flags too: the folder of its files, and the default.
REGISTRIES = {"--method": ("methods", "gtp_plus"), "--measure": ("metrics", "auto")}
NON_METHOD_NAMES = ("deploy", "auto")
COMMAND_WITH_TARGETS = "tune"  # the command whose flags are the bounds of measures as well


@dataclass(frozen=True)
class Field:
    """A field of a dataclass: its annotation as it is written, and the docstring below it."""

    annotation: str
    help: str

    @property
    def is_nested(self) -> bool:
        """Is it a dataclass whose fields are flags?"""
        return "Nested(" in self.annotation

    def spellings(self, flag: str) -> list[str]:
        """All spellings of the field as a flag."""
        negative = [f"--no-{flag[2:]}"] if self.annotation == "bool" else []
        return [flag, *negative, *re.findall(r"['\"](-[^'\"]+)['\"]", self.annotation)]


@dataclass(frozen=True)
class Declaration:
    """A class in a source file."""

    bases: tuple[str, ...]
    fields: dict[str, Field]
    constants: dict[str, object]  # class variables that are plain values, such as a method's name


@dataclass(frozen=True)
class Module:
    """The classes of a source file, and the names that it imports from gtp_vit: name -> (module, name there)."""

    classes: dict[str, Declaration]
    imports: dict[str, tuple[str, str]]
    bounds: frozenset[str]  # names of the bounds that it declares, which are targets of tune


def flag_spelling(field: str) -> str:
    """A field's name as a flag."""
    return f"--{field.replace('_', '-')}"


def looks_like_flag(word: str) -> bool:
    """Is it -x or --xyz, but not a negative number?"""
    return re.match(r"-(?![\d.])", word) is not None


@cache
def read_source(path: Path) -> Module:
    """The declarations in a source file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    classes = {node.name: _declaration(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Bound"]
    names = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    return Module(classes, imports, frozenset(map(str, names)))


def check_flag_names(command: str, arguments: Sequence[str]) -> None:
    """Raise UnknownNameError for a flag that neither the command nor any method or measure has; the parser does the
    rest."""
    own = _flags(f"gtp_vit.cli.commands.{command}", command.capitalize())
    if own is None or {"-h", "--help"} & set(arguments):
        return
    own |= _targets() if command == COMMAND_WITH_TARGETS else set()
    known = own | {"--model"}
    near = own
    for flag, (folder, default) in REGISTRIES.items():
        settings = _settings(folder) if flag in own else {}
        name = value_of_flag(arguments, flag) or default
        if settings and name not in settings and name not in NON_METHOD_NAMES:  # a recipe, or of another package
            return
        known = known.union(*settings.values(), *(_prefixed(key, own) for key, own in settings.items()))
        near = near.union(*[settings[name]] if name in settings else settings.values())
    for word in arguments:
        written = word.partition("=")[0]
        if looks_like_flag(word) and written not in known:
            raise unknown_flag(written, near)


def _prefixed(name: str, spellings: frozenset[str]) -> list[str]:
    """Spellings of settings that share a name with a flag of the command."""
    return [f"{flag_spelling(name)}-{spelling[2:]}" for spelling in spellings]


def value_of_flag(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag among the words of a command; None if it has none."""
    for index, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(arguments) and not looks_like_flag(arguments[index + 1]):
            return arguments[index + 1]
    return None


def _declaration(node: ast.ClassDef) -> Declaration:
    fields: dict[str, Field] = {}
    constants: dict[str, object] = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = ast.unparse(statement.annotation)
        if annotation.startswith("ClassVar"):
            if isinstance(statement.value, ast.Constant):
                constants[statement.target.id] = statement.value.value
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
        fields[statement.target.id] = Field(annotation, " ".join(text.split()))
    return Declaration(tuple(map(ast.unparse, node.bases)), fields, constants)


@cache
def _settings(folder: str) -> dict[str, frozenset[str]]:
    """The flags of each method or measure in a folder of the package, by its name."""
    modules = map(read_source, (PACKAGE / folder).rglob("*.py"))
    declarations = [declaration for module in modules for declaration in module.classes.values()]
    return {str(one.constants["name"]): _spellings(one) for one in declarations if "name" in one.constants}


def _flags(module: str, name: str) -> frozenset[str] | None:
    """The flags of a class with those of its bases; None if a base is not found by reading."""
    declarations = list(_with_bases(module, name))
    return None if None in declarations else frozenset().union(*(_spellings(one) for one in declarations if one))


def _with_bases(module: str, name: str) -> Iterator[Declaration | None]:
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    source = read_source(path) if path.is_file() else Module({}, {}, frozenset())
    if name in source.classes:
        yield source.classes[name]
        yield from _nested(module, source.classes[name])
        for base in source.classes[name].bases:
            yield from _with_bases(module, base)
    elif name in source.imports:
        yield from _with_bases(*source.imports[name])
    else:
        yield None


def _nested(module: str, declaration: Declaration) -> Iterator[Declaration | None]:
    """The fields of dataclasses that are fields, as flags: Annotated[SearchConfig, Nested({"seed": "search_seed"})]."""
    for field in declaration.fields.values():
        if not field.is_nested:
            continue
        kind, mark = ast.parse(field.annotation, mode="eval").body.slice.elts  # type: ignore[attr-defined]
        names = ast.literal_eval(mark.args[0]) if mark.args else {}
        without = next((ast.literal_eval(keyword.value) for keyword in mark.keywords if keyword.arg == "without"), ())
        for inner in _with_bases(module, ast.unparse(kind)):
            own = {} if inner is None else inner.fields
            fields = {names.get(name, name): field for name, field in own.items() if name not in without}
            yield None if inner is None else Declaration((), fields, {})


def _targets() -> set[str]:
    """The flags of all targets."""
    paths = [PACKAGE / "tuning" / "settings.py", *(PACKAGE / "metrics").rglob("*.py")]
    return {flag_spelling(name) for path in paths for name in read_source(path).bounds}


def _spellings(declaration: Declaration) -> frozenset[str]:
    pairs = [(name, field) for name, field in declaration.fields.items() if not field.is_nested]
    return frozenset(spelling for name, field in pairs for spelling in field.spellings(flag_spelling(name)))
