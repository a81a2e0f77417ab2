"""Schedules: the number of tokens that leave in each layer, as one number, one per layer, or a named schedule.

A schedule is an int (the same in every layer), a sequence with one int a layer, or a string NAME:NUMBER:...

    8                      8 tokens in every layer (the paper's P)
    (4, 4, 4, 8, 8, 8)     as listed
    "linear:2:14"          from 2 in the first layer to 14 in the last, in equal steps
    "early:8"              8 a layer on average, 16 in the first layer, falling to 0
    "late:8"               8 a layer on average, rising from 0 to 16
    "keep:0.7:3:6:9"       layers 3, 6 and 9 (counted from 0) keep 70 % of the image tokens they have
    "peak:8"             8 a layer on average, none in the first layer, most a third of the way through
    "default:8"           8 a layer on average, in the shape that searches on real models had in common
    "calibrated:8"            the same of searches for GTP+ with a calibration
    "inflection:8:-1"      ToMe's (r, inflection): 8 a layer on average, here falling from 16 to 0
    "after:1:16"            MCTF's: 16 in layer 1 and in each after it
    "ratio:0.95"           PiToMe's: every layer keeps 95 % of the image tokens it has; "ratio:0.95:1" of one token more
    "geometric:0.7:3:6:9"     ATC's: 0.7, 0.7^2 and 0.7^3 of all image tokens are left after layers 3, 6 and 9
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from gtp_vit.errors import ScheduleError, check_name, short_repr

Schedule = int | tuple[int, ...] | str
MAX_NUMBER = 10**6  # largest number in a named schedule
KEEP_RATIO_STEPS = 512  # resolution of a share of tokens


def linear(depth: int, tokens: int, first: float, last: float) -> list[int]:
    """A schedule from `first` to `last` in equal steps, rounded half up."""
    step = (last - first) / max(depth - 1, 1)
    return [int(first + step * layer + 0.5) for layer in range(depth)]


def constant(depth: int, tokens: int, number: float) -> list[int]:
    """The same number in every layer."""
    return linear(depth, tokens, number, number)


def early(depth: int, tokens: int, average: float) -> list[int]:
    """Most at the beginning: the cheapest for a given total, as all later layers see fewer tokens."""
    return linear(depth, tokens, 2 * average, 0)


def late(depth: int, tokens: int, average: float) -> list[int]:
    """Most at the end: the gentlest for a given total."""
    return linear(depth, tokens, 0, 2 * average)


def peak(depth: int, tokens: int, average: float) -> list[int]:
    """None at first, most a third of the way through, half the average at the end: the shape that searches find."""
    peak = max(depth // 3, 1)
    slope = [layer / peak if layer <= peak else 1 - 0.75 * (layer - peak) / (depth - peak) for layer in range(depth)]
    return _round_keeping_total(slope, average * depth)


# Searched for two 12-layer models on calibration images, without and with a calibration of GTP+.
DEFAULT_SHAPE = (0, 0, 21, 28, 28, 26, 18, 12, 10, 10, 4, 0)
CALIBRATED_SHAPE = (0, 0, 19, 28, 29, 23, 21, 18, 5, 6, 4, 0)


def default(depth: int, tokens: int, average: float) -> list[int]:
    """The shape that searches found: what GTP+ uses where nothing was searched."""
    return _round_keeping_total(resample(DEFAULT_SHAPE, depth), average * depth)


def calibrated(depth: int, tokens: int, average: float) -> list[int]:
    """The shape that searches with a calibration found: what calibrated GTP+ uses where nothing was searched."""
    return _round_keeping_total(resample(CALIBRATED_SHAPE, depth), average * depth)


def resample(shape: Sequence[float], depth: int) -> list[float]:
    """The shape of 12 layers, interpolated to the depth."""
    resampled = []
    for layer in range(depth):
        place = layer * (len(shape) - 1) / max(depth - 1, 1)
        left = min(int(place), len(shape) - 2)
        resampled.append(shape[left] + (place - left) * (shape[left + 1] - shape[left]))
    return resampled if sum(resampled) > 0 else [1.0] * depth


def _round_keeping_total(shape: list[float], total: float) -> list[int]:
    """Whole numbers in these proportions; rounding the running sum keeps the total."""
    scale = total / max(sum(shape), 1e-9)
    sums = [round(scale * sum(shape[: layer + 1])) for layer in range(len(shape))]
    sums[-1] = round(total)
    return [now - before for now, before in zip(sums, [0, *sums], strict=False)]


def inflection(depth: int, tokens: int, average: float, bend: float) -> list[int]:
    """ToMe's schedule: from average (1 - bend) to average (1 + bend) in equal steps, rounded down."""
    first = int(average * (1 - bend))
    step = (2 * average - 2 * first) / max(depth - 1, 1)
    return [int(first + step * layer) for layer in range(depth)]


