"""The rows of the table of speed in measured.md: of every case that was timed, the run with the most rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sources import LIBRARIES, SPEED, link_to, load

TITLES = {"deit_small_patch16_224": "DeiT-S"}
METHODS = {
    "gtp": "GTP",
    "tome": "ToMe",
    "gtp_plus": "GTP+",
    "mctf": "MCTF",
    "pitome": "PiToMe",
    "tofu": "ToFu",
    "atc": "ATC",
}


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
        middle = "{:.2f}&nbsp;to&nbsp;{:.2f}".format(*self.quartiles)
        method = self.method.replace(" = ", "&nbsp;=&nbsp;")
        figures = [f"{self.speedup:.2f}", f"{self.over_slicing:.2f}", middle]
        return [self.model, self.runs_in, str(self.batch), method, *figures, self.source]


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
        source = link_to("speed", SPEED[place]["commit"], earlier)
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
    name = next(place for place, title in enumerate(METHODS.values()) if method.split(",", maxsplit=1)[0] == title)
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
            link_to("engines-speed", run["commit"]),
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
            link_to("libraries-speed", run["commit"]),
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
            link_to("towers-speed", run["commit"]),
        )
