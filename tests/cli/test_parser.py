"""The parser: fields of dataclasses as flags, their help, and a command as one file and one line."""

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from gtp_vit.cli import sources
from gtp_vit.cli.app import COMMANDS, Exit, main
from gtp_vit.cli.flags import parse_flags, parse_with_method
from gtp_vit.cli.help import help_text
from gtp_vit.cli.parser import Choices, Positional, Short, flags_of, read_words
from gtp_vit.core.ranges import Range
from gtp_vit.errors import GTPError
from gtp_vit.methods import METHODS


@dataclass(frozen=True)
class Everything:
    """Values of every type."""

    model: Positional[str] = "vit"
    """The model."""
    count: int = 1
    share: Annotated[float | None, Range(0, 1, above_low=True, why="(of the work)")] = None
    path: Path | None = None
    batch: Annotated[tuple[int, ...], Short("-b"), Range(1, 99)] = (8,)
    scale: tuple[float, float] = (0.1, 1.0)
    kind: Literal["a", "b"] = "a"
    engine: Annotated[str, Choices({"torch": 1, "onnx": 2})] = "torch"
    schedule: int | tuple[int, ...] | str = 8
    learn: bool = True
    made: str = dataclasses.field(default="", metadata={"help": "Made from a registry."})


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("", "model", "vit"),
        ("deit", "model", "deit"),
        ("--model deit", "model", "deit"),
        ("--count=-3", "count", -3),
        ("--count -3", "count", -3),
        ("--share 1e-3", "share", 0.001),
        ("--share None", "share", None),
        ("--path a/b", "path", Path("a/b")),
        ("-b 1 2", "batch", (1, 2)),
        ("--batch 1 2 --learn", "batch", (1, 2)),
        ("--scale 0 1", "scale", (0.0, 1.0)),
        ("--kind b", "kind", "b"),
        ("--engine onnx", "engine", "onnx"),
        ("--schedule 3", "schedule", 3),
        ("--schedule 3 4", "schedule", (3, 4)),
        ("--schedule linear:2:4", "schedule", "linear:2:4"),
        ("--no-learn", "learn", False),
    ],
)
def test_values_are_read_by_the_type_of_their_field(words, field, value):
    assert getattr(parse_flags(Everything, words.split()), field) == value


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--count a", ["--count is 'a'", "an integer"]),
        ("deit --count 1 2", ["unexpected argument '2'"]),
        ("--count", ["--count needs a value"]),
        ("--share inf", ["--share is 'inf'", "finite"]),
        ("--share 0", ["--share is 0", "(0, 1]", "(of the work)"]),
        ("-b 8 100", ["--batch is 100", "[1, 99]"]),
        ("--path=", ["--path is empty"]),
        ("-b 1 x", ["-b is 'x'", "integers"]),
        ("--scale 1", ["--scale is '1'", "2 numbers"]),
        ("--kind c", ["unknown --kind 'c'", "a, b"]),
        ("--engine onx", ["did you mean 'onnx'"]),
        ("--learn --no-learn", ["twice"]),
        ("--learn=yes", ["--learn takes no value", "--no-learn"]),
        ("--kount 3", ["unknown flag '--kount'", "'--count'"]),
        ("deit vit", ["unexpected argument 'vit'", "MODEL"]),
    ],
)
def test_each_mistake_is_one_line(words, parts):
    with pytest.raises(GTPError) as caught:
        parse_flags(Everything, words.split())
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def test_help_says_what_stands_for_a_value_its_default_and_its_text():
    text = help_text(Everything, flags_of(Everything))
    for part in (
        "[MODEL]",
        "-b, --batch INT ...",
        "--path PATH",
        "--share NUMBER",
        "--kind {a,b}",
        "--engine {torch,onnx}",
        "--schedule SCHEDULE",
        "--[no-]learn",
        "Made from a registry.",
        "(default: 8)",
        "The model. (default: vit)",
    ):
        assert part in text


def test_the_flags_of_the_examples_come_first(capsys):
    assert main(["tune", "--help"]) == Exit.OK
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.endswith(":") and line[:1].strip()]
    assert headings[:3] == ["examples:", "arguments:", "most used:"]
    first = text.partition("most used:")[2].partition("\n\n")[0]
    assert all(flag in first for flag in ("--macs", "--pretrained", "--data-dir", "--output", "--method"))
    assert "--search-seed" not in first


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help_text_and_one_meaning(command):
    kind = vars(importlib.import_module(f"gtp_vit.cli.commands.{command}"))[command.capitalize()]
    own = flags_of(kind)
    assert not [flag.spelling for flag in own if not flag.help]
    if any(flag.field == "method" for flag in own):
        for method in METHODS.values():
            taken = [spelling for flag in own for spelling in flag.spellings()]
            flags = [*own, *flags_of(method, taken=taken, prefix=method.name)]
            every = [spelling for flag in flags for spelling in flag.spellings()]
            assert len(every) == len(set(every)), method.name


def test_a_setting_that_is_called_like_a_flag_of_the_command_has_its_method_in_front():
    evaluate = importlib.import_module("gtp_vit.cli.commands.evaluate").Evaluate
    words = ["--method", "tofu", "--split", "val", "--tofu-split", "3"]
    sources.check_spelling("evaluate", words)
    flags, chosen = parse_with_method(evaluate, words)
    assert (flags.split, chosen.settings.split, chosen.given) == ("val", 3, {"split"})


def test_what_was_not_written_is_not_given():
    flags = flags_of(Everything)
    assert {flag.field for flag in read_words(["--count", "3"], flags)} == {"count"}
