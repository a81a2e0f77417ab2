"""compare: all methods at equal MACs on the same images."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Item
from gtp_vit.errors import GTPError, SettingError
from gtp_vit.methods import known_methods
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.identity import Identity
from gtp_vit.metrics.base import UNREDUCED, Measure
from gtp_vit.metrics.evaluate import Evaluation, ImagesDone, Score, evaluate
from gtp_vit.patching import host_of, patch
from gtp_vit.profiling.benchmark import Timing, benchmark_models
from gtp_vit.profiling.budget import method_at_cost
from gtp_vit.profiling.trace import Trace, trace
from gtp_vit.recipes.recipe import Recipe
from gtp_vit.runs.journal import Journal


@dataclass(frozen=True)
class ComparisonEntry:
    """One method at one budget."""

    name: str  # unique in the comparison
    label: str  # what it is called in tables and plots
    method: Method | None  # None = the unreduced model
    budget: float  # MACs aimed at
    macs: int  # MACs it has


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison."""

    entry: ComparisonEntry
    score: Score
    timing: Timing | None = None  # None = not timed
    rate: float | None = None  # images a second, while timing


def plan_comparison(
    model: nn.Module,
    methods: Sequence[str],
    budgets: Sequence[float],
    recipes: Sequence[Recipe] = (),
    tunable: Sequence[str] = (),
) -> tuple[list[ComparisonEntry], list[str]]:
    """The unreduced model and every method at every budget, and which were left out and why.

    Args:
        model: the unreduced model.
        methods: names; () = all that fit.
        budgets: MACs for one image.
        recipes: settings that were tuned for this model, compared as they are.
        tunable: methods whose tuned schedules are compared, too: out of reach as published, they are left out and not
            refused, though they were named.
    """
    _check_no_duplicates("method", methods)
    _check_no_duplicates("budget", [f"{budget / 1e9:g} GMACs" for budget in budgets])
    _check_no_duplicates("recipe", [str(recipe.method) for recipe in recipes])
    host = host_of(model)
    costs = host.costs()
    whole = costs.unreduced
    entries, left_out = [ComparisonEntry(UNREDUCED, UNREDUCED, None, whole, whole)], []
    texts = _budget_labels(budgets)
    for budget, text in zip(budgets, texts, strict=True):
        for name in methods or [name for name in known_methods() if name != Identity.name]:
            try:
                method = method_at_cost(costs, name, budget)
            except GTPError as error:
                if name in methods and name not in tunable:
                    raise SettingError(f"{name} cannot be compared here: {error}") from error
                left_out.append(f"{name} at {budget / 1e9:.3f} GMACs: {error}")
                continue
            cost = costs.macs_with(method)
            entries.append(ComparisonEntry(f"{name} @ {text}", name, method, budget, cost))
    for number, recipe in enumerate(recipes):
        recipe.check(host)
        cost = costs.macs_with(recipe.method)
        label = f"{recipe.method.name}, tuned"
        near = min(budgets, key=lambda budget: abs(budget - cost), default=cost)
        budget = near if abs(near - cost) <= 0.01 * near else cost  # else nothing is at its budget
        entries.append(ComparisonEntry(f"{label} {number} @ {cost / 1e9:.3f}", label, recipe.method, budget, cost))
    return entries, left_out


def check_plans(plans: Sequence[ComparisonEntry], left_out: Sequence[str]) -> None:
    """Refuse a comparison of nothing but the unreduced model."""
    if len(plans) == 1:
        raise SettingError(f"no method can be compared here: {'; '.join(left_out)}")


def _check_no_duplicates(kind: str, names: Sequence[str]) -> None:
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise SettingError(f"the {kind} {twice[0]} is given more than once; give each once")


def _budget_labels(budgets: Sequence[float]) -> list[str]:
    """Budgets in GMACs with three decimals, or more until all differ: they are parts of names."""
    for decimals in range(3, 12):
        texts = [f"{budget / 1e9:.{decimals}f}" for budget in budgets]
        if len(set(texts)) == len(texts):
            break
    return texts


def budgets_of(model: nn.Module, numbers: Sequence[int]) -> list[float]:
    """MACs of GTP that propagates these numbers of tokens per layer: what the paper calls a budget."""
    costs = host_of(model).costs()
    return [costs.macs_with(GTP(propagate=number)) for number in numbers]


def models_of(model: nn.Module, plans: Sequence[ComparisonEntry], *, restore: bool = False) -> dict[str, nn.Module]:
    """The model of each plan, by the plan's name; `restore` as for `patch`."""
    _check_no_duplicates("name", [plan.name for plan in plans])
    return {
        plan.name: model if plan.method is None else patch(model, plan.method, restore=restore, quiet=True)
        for plan in plans
    }


def compare(
    models: Mapping[str, nn.Module],
    plans: Sequence[ComparisonEntry],
    dataset: Dataset[Item],
    *,
    batch_size: int = 64,
    workers: int = 2,
    measure: str | Measure = "auto",
    journal: Journal | None = None,
    progress: ImagesDone | None = None,
) -> tuple[list[ComparisonRow], Evaluation]:
    """Evaluate the models of all plans, the unreduced one first."""
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    evaluation = evaluate(models, dataset, **reading, measure=measure, journal=journal, progress=progress)
    return [ComparisonRow(plan, score) for plan, score in zip(plans, evaluation.scores, strict=True)], evaluation


def with_timings(
    rows: Sequence[ComparisonRow], models: Mapping[str, nn.Module], images: Tensor, rounds: int
) -> list[ComparisonRow]:
    """The rows, with the time that their models take for these images; `rounds` = 0 times nothing."""
    if not rounds:
        return list(rows)
    with torch.inference_mode():
        timings = {timing.name: timing for timing in benchmark_models(models, images, rounds=rounds)}
    timed = [(row, timings[row.entry.name]) for row in rows]
    return [
        dataclasses.replace(row, timing=timing, rate=1000 * len(images) / timing.milliseconds) for row, timing in timed
    ]


def traces_at_tightest_budget(
    model: nn.Module, rows: Sequence[ComparisonRow], image: Tensor
) -> list[tuple[Method, Trace]]:
    """Traces of an image, [1, C, H, W], with each method at the smallest budget."""
    reduced = [(row.entry.budget, row.entry.method) for row in rows if row.entry.method is not None]
    tightest = min(budget for budget, _ in reduced)
    methods = [method for budget, method in reduced if budget == tightest]
    return [(method, trace(patch(model, method, quiet=True), image)) for method in methods]
