"""Is the search of `tune` worth it? Against hand-made schedules, and against search libraries.

    python benchmarks/tuning.py schedules vit_tiny_patch16_224 --checkpoint W --data-dir imagenet/val --recipe R.json
    python benchmarks/tuning.py libraries vit_tiny_patch16_224 --checkpoint W --data-dir imagenet/calibration

`schedules` evaluates GTP+ with a recipe and with every hand-made schedule of the same cost, these with the default
settings, on images that the search has not seen. `libraries` (needs optuna and cmaes) gives each search the same starts
and as many passes over the same images, and measures what it found on others.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from gtp_vit import GTPPlus, create_model, patch, read_recipe
from gtp_vit.core.reducer import Method
from gtp_vit.data.loader import batches
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.classes import Classification
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.patching import host_of
from gtp_vit.tuning.local_search import Budget, DamageEvaluator, search
from gtp_vit.tuning.space import SHAPES, ScheduleLimits, ScheduleSpace

HAND_MADE = (*SHAPES, "three layers", "as DiffRate")  # in the order of Space.starting_points, behind the default's


@dataclass(frozen=True)
class Common:
    model: Annotated[str, tyro.conf.Positional]
    """Name of a model."""
    checkpoint: Path
    """Its weights."""
    data_dir: Path
    """Folder of images."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the figures here as well."""

    def open(self) -> tuple[Any, Any]:
        torch.set_num_threads(self.threads)
        model = create_model(self.model, checkpoint=self.checkpoint)
        return model, open_images(model, DataSettings(data_dir=self.data_dir, labels=False, ignore_exif=True))

    def write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print(json.dumps(row))
        if self.json is not None:
            self.json.write_text(json.dumps(rows, indent=1) + "\n")


@dataclass(frozen=True)
class Schedules(Common):
    """A recipe against hand-made schedules of the same cost."""

    recipe: Path = Path("recipe.json")
    """What tune found."""


@dataclass(frozen=True)
class Libraries(Common):
    """Searches against each other, with as many passes over the images."""

    share: float = 0.55
    """Of the unreduced model's MACs."""
    images: int = 160
    """That the searches see."""
    others: int = 400
    """That measure what they found."""
    evaluations: int = 60
    """Passes over the images."""
    seeds: int = 2
    """Runs of each."""


def schedules(options: Schedules) -> None:
    model, images = options.open()
    recipe = read_recipe(options.recipe)
    space = ScheduleSpace(host_of(model).costs(), GTPPlus.at_strength(host_of(model).vit, 0.5), ScheduleLimits())
    target = space.cost(space.plan_of(recipe.method))
    starts = dict(zip(("default", *HAND_MADE), space.starting_points(target), strict=True))
    methods: dict[str, Method] = {"tuned": recipe.method, **starts}
    models = {UNREDUCED: model} | {name: patch(model, method) for name, method in methods.items()}
    found = evaluate(models, images, batch_size=32)
    rows = []
    for score in found.scores[1:]:
        difference = found.differences([("tuned", score.name, "kl")])[0]
        plan = space.plan_of(methods[score.name])
        row = {
            "model": options.model,
            "schedule": score.name,
            "plan": plan,
            "share": space.cost(plan) / space.unreduced_macs,
        }
        row |= {"kl": score["kl"].value, "agreement": score["agreement"].value, "images": score.images}
        rows.append(row | {"tuned minus this": [difference.value, difference.low, difference.high]})
    options.write(rows)


def libraries(options: Libraries) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    model, files = options.open()
    total = options.images + options.others
    places = [index * len(files) // total for index in range(total)]
    mixed = torch.utils.data.Subset(files, [places[i] for i in torch.randperm(total, generator=torch.manual_seed(0))])
    images = torch.cat([batch.images for batch in batches(mixed, batch_size=32, workers=2)])
    space = ScheduleSpace(host_of(model).costs(), GTPPlus.at_strength(host_of(model).vit, 0.5), ScheduleLimits())
    target = options.share * space.unreduced_macs
    ruler = DamageEvaluator(model, images, 32, None, Classification())
    ranges = {f"layer {layer}": (0.0, 1.0) for layer in space.layers} | GTPPlus.tunable

    def with_library(sampler: Any) -> tuple[Method, float]:
        best: tuple[float, Method] | None = None

        def damage(trial: Any) -> float:
            nonlocal best
            found = {name: trial.suggest_float(name, *edges) for name, edges in ranges.items()}
            shape = [found.get(f"layer {layer}", 0.0) for layer in range(space.vit.depth)]
            plan = space.fit(shape, target)
            if plan is None:
                return 10.0
            method = dataclasses.replace(space.with_plan(plan), **{name: found[name] for name in GTPPlus.tunable})
            kl = ruler.damage(method, 0, options.images).mean
            best = min(best or (kl, method), (kl, method), key=lambda pair: pair[0])
            return kl

        study = optuna.create_study(sampler=sampler)
        for start in space.starting_points(target):
            plan = space.plan_of(start)
            point = {f"layer {layer}": plan[layer] / max(plan) for layer in space.layers}
            study.enqueue_trial(point | {name: getattr(start, name) for name in GTPPlus.tunable})
        study.optimize(damage, n_trials=options.evaluations)
        assert best is not None
        return best[1], best[0]

    def plain_local(seed: int) -> tuple[Method, float]:
        found = search(ruler, space, target, Budget(options.images, options.evaluations, seed=seed))
        return found.method, found.damage.mean

    rows = []
    for seed in range(options.seeds):
        searches: dict[str, Any] = {
            "local search": lambda seed=seed: plain_local(seed),
            "optuna TPE": lambda seed=seed: with_library(optuna.samplers.TPESampler(seed=seed, multivariate=True)),
            "CMA-ES": lambda seed=seed: with_library(optuna.samplers.CmaEsSampler(seed=seed)),
        }
        for name, run in searches.items():
            before = ruler.images_run
            method, kl = run()
            passes = (ruler.images_run - before) / options.images
            other = ruler.damage(method, options.images, total)
            row = {"model": options.model, "search": name, "seed": seed, "passes": round(passes, 1), "kl": kl}
            rows.append(row | {"kl of others": other.mean, "plan": space.plan_of(method)})
    options.write(rows)


def main(options: Schedules | Libraries) -> None:
    schedules(options) if isinstance(options, Schedules) else libraries(options)


if __name__ == "__main__":
    main(tyro.cli(Schedules | Libraries, description=__doc__))  # type: ignore[arg-type]