def keep(depth: int, tokens: int, rate: float, *layers: float) -> list[int]:
    """Keep a share of the image tokens, in the given layers only."""
    _check_rate("keep", rate, ":3:6:9")
    _check_named_layers("keep", depth, layers)
    removed = []
    for layer in range(depth):
        removed.append(tokens - math.ceil(rate * tokens) if layer in layers else 0)
        tokens -= removed[-1]
    return removed


def after(depth: int, tokens: int, first: float, number: float) -> list[int]:
    """MCTF's schedule: nothing before layer `first`, then the same number in every layer."""
    _check_named_layers("after", depth, (first,))
    return [0] * int(first) + constant(depth - int(first), tokens, number)


def ratio(depth: int, tokens: int, rate: float, extra_tokens: float = 0) -> list[int]:
    """PiToMe's schedule: every layer keeps a share of its tokens; `extra_tokens`: prefix tokens that are counted as
    well."""
    _check_rate("ratio", rate, "")
    removed = []
    for _ in range(depth):
        counted = tokens + int(extra_tokens)
        removed.append(math.floor(counted - counted * rate))
        tokens -= removed[-1]
    return removed


def geometric(depth: int, tokens: int, rate: float, *layers: float) -> list[int]:
    """ATC's schedule: after the n-th of the given layers rate^n of all image tokens are left, if that is any."""
    _check_rate("geometric", rate, ":3:6:9")
    _check_named_layers("geometric", depth, layers)
    left, removed = tokens, [0] * depth
    for power, layer in enumerate(sorted(int(layer) for layer in layers), start=1):
        after = min(int(tokens * rate**power), left) or left
        removed[layer], left = left - after, after
    return removed


def _check_rate(name: str, rate: float, layers: str) -> None:
    if not 0 < rate <= 1:
        raise ScheduleError(f"schedule {name!r} has rate {rate:g}; it must be in (0, 1], e.g. {name}:0.7{layers}")


def _check_named_layers(name: str, depth: int, layers: Sequence[float]) -> None:
    if not layers:
        raise ScheduleError(f"schedule {name!r} names no layer; write the layers after the rate, e.g. {name}:0.7:3:6:9")
    wrong = [f"{layer:g}" for layer in layers if layer not in range(depth)]
    if wrong:
        raise ScheduleError(f"schedule {name!r} names layer {', '.join(wrong)}; this model has layers 0 to {depth - 1}")


SCHEDULES: dict[str, Callable[..., list[int]]] = {
    "constant": constant,
    "linear": linear,
    "early": early,
    "late": late,
    "peak": peak,
    "default": default,
    "calibrated": calibrated,
    "inflection": inflection,
    "keep": keep,
    "after": after,
    "ratio": ratio,
    "geometric": geometric,
}


def removals(
    schedule: Schedule, depth: int, tokens: int, max_removable: Callable[[int], int] | None = None
) -> tuple[int, ...]:
    """The image tokens that each of `depth` layers removes, checked against the number of `tokens`.

    A method that can remove only some of its tokens passes `max_removable`, from tokens to how many of them may go.
    Layers that ask for more are cut to that, as in ToMe, and a schedule shorter than the model is padded with zeros.

    >>> removals(8, depth=3, tokens=196)
    (8, 8, 8)
    >>> removals("keep:0.5:1", depth=3, tokens=9)
    (0, 4, 0)
    """
    plan: list[Any]
    if isinstance(schedule, Integral) and not isinstance(schedule, bool):
        plan = [schedule] * depth
    elif isinstance(schedule, str):
        plan = _named(f"constant:{schedule}" if schedule.isdecimal() else schedule, depth, tokens)
    elif isinstance(schedule, (tuple, list)):
        plan = list(schedule)
    else:
        raise ScheduleError(
            f"schedule is {short_repr(schedule)}; give a number, one number per layer, or a name like 'linear:2:14'"
        )
    if max_removable is not None:
        plan += [0] * (depth - len(plan))
    if len(plan) != depth:
        raise ScheduleError(f"schedule has {len(plan)} entries, but the model has {depth} layers; give one for each")
    for layer, number in enumerate(plan):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise ScheduleError(
                f"schedule removes {short_repr(number)} tokens in layer {layer}; it must be an integer >= 0"
            )
    if max_removable is not None:
        for layer in range(depth):
            plan[layer] = min(plan[layer], max_removable(tokens - sum(plan[:layer])))
    if sum(plan) >= tokens:
        raise ScheduleError(
            f"schedule removes {sum(plan)} tokens, but there are only {tokens} image tokens and one must stay; "
            f"the largest constant number for this model is {(tokens - 1) // depth}"
        )
    return tuple(int(number) for number in plan)


