"""Writes docs/measured.md, and the table of README.md, from docs/results: python docs/make_measured.py"""
# ruff: noqa: E501  (the texts of the page have long lines)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PAGE = """\
# Speed and damage

For readers who want to know what the figures in these pages mean and how far to trust them. There is one table for speed, one for damage, and one
that says which script and which file each row comes from. The tables are written by `python docs/make_measured.py` from `docs/results`.

| term | meaning |
|---|---|
| MACs | multiply-accumulate operations of one image's forward pass, counted from the operators that run; a method's own work is included |
| speed-up | time of the unreduced model divided by the time of the reduced one |
| slicing | the same model with the same number of tokens per layer, where choosing them costs nothing: it keeps the first tokens of each layer and drops the last |
| time / slicing | how much longer a method takes than slicing with the method's own schedule: the price of the method's own work |
| KL | KL divergence of the class probabilities from the unreduced model's, mean over images |
| agreement | share of images for which the first class is that of the unreduced model |
| P | tokens that GTP removes per layer; other methods are set to the same number of MACs, or to the same number of tokens where the table says so |

## Speed

Every model has random weights and runs on two threads of a CPU in float32. All candidates of a row take turns, round by round, so another process slows all of
them alike. A figure is the median over the rounds; brackets are the middle half of the rounds. Where a case was timed several times, this is the run
with the most rounds; [the notebook](research/speed.md) has all of them.

{speed}

