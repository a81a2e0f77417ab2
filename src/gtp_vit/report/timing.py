"""timing: cost of each layer and measured times as tables, and in a sentence whether a method is faster here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.profiling.benchmark import Timing
from gtp_vit.profiling.macs import LayerCosts
from gtp_vit.report.results import Table


@dataclass(frozen=True)
class BatchTiming:
    """The times of the unreduced model, of the reduced one, and perhaps of others, at one batch size."""

    batch_size: int
    with_loading: bool
    timings: list[Timing]
    engine: str = "torch"
    over_torch: dict[str, float] | None = None  # speed-up of each over eager torch in float32, unreduced; in an engine


def cost_table(costs: LayerCosts) -> Table:
    """The tokens that go into each layer, and what it costs before and after."""
    before, after = costs.unreduced, costs.reduced

    def row(name: str, count: str, old: int, new: int) -> list[str]:
        share = f"{new / old:.0%}" if old else "-"
        return [name, count, f"{old / 1e6:.1f}", f"{new / 1e6:.1f}", share]

    rows = [row("embedding", str(costs.patches + costs.prefix), before.embed, after.embed)]
    for layer, count in enumerate(costs.tokens):
        rows.append(row(f"layer {layer}", f"{count:g}", before.layers[layer], after.layers[layer]))
    rows += [row(part, "", getattr(before, part), getattr(after, part)) for part in ("head", "overhead", "total")]
    return ["part", "tokens in", "MMACs unreduced", "MMACs reduced", "fraction"], rows


def timing_table(timed: Sequence[BatchTiming]) -> Table:
    """A row for each model at each batch size."""
    rows = []
    for entry in timed:
        for timing in entry.timings:
            (low, high), (slow, fast) = timing.quartiles, timing.speedup_quartiles
            what = "with loading" if entry.with_loading else "model"
            times = [f"{timing.milliseconds:.1f}", f"{low:.1f} .. {high:.1f}"]
            rate = f"{1000 * entry.batch_size / timing.milliseconds:.1f}"
            speed = [f"{timing.speedup:.2f}", f"{slow:.2f} .. {fast:.2f}"]
            absolute = [] if entry.over_torch is None else [f"{entry.over_torch[timing.name]:.2f}"]
            rows.append([str(entry.batch_size), what, timing.name, *times, rate, *speed, *absolute])
    columns = ["batch", "what", "model", "ms", "middle half", "img/s", "speed-up", "middle half"]
    return [*columns, *(["over eager torch"] if timed[0].over_torch is not None else [])], rows


def verdict(entry: BatchTiming, costs: LayerCosts, kernels: str, device: str = "cpu") -> str:
    """The meaning of the figures in one sentence, and why there is no gain where there is none.

    `kernels` says which kernels ran, as `kernels` of a patched model does; `device` is the type of the device.
    """
    timing = entry.timings[1]
    where = f"batch {entry.batch_size}{', with loading' if entry.with_loading else ''}"
    if timing.faster:
        absolute = (
            "" if entry.over_torch is None else f", {entry.over_torch[timing.name]:.2f} times as fast as eager torch"
        )
        return f"{where}: {timing.name} is {timing.speedup:.2f} times as fast as the unreduced model here{absolute}."
    reason = _why_no_gain(entry, costs, kernels, device)
    if timing.faster is None:
        return f"{where}: no clear difference ({timing.speedup:.2f}), because {reason}."
    return f"{where}: no gain here, {timing.name} is slower ({timing.speedup:.2f}), because {reason}."


def _why_no_gain(entry: BatchTiming, costs: LayerCosts, kernels: str, device: str) -> str:
    """The most likely reason."""
    saved = 1 - costs.reduced.total / costs.unreduced.total
    if saved < 0.1:
        return f"only {saved:.0%} of the MACs are saved; remove more tokens"
    if entry.with_loading:
        return "reading and preprocessing the images takes most of the time"
    sliced = next((timing.speedup for timing in entry.timings if timing.name == "slicing"), None)
    if sliced is not None and sliced < 1.05:
        return f"even slicing, which costs nothing, gains nothing ({sliced:.2f}): the time goes elsewhere"
    if entry.engine != "torch":
        return "its own work costs what it saves; let fewer layers reduce (--method deploy), or remove more tokens"
    if device != "cpu":  # native kernels are for CPUs, and could not help
        return (
            f"its own small operators take their time on {device} ({kernels}); try a larger batch, "
            "--compile, or fewer layers that reduce (--method deploy)"
        )
    if not kernels.startswith("native"):
        return f"the native kernels did not run ({kernels})"
    if costs.patches < 128:
        return f"with {costs.patches} patches work other than matrix products takes most of the time"
    return "the noise of this machine is larger than the gain; use more rounds, or a quiet machine"