def same_share(plan: Sequence[int], tokens: int, other: int) -> tuple[int, ...]:
    """A plan for `tokens` image tokens, for another number of them: after each layer the same share is gone, rounded
    down, so one stays wherever one stayed.

    >>> same_share((8, 0, 8, 8), tokens=64, other=20)
    (2, 0, 3, 2)
    """
    gone = [sum(plan[: layer + 1]) * other // tokens for layer in range(len(plan))]
    return tuple(now - before for now, before in zip(gone, [0, *gone], strict=False))


def even_schedule(strength: float, depth: int, tokens: int) -> tuple[int, ...] | int:
    """A schedule as even as possible, the first layers removing more: from nothing to the largest constant one.

    >>> even_schedule(0.5, depth=4, tokens=12)
    1
    >>> even_schedule(0.75, depth=4, tokens=12)
    (2, 2, 1, 1)
    """
    per_layer, rest = divmod(round(strength * ((tokens - 1) // depth * depth)), depth)
    return tuple(per_layer + (layer < rest) for layer in range(depth)) if rest else per_layer


def keep_ratio_at(strength: float) -> float:
    """The share of the tokens that is left at this strength: from 1 to 1 / KEEP_RATIO_STEPS."""
    return 1 - round(strength * (KEEP_RATIO_STEPS - 1)) / KEEP_RATIO_STEPS


def scale_keep_ratio(keep_ratio: float, fraction: float) -> float:
    """The share of tokens left if only this share of the reduction is done."""
    return keep_ratio if fraction == 1 else 1 - fraction * (1 - keep_ratio)


def scale_schedule(
    schedule: Schedule, fraction: float, depth: int, tokens: int, max_removable: Callable[[int], int] | None = None
) -> Schedule:
    """This share of what a schedule removes in each layer; arguments as for `removals`.

    >>> scale_schedule("linear:2:8", 0.5, depth=4, tokens=64)
    (1, 2, 3, 4)
    """
    if fraction == 1:
        return schedule
    if isinstance(schedule, int):
        return round(fraction * schedule)
    return tuple(round(fraction * number) for number in removals(schedule, depth, tokens, max_removable))


def round_schedule(
    plan: Sequence[float], tokens: int, min_tokens: int = 1, snap: Callable[[int], int] = lambda left: left
) -> list[int]:
    """Round a plan to whole numbers, carrying the rest to the next layer; at least `min_tokens` tokens stay.

    A caller that allows only certain numbers of tokens passes `snap`, from any number to an allowed one.
    """
    left, counts, owed = tokens, [0] * len(plan), 0.0
    for layer, exact in enumerate(plan):
        if exact > 0:
            owed += exact
            after = max(min(snap(left - round(owed)), left), min_tokens)
            counts[layer] = left - after
            owed -= counts[layer]
            left = after
    return counts


def quarter_layers(depth: int) -> tuple[int, ...]:
    """Layers at one, two and three quarters: 3, 6, 9 of DeiT's 12; 4, 8, 12 of LV-ViT-S's 16."""
    return tuple(dict.fromkeys(depth * part // 4 for part in (1, 2, 3)))


def check_layers(name: str, layers: tuple[int, ...] | None, depth: int, first: int = 0) -> tuple[int, ...]:
    """Layer numbers that exist, in ascending order; None = at one, two and three quarters."""
    if layers is None:
        return quarter_layers(depth)
    layers = layers if isinstance(layers, (tuple, list)) else (layers,)
    wrong = [layer for layer in layers if not isinstance(layer, Integral) or not first <= layer < depth]
    if wrong or list(layers) != sorted(set(layers)):
        raise ScheduleError(
            f"{name} is {tuple(layers)!r}; give different layers from {first} to {depth - 1} in ascending order"
        )
    return tuple(int(layer) for layer in layers)


def _named(schedule: str, depth: int, tokens: int) -> list[int]:
    name, *words = schedule.split(":")
    function = SCHEDULES[check_name("schedule", name, SCHEDULES)]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ScheduleError(
            f"schedule {short_repr(schedule)} has something other than numbers after its name"
        ) from None
    if not all(abs(number) <= MAX_NUMBER for number in numbers):  # not so for NaN
        raise ScheduleError(f"schedule {short_repr(schedule)} has a number that is not finite, or beyond {MAX_NUMBER}")
    try:
        return function(depth, tokens, *numbers)
    except TypeError:
        examples = {"linear": "linear:2:14", "keep": "keep:0.7:3:6:9", "inflection": "inflection:8:-1"}
        examples |= {"after": "after:1:16", "ratio": "ratio:0.95", "geometric": "geometric:0.7:3:6:9"}
        example = examples.get(name, f"{name}:8")
        raise ScheduleError(
            f"schedule {short_repr(schedule)} has {len(numbers)} numbers; write it like {example!r}"
        ) from None