*Machine, date and commit of each source: [below](#sources). Rows of one source were measured together; rows of different sources were not.*

## Damage

Two ImageNet classifiers, 2,000 validation images that took part in no search and no calibration, read without EXIF orientation, no finetuning. All methods
have the shortened last block.

{damage}

*"Calibrated" is after `gtp_vit.calibrate`; "recipe" is what the package has for these two models. Date and commit of each source: [below](#sources). Paired differences, more
methods and more costs: [all methods at equal cost](comparison.md).*

- The standard error of a top-1 figure is about one point. Agreement and KL are paired with the unreduced model and much sharper.
- GTP is the paper's operator with θ = 1 and α = 0.2, which suits these models better than its θ = 0.6. These are Ti models: they neither confirm nor refute
  the accuracies that the paper prints for DeiT-S and larger models.

## Sources

The commit is the one that recorded the result. Damage does not depend on the machine beyond rounding, so most of its sources name none. Files have what pages print; the
settings of each row and figures that no page prints are in the files of that commit.

{sources}

*Sources with a machine: {versions}.*
"""
DEIT, VIT = "deit_tiny_patch16_224", "vit_tiny_patch16_224"
TITLES = {DEIT: "DeiT-Ti", "deit_small_patch16_224": "DeiT-S"}
METHODS = {
    "gtp": "GTP",
    "tome": "ToMe",
    "gtp_plus": "GTP+",
    "mctf": "MCTF",
    "pitome": "PiToMe",
    "tofu": "ToFu",
    "atc": "ATC",
}


class Source(NamedTuple):
    """A run whose figures some page prints."""

    letter: str
    script: str
    file: str
    machine: str
    date: str
    commit: str
    page: str


def load(name: str) -> Any:
    return json.loads((FOLDER / f"results/{name}.json").read_text())


def timed(letter: str, script: str, file: str, run: dict[str, Any], page: str = "this page") -> Source:
    """Of a run that has recorded its machine."""
    machine = run["environment"]
    return Source(
        letter, script, file, f"{_cpu(machine)}, {machine['instruction_sets']}", run["date"], run["commit"], page
    )


def _cpu(machine: dict[str, Any]) -> str:
    return machine["cpu"].replace("(R)", "").removesuffix(" Processor")


SPEED, COMPARISON = load("speed"), load("comparison")
LIBRARIES, EMBEDDING = load("libraries-speed"), load("embedding")


def sources() -> list[Source]:
    """Every run, in the order of the tables."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    found = [timed(next(letters), "benchmarks/speed.py", "speed", run) for run in SPEED]
    found.append(timed(next(letters), "benchmarks/engines.py speed", "engines-speed", load("engines-speed")))
    commits = {run["commit"]: run for run in LIBRARIES}
    found += [timed(next(letters), "benchmarks/libraries.py", "libraries-speed", run) for run in commits.values()]
    found.append(timed(next(letters), "benchmarks/towers.py", "towers-speed", load("towers-speed")))
    compared, any_machine = "[comparison](comparison.md)", "-"
    for name, part in COMPARISON.items():
        script = "benchmarks/comparison.py" if name == "tuned" else f"gtp-vit compare ({name})"
        page = compared if name in ("published", "tuned") else "this page"
        found.append(Source(next(letters), script, "comparison", any_machine, part["date"], part["commit"], page))
    files, encoders, dense = (
        "[exported files](reference/exported-files.md)",
        "[encoders](encoders.md)",
        "[dense features](dense.md)",
    )
    notebook, dense_notebook = "[notebook](research/gtp-plus.md)", "[notebook](research/dense.md)"
    found.append(timed(next(letters), "benchmarks/engines.py damage", "engines-damage", load("engines-damage")))
    found.append(
        timed(next(letters), "benchmarks/engines.py equality", "engines-equality", load("engines-equality"), files)
    )
    for script, file, date, commit, page in (
        ("benchmarks/encoders.py", "encoders", "2026-11-18", "12f1fc2", encoders),
        ("benchmarks/dense.py heat-maps", "dense-heat-maps", "2026-11-18", "a5b702a", dense),
        ("benchmarks/dense.py candidates", "dense-candidates", "2026-11-18", "ecdb9af", dense_notebook),
        ("benchmarks/dense.py late", "dense-late", "2026-11-18", "e97808b", dense_notebook),
        ("benchmarks/calibration.py", "calibration", "2026-11-18", "5c15bc0", notebook),
        ("benchmarks/variants.py", "variants", "2026-11-18", "5c15bc0", notebook),
        ("benchmarks/tuning.py schedules", "schedules", "2026-11-16", "f50881a", notebook),
    ):
        found.append(Source(next(letters), script, file, any_machine, date, commit, page))
    found += [
        timed(
            next(letters),
            "benchmarks/embedding.py",
            "embedding",
            run,
            "[embedding files](reference/embedding-files.md)",
        )
        for run in EMBEDDING
    ]
    return found


ALL = sources()


def letter_of(file: str, commit: str, place: int = 0) -> str:
    """Where a row comes from: a link to the file, named by the letter of its run."""
    runs = [source for source in ALL if (source.file, source.commit) == (file, commit)]
    return f"[{runs[place].letter}](results/{file}.json)"


class Case(NamedTuple):
    """A row of the table of speed."""

    model: str
    runs_in: str
    batch: int
    method: str
    speedup: float
    over_slicing: float
    quartiles: list[float]
    source: str

    def cells(self) -> list[str]:
        low, high = self.quartiles
        over = f"{self.over_slicing:.2f} [{low:.2f}, {high:.2f}]"
        return [self.model, self.runs_in, str(self.batch), self.method, f"{self.speedup:.2f}", over, self.source]


def methods_timed() -> Iterator[Case]:
    """Of each method and case the run with the most rounds, the later one of two."""
    best: dict[tuple[str, str], tuple[int, int, dict[str, Any]]] = {}
    for place, run in enumerate(SPEED):
        for row in run["rows"]:
            name = row["candidate"]
            if name == "full" or "oracle" in name:
                continue
            key = (row["case"], _titled(name, row["case"]))
            if key not in best or run["options"]["rounds"] >= best[key][0]:
                best[key] = (run["options"]["rounds"], place, row)
    for (case, method), (_, place, row) in sorted(best.items(), key=lambda item: _order(*item[0])):
        model, batch, _ = case.split(":")
        earlier = sum(run["commit"] == SPEED[place]["commit"] for run in SPEED[:place])
        source = letter_of("speed", SPEED[place]["commit"], earlier)
        yield Case(
            TITLES[model],
            "torch",
            int(batch),
            method,
            row["speedup"],
            row["over_oracle"],
            row["over_oracle_quartiles"],
            source,
        )


def _titled(candidate: str, case: str) -> str:
    """GTP+, P = 8."""
    name, *settings = candidate.split(":")
    number = case.split(":")[2]
    if name.startswith("gtp native"):
        return f"GTP, P = {number}"
    text = METHODS[name]
    if "calibration" in candidate:
        text += ", calibrated"
    text += f", P = {number}" if name == "gtp_plus" else ""
    return (
        text
        + (f", r = {number}" if any(setting.startswith("r=") for setting in settings) else "")
        + ("" if settings else ", defaults")
    )


def _order(case: str, method: str) -> tuple[str, int, bool, int]:
    model, _, number = case.split(":")
    name = next(place for place, title in enumerate(METHODS.values()) if method.split(",")[0] == title)
    return (model.replace("deit_small", "a"), -int(number), "defaults" in method, 10 * name + ("calibrated" in method))


def engines_timed() -> Iterator[Case]:
    run = load("engines-speed")
    titles = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
    for row in run["rows"]:
        over = [1 / row["of_slicing"], [1 / each for each in reversed(row["of_slicing_quartiles"])]]
        runs_in = f"{titles[row['engine']]}, {row['precision']}"
        yield Case(
            "DeiT-S",
            runs_in,
            row["batch"],
            "GTP+, `deploy`",
            row["speedup"],
            *over,
            letter_of("engines-speed", run["commit"]),
        )


def libraries_timed() -> Iterator[Case]:
    best: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {}
    for run in LIBRARIES:
        for row in run["rows"]:
            rounds = int(run["options"]["rounds"])
            if row["model"] not in best or rounds >= best[row["model"]][0]:
                best[row["model"]] = (rounds, run, row)
    for model, (_, run, row) in best.items():
        over = (row["over_slicing"], row["over_slicing_quartiles"])
        yield Case(
            model,
            "torch",
            int(run["options"]["batch"]),
            "GTP+, P = 8",
            row["speedup"],
            *over,
            letter_of("libraries-speed", run["commit"]),
        )


def towers_timed() -> Iterator[Case]:
    run = load("towers-speed")
    for row in run["rows"]:
        over = (row["over_slicing"], row["over_slicing_quartiles"])
        yield Case(
            row["tower"],
            "torch",
            row["batch"],
            "GTP+, 65 %, restored",
            row["speedup"],
            *over,
            letter_of("towers-speed", run["commit"]),
        )


def speed() -> str:
    columns = ["model", "runs in", "batch", "method", "speed-up", "time / slicing", "source"]
    cases = [*methods_timed(), *engines_timed(), *libraries_timed(), *towers_timed()]
    return table(columns, [case.cells() for case in cases])


def damage() -> str:
    """The same rows of both models side by side."""
    columns = [
        "method",
        "MACs",
        *(f"{model}: {figure}" for model in ("DeiT-Ti", "ViT-Ti") for figure in ("top-1", "agreement", "KL")),
        "source",
    ]
    paired, calibrated = COMPARISON["paired"], COMPARISON["calibrated"]
    rows = [["unreduced", "100 %", *_both(paired, 0), letter_of("comparison", paired["commit"], _place("paired"))]]
    names = ("gtp", "tome", "gtp_plus")
    for place in range(1, 7):  # P = 8, then P = 14
        assert paired["rows"][DEIT][place]["method"] == names[(place - 1) % 3]
        label = f"{METHODS[names[(place - 1) % 3]]}, P = {8 if place < 4 else 14}"
        label = f"**{label}**" if "+" in label else label
        rows.append(
            [
                label,
                _share(paired, place),
                *_both(paired, place),
                letter_of("comparison", paired["commit"], _place("paired")),
            ]
        )
    for place, row in enumerate(calibrated["rows"][DEIT][3:], 3):
        what = row["method"].removeprefix("gtp_plus, ")
        label = f"GTP+ calibrated, P = {8 if place == 3 else 14}" if what == "calibrated" else f"GTP+, {what}"
        rows.append(
            [label, _share(calibrated, place), *_both(calibrated, place), letter_of("comparison", calibrated["commit"])]
        )
    return table(columns, [*rows, *_in_engines()])


def _in_engines() -> Iterator[list[str]]:
    """Rows of the recipe `deploy`, in torch and in 8 bits, and of 8 bits alone."""
    run = load("engines-damage")
    by_engine = {(row["model"], row["engine"]): row for row in run["rows"]}
    cases = [("GTP+, recipe deploy", "openvino", "deploy", "kl_deploy")]
    for engine, title in (("openvino", "OpenVINO int8"), ("onnxruntime", "ONNX Runtime int8")):
        cases += [(f"{title}, unreduced", engine, f"{engine} int8", "kl_int8")]
        cases += [(f"{title}, GTP+, recipe deploy", engine, f"{engine} int8 + deploy", "kl_int8_deploy")]
    for label, engine, key, kl in cases:
        cells = []
        for model in (DEIT, VIT):
            row = by_engine[model, engine]
            cells += [f"{row['top1'][key]:.1f}", f"{row['agreement'][key]:.1f}", f"{row[kl]:.4f}"]
        share = "100 %" if kl == "kl_int8" else f"{100 * by_engine[DEIT, engine]['share_of_macs']['deploy']:.0f} %"
        yield [label, share, *cells, letter_of("engines-damage", run["commit"])]


def headline(readme: str) -> str:
    """The README with its table: what GTP, ToMe and GTP+ do at 55 % of the MACs."""
    columns = [
        "55 % of the MACs",
        "speed-up",
        *(f"{model}: {figure}" for model in ("DeiT-Ti", "ViT-Ti") for figure in ("agreement", "KL")),
    ]
    speedups = {case.method: f"{case.speedup:.2f}" for case in methods_timed() if case.model == "DeiT-S"}
    parts = (
        ("GTP as published", "GTP, P = 14", "paired", 4),
        ("ToMe", "ToMe, r = 14", "paired", 5),
        ("**GTP+**", "GTP+, P = 14", "paired", 6),
        ("**GTP+**, calibrated", "GTP+, calibrated, P = 14", "calibrated", 4),
    )
    rows = []
    for title, method, part, place in parts:
        assert _share(COMPARISON[part], place) == "55 %"
        cells = _both(COMPARISON[part], place)
        rows.append([title, speedups[method], *cells[1:3], *cells[4:]])
    before, rest = readme.split("<!-- headline -->")
    return f"{before}<!-- headline -->\n{table(columns, rows)}\n\n<!-- end -->{rest.split('<!-- end -->')[1]}"


def _place(part: str) -> int:
    """Which of the runs with one commit it is."""
    before = list(COMPARISON)[: list(COMPARISON).index(part)]
    return sum(COMPARISON[name]["commit"] == COMPARISON[part]["commit"] for name in before)


def _share(part: dict[str, Any], place: int) -> str:
    shares = {f"{100 * rows[place]['gmacs'] / rows[0]['gmacs']:.0f} %" for rows in part["rows"].values()}
    return " / ".join(sorted(shares))


def _both(part: dict[str, Any], place: int) -> list[str]:
    cells = []
    for model in (DEIT, VIT):
        row = part["rows"][model][place]
        cells += [
            f"{row['top1']:.1f}",
            *(("-", "-") if place == 0 else (f"{row['agreement']:.1f}", f"{row['kl']:.4f}")),
        ]
    return cells


def sources_table() -> str:
    rows = []
    for source in ALL:
        script = f"`{source.script}`" if source.script.startswith("gtp") else f"`python {source.script}`"
        rows.append(
            [
                source.letter,
                script,
                f"[{source.file}.json](results/{source.file}.json)",
                source.machine,
                source.date,
                source.commit,
                source.page,
            ]
        )
    return table(["", "script", "file", "machine", "date", "commit", "printed on"], rows)


def versions() -> str:
    """Refuses to be written if a run had other versions than the rest."""
    runs = [
        *SPEED,
        *LIBRARIES,
        *EMBEDDING,
        *map(load, ("engines-speed", "engines-damage", "engines-equality", "towers-speed")),
    ]
    (machine,) = {
        (run["environment"]["torch"].split("+")[0], run["environment"]["timm"], run["environment"]["python"])
        for run in runs
    }
    return "torch {}, timm {}, Python {}".format(*machine)


def table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def pages() -> dict[str, str]:
    return {"measured.md": PAGE.format(speed=speed(), damage=damage(), sources=sources_table(), versions=versions())}


if __name__ == "__main__":
    README = FOLDER.parent / "README.md"
    README.write_text(headline(README.read_text()))
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
