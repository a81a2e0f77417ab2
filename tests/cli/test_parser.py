"""The parser: fields of dataclasses as flags, their help, and a command as one file and one line."""

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from gtp_vit.cli import sources
from gtp_vit.cli.app import COMMANDS, ExitCode, main
from gtp_vit.cli.flags import parse_flags, parse_with_method
from gtp_vit.cli.help import help_text
from gtp_vit.cli.measure_flags import with_flags
from gtp_vit.cli.parser import Choices, Nested, Positional, Short, flags_of, parse_arguments
from gtp_vit.cli.target_flags import target_flags
from gtp_vit.core.ranges import Range, check_ranges
from gtp_vit.errors import GTPError
from gtp_vit.methods import METHODS
from gtp_vit.metrics.base import Bound
from gtp_vit.metrics.registry import MEASURES
from gtp_vit.metrics.regression import Regression
from gtp_vit.tuning.settings import Target


@dataclass(frozen=True)
class Everything:
    """Values of every type."""

    model: Positional[str] = "vit"
    """The model."""
    count: int = 1
    share: Annotated[float | None, Range(0, 1, exclude_low=True, why="(of the work)")] = None
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
    assert main(["tune", "--help"]) == ExitCode.OK
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
    visualise = importlib.import_module("gtp_vit.cli.commands.visualise").Visualise
    words = ["x.jpg", "--method", "ats", "--layers", "2", "--ats-layers", "3", "4"]
    sources.check_flag_names("visualise", words)
    flags, chosen = parse_with_method(visualise, words)
    assert (flags.layers, chosen.settings.layers, chosen.given_settings) == ((2,), (3, 4), {"layers"})


@dataclass(frozen=True)
class Inner:
    """Settings of a library."""

    seed: int = 0
    """Seed."""
    times: Annotated[int, Range(1, 9)] = 3
    """How often."""
    hidden: int = 7

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Outer:
    """A command whose field is a dataclass."""

    seed: int = 1
    inner: Annotated[Inner, Nested({"seed": "inner_seed"}, without=("hidden",))] = Inner(times=5)


def test_the_fields_of_a_nested_dataclass_are_flags():
    assert [flag.spelling for flag in flags_of(Outer)] == ["--seed", "--inner-seed", "--times"]
    assert [(flag.default, flag.help) for flag in flags_of(Outer)][2] == (5, "How often.")
    assert parse_flags(Outer, []) == Outer()
    assert parse_flags(Outer, ["--inner-seed", "4"]) == Outer(1, Inner(4, 5, 7))
    assert parse_flags(Outer, ["--seed", "2", "--times", "9", "--inner-seed", "3"]) == Outer(2, Inner(3, 9, 7))
    with pytest.raises(GTPError, match=r"--times is 10; it must be an integer in \[1, 9\]"):
        parse_flags(Outer, ["--times", "10"])
    with pytest.raises(GTPError, match="times is 10"):
        Inner(times=10)


def test_nested_flags_and_targets_are_known_before_torch_is_imported():
    """The flags that are read from the source code are those that the parser has."""
    tune = importlib.import_module("gtp_vit.cli.commands.tune").Tune
    spellings = {spelling for flag in flags_of(with_flags(tune, target_flags())) for spelling in flag.spellings()}
    assert {"--search-passes", "--max-layers", "--timing-batch", "--no-calibrate", "--macs", "--max-kl"} <= spellings
    sources.check_flag_names("tune", sorted(spellings))
    for wrong, near in (
        ("--search-pases", "--search-passes"),
        ("--max-k", "--max-kl"),
        ("--passes", "--search-passes"),
    ):
        with pytest.raises(GTPError, match=near):
            sources.check_flag_names("tune", [wrong, "1"])
    with pytest.raises(GTPError, match="unknown flag"):
        sources.check_flag_names("evaluate", ["--max-kl", "1"])


def test_the_bounds_of_a_registered_measure_are_targets(monkeypatch):
    class Toy(Regression):
        name = "toy"
        bounds = (Bound("max_toy", "at most this toy", high=3), Bound("max_error", "at most this error of toys"))

    monkeypatch.setitem(MEASURES, "toy", Toy)
    flags = {flag.spelling: flag for flag in flags_of(with_flags(Outer, target_flags()))}
    assert flags["--max-toy"].help == "Target: the cheapest schedule with at most this toy."
    assert "at most this relative error (regression), or" in flags["--max-error"].help
    assert "at most this error of toys (toy)" in flags["--max-error"].help
    assert Target("max_toy", 2.5).value == 2.5
    with pytest.raises(GTPError, match=r"max_toy is 4; it must be a number in \(0, 3\]"):
        Target("max_toy", 4)


def test_what_was_not_written_is_not_given():
    flags = flags_of(Everything)
    assert {flag.field for flag in parse_arguments(["--count", "3"], flags)} == {"count"}
