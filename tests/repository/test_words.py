"""Words that readers stumbled over do not come back; public names have docstrings with examples, which doctest runs."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import gtp_vit

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))
# Participles that named values: what a search found, what a caller wanted. A value is called by what it is.
PARTICIPLES = {"found", "wanted", "seen"}
PER_UNIT = re.compile(
    r"\b(?:one|a) number a (?:layer|token|image)\b|\b(?:pass|GMACs|MACs|tokens|files?) an? (?:layer|image)\b"
)
PHRASES = {
    "preparation of the image": "preprocessing",
    "says not how": "does not say how",
    "The model was left as it is": "The model was not changed",
    " is no recipe:": "is not a recipe",
    "whole number in": "an integer in",
    "leave it out": "remove it",
    "has no place in this command": "unexpected argument",
    "behind the colon": "after the colon",
}


def trees():
    return ((path.relative_to(ROOT), ast.parse(path.read_text())) for path in FILES)


def bound_names(tree):
    """Each name that is bound in a file, by assignment, as a loop variable or as an argument, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            yield getattr(node, "name", "the module"), ast.get_docstring(node)


def strings(tree):
    """Every string constant of a file, parts of formatted ones included, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def test_no_value_is_called_by_a_participle_and_no_loop_variable_each():
    wrong = [
        f"{path}:{line}: {name}; say what it is"
        for path, tree in trees()
        for name, line in bound_names(tree)
        if name in PARTICIPLES | {"each"}
    ]
    assert wrong == []


def test_docstrings_begin_with_a_noun_or_a_verb():
    wrong = [
        f"{path}: {name}: {text.splitlines()[0]}"
        for path, tree in trees()
        for name, text in docstrings(tree)
        if re.match(r"(?:What|Which|How|Of)\b", text)
    ]
    assert wrong == []


def test_texts_use_the_words_of_the_field():
    wrong = [
        f"{path}:{line}: {phrase!r}; write {better!r}"
        for path, tree in trees()
        for text, line in strings(tree)
        for phrase, better in [*PHRASES.items(), *((match, "... per ...") for match in PER_UNIT.findall(text))]
        if phrase in text
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["one number a layer", "one backward pass an image", "4.6 GMACs an image", "8 tokens a layer"]
)
def test_a_unit_without_per_is_noticed(text):
    assert PER_UNIT.search(text)
    assert not PER_UNIT.search(re.sub(r" an? (layer|image)", r" per \1", text))


PUBLIC = [name for name in gtp_vit.__all__ if name != "METHODS"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_it_is_and_shows_an_example(name):
    public = getattr(gtp_vit, name)
    text = inspect.getdoc(public)
    assert text.splitlines()[0].endswith("."), name
    if not (inspect.isclass(public) and issubclass(public, Exception)):
        assert ">>> " in text, name


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(getattr(gtp_vit, name))])
def test_a_public_function_documents_its_arguments_its_result_and_its_errors(name):
    function = getattr(gtp_vit, name)
    text = inspect.getdoc(function)
    parameters = {
        ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
        for parameter in inspect.signature(function).parameters.values()
    }
    arguments = re.search(r"^Args:\n((?:(?: .*)?\n)+)", text, re.M)[1]
    assert set(re.findall(r"^ {4}([*\w]+): ", arguments, re.M)) == parameters
    if name != "save_checkpoint":
        assert re.search(r"^(?:Returns|Yields):\n", text, re.M)
    if name not in {"unpatch", "is_patched"}:
        assert re.search(r"^Raises:\n", text, re.M)
