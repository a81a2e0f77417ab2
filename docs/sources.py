"""Where the figures of the pages come from: of each run in docs/results the script, machine, date and commit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent


class Source(NamedTuple):
    """A run whose figures some page prints."""

    number: int
    script: str
    file: str
    machine: str
    date: str
    commit: str
    page: str


def load(name: str) -> Any:
    return json.loads((FOLDER / f"results/{name}.json").read_text())


def timed(number: int, script: str, file: str, run: dict[str, Any], page: str = "this page") -> Source:
    """Of a run that has recorded its machine."""
    machine = run["environment"]
    return Source(
        number,
        script,
        file,
        f"{_cpu(machine)}, {machine['instruction_sets']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}",
        run["date"],
        run["commit"],
        page,
    )


def _cpu(machine: dict[str, Any]) -> str:
    return machine["cpu"].replace("(R)", "").removesuffix(" Processor")


SPEED, COMPARISON = load("speed"), load("comparison")
LIBRARIES, EMBEDDING = load("libraries-speed"), load("embedding")


def sources() -> list[Source]:
    """Every run, in the order of the tables."""
    numbers = itertools.count(1)
    superseded = "[notebook](research/speed.md)"  # the first run: later ones of the same cases have more rounds
    found = [timed(next(numbers), "benchmarks/speed.py", "speed", SPEED[0], superseded)]
    found += [timed(next(numbers), "benchmarks/speed.py", "speed", run) for run in SPEED[1:]]
    found.append(timed(next(numbers), "benchmarks/engines.py speed", "engines-speed", load("engines-speed")))
    commits = {run["commit"]: run for run in LIBRARIES}
    found += [timed(next(numbers), "benchmarks/libraries.py", "libraries-speed", run) for run in commits.values()]
    found.append(timed(next(numbers), "benchmarks/towers.py", "towers-speed", load("towers-speed")))
    compared, any_machine = "[comparison](comparison.md)", "-"
    for name, part in COMPARISON.items():
        script = "benchmarks/comparison.py" if name == "tuned" else f"gtp-vit compare ({name})"
        page = compared if name in ("published", "tuned") else "this page"
        found.append(Source(next(numbers), script, "comparison", any_machine, part["date"], part["commit"], page))
    files, encoders, dense = (
        "[exported files](reference/exported-files.md)",
        "[encoders](encoders.md)",
        "[dense features](dense.md)",
    )
    notebook, dense_notebook = "[notebook](research/gtp-plus.md)", "[notebook](research/dense.md)"
    found.append(timed(next(numbers), "benchmarks/engines.py damage", "engines-damage", load("engines-damage")))
    found.append(
        timed(next(numbers), "benchmarks/engines.py equality", "engines-equality", load("engines-equality"), files)
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
        found.append(Source(next(numbers), script, file, any_machine, date, commit, page))
    found += [
        timed(
            next(numbers),
            "benchmarks/embedding.py",
            "embedding",
            run,
            "[embedding files](reference/embedding-files.md)",
        )
        for run in EMBEDDING
    ]
    return found


ALL = sources()


def link_to(file: str, commit: str, place: int = 0) -> str:
    """Where a row comes from: a link to the file, named by the number of its run."""
    runs = [source for source in ALL if (source.file, source.commit) == (file, commit)]
    return f"[{runs[place].number}](results/{file}.json)"


def sources_table() -> str:
    rows = []
    for source in ALL:
        script = f"`{source.script}`" if source.script.startswith("gtp") else f"`python {source.script}`"
        rows.append(
            [
                str(source.number),
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
