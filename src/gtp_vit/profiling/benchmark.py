"""benchmark: how much faster is it here? Interleaved runs in one process, medians with quartiles, and a verdict.

A machine drifts (other users, clock speed, caches), so an absolute time proves nothing. All candidates take turns, in a
new random order in every round, and are compared within a round; the ratio is the median over the rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gtp_vit.core.eval_mode import eval_mode
from gtp_vit.errors import SettingError, check_range

PAUSE_SECONDS = 0.01  # seconds, where engines are timed: threads that have nothing to do have stopped spinning by then
Samples = dict[str, list[float]]  # seconds of each candidate, round by round


@dataclass(frozen=True)
class Timing:
    """Times of one candidate, and its speed-up over the baseline of the same round."""

    name: str
    milliseconds: float  # median
    quartiles: tuple[float, float]  # of the milliseconds
    speedup: float  # median over rounds of baseline time / own time
    speedup_quartiles: tuple[float, float]
    best_speedup: float  # ratio of the means of the fastest quarters: what a quiet machine would show

    @property
    def faster(self) -> bool | None:
        """True or False where three quarters of the rounds agree, None where the noise is larger than the gain."""
        if self.speedup_quartiles[0] > 1:
            return True
        return False if self.speedup_quartiles[1] < 1 else None


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    pause: float = 0.0,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Samples:
    """Time the candidates in turns.

    Args:
        candidates: name -> a call without arguments.
        rounds: how often each is timed.
        warmup: untimed rounds before that.
        pause: seconds of rest before each, where candidates have threads of their own: some spin for a while when their
            work is done, and take the cores of the next.
        seconds_of: times a call; None = by this machine's clock, until all devices are done.
        progress: called with the number of rounds done and their total.
    """
    check_range("rounds", rounds, 3, 1e6, integer=True)
    names = list(candidates)
    if len(names) < 2:
        raise SettingError(f"{len(names)} candidate to time; a speed-up needs a baseline and something to compare")
    seconds: Samples = {name: [] for name in names}
    order = random.Random(0)
    seconds_of = seconds_of or _seconds_by_clock
    for turn in range(-warmup, rounds):
        for name in order.sample(names, len(names)):
            if pause:
                time.sleep(pause)
            taken = seconds_of(candidates[name])
            if turn >= 0:
                seconds[name].append(taken)
        if progress is not None and turn >= 0:
            progress(turn + 1, rounds)
    return seconds


def _seconds_by_clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    if torch.accelerator.is_available():  # without waiting, only the launch would be timed
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def speedups_over(samples: Samples, baseline: str) -> list[Timing]:
    """Every candidate against the baseline of the same round."""
    return [_timing(name, own, samples[baseline]) for name, own in samples.items()]


def benchmark_models(
    models: Mapping[str, nn.Module],
    images: torch.Tensor,
    *,
    rounds: int = 30,
    progress: Callable[[int, int], None] | None = None,
) -> list[Timing]:
    """Time the forward pass of several models in eval mode on the same images; the first model is the baseline."""

    def call(model: nn.Module) -> Callable[[], object]:
        return lambda: model(images)

    with torch.inference_mode(), eval_mode(*models.values()):
        samples = interleave({name: call(model) for name, model in models.items()}, rounds=rounds, progress=progress)
    return speedups_over(samples, next(iter(models)))


def _timing(name: str, seconds: list[float], baseline: list[float]) -> Timing:
    ratios = [b / o for b, o in zip(baseline, seconds, strict=True)]
    low, middle, high = (1000 * second for second in statistics.quantiles(seconds, n=4))
    ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
    return Timing(name, middle, (low, high), ratio, (ratio_low, ratio_high), _best(baseline) / _best(seconds))


def _best(seconds: list[float]) -> float:
    fastest = sorted(seconds)[: max(1, len(seconds) // 4)]
    return sum(fastest) / len(fastest)
