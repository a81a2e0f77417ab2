"""What export is worth: speed in ONNX Runtime and OpenVINO, damage of 8 bits, and equality with torch.

    python benchmarks/engines.py speed --json docs/results/engines-speed.json
    GTP_VIT_DATA=../shared python benchmarks/engines.py damage --json docs/results/engines-damage.json
    python benchmarks/engines.py equality --json docs/results/engines-equality.json

speed: unreduced, GTP+ with the deploy schedule and slicing with the same one, all in the engine, and eager torch; in
turns in one process, so that only ratios matter. damage: KL to the unreduced float model of GTP+ alone, of 8 bits alone
and of both. equality: the largest difference to torch of every method on a tiny model of every family, in both engines.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from gtp_vit import METHODS, create_model, make_method, patch
from gtp_vit.engines import ENGINES
from gtp_vit.engines.export import export
from gtp_vit.engines.loaded import ExportedModel, in_engine
from gtp_vit.engines.program import write_onnx
from gtp_vit.inputs.data import DataSettings, open_images, spread_images
from gtp_vit.measure.benchmark import PAUSE, against, interleave
from gtp_vit.measure.environment import environment
from gtp_vit.measure.evaluate import evaluate
from gtp_vit.measure.macs import macs
from gtp_vit.measure.outputs import UNREDUCED
from gtp_vit.measure.slicing import slicing_of

EAGER = "eager torch, unreduced"
CASES = (("openvino", "f32"), ("onnxruntime", "f32"), ("openvino", "int8"), ("onnxruntime", "int8"))


@dataclass(frozen=True)
class Options:
    """Measure export."""

    what: tyro.conf.Positional[Literal["speed", "damage", "equality"]]
    """speed, damage or equality."""
    model: str = "deit_small_patch16_224"
    """The model whose speed is measured, with random weights."""
    method: str = "deploy"
    """The method whose speed is measured: a name, or a recipe."""
    batches: tuple[int, ...] = (1, 8)
    """Numbers of images in a batch."""
    cases: tuple[str, ...] = field(default_factory=lambda: tuple(f"{name}:{kind}" for name, kind in CASES))
    """ENGINE:PRECISION."""
    rounds: int = 41
    """How often each is timed."""
    threads: int = 2
    """CPU threads."""
    families: tuple[str, ...] = ()
    """Families of tests/families.py for equality; none = all."""
    limit: int = 0
    """Images for damage; 0 = all."""
    damaged: tuple[str, ...] = ("deit_tiny_patch16_224", "vit_tiny_patch16_224")
    """The models whose damage is measured."""
    json: Path | None = None
    """Write the results to this file."""


def speed(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each engine, precision and batch."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = create_model(options.model)
    fast: Any = patch(model, options.method)
    sliced = slicing_of(fast.reducer)
    assert sliced is not None
    models = {UNREDUCED: model, "reduced": fast, "slicing": patch(model, sliced)}
    size = create_model(options.model, meta=True).patch_embed.img_size
    images = torch.randn(max(options.batches), 3, *size)
    share = macs(fast).total / macs(model).total
    for case in options.cases:
        engine, precision = case.split(":")
        begin = time.perf_counter()
        with in_engine(engine, precision, models, images, options.threads) as loaded, torch.inference_mode():
            exported = time.perf_counter() - begin
            for batch in options.batches:
                some = images[:batch]
                calls = {name: functools.partial(each, some) for name, each in {**loaded, EAGER: model}.items()}
                samples = interleave(calls, rounds=options.rounds, pause=PAUSE)
                timings = {each.name: each for each in against(samples, UNREDUCED)}
                eager = {each.name: each for each in against(samples, EAGER)}
                ratio = {each.name: each for each in against(samples, "slicing")}["reduced"]
                yield {
                    "engine": engine,
                    "precision": precision,
                    "batch": batch,
                    "milliseconds": {name: round(each.milliseconds, 2) for name, each in timings.items()},
                    "speedup": round(timings["reduced"].speedup, 3),
                    "speedup_quartiles": [round(edge, 3) for edge in timings["reduced"].speedup_quartiles],
                    "slicing": round(timings["slicing"].speedup, 3),
                    "of_slicing": round(ratio.speedup, 3),
                    "of_slicing_quartiles": [round(edge, 3) for edge in ratio.speedup_quartiles],
                    "of_slicing_best": round(ratio.best_speedup, 3),
                    "over_eager_torch": round(eager["reduced"].speedup, 3),
                    "unreduced_over_eager_torch": round(eager[UNREDUCED].speedup, 3),
                    "share_of_macs": round(share, 4),
                    "seconds_to_export_three": round(exported, 1),
                    "method": str(fast.reduction.method),
                }


def damage(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each of the two Ti models and each engine."""
    data = Path(os.environ["GTP_VIT_DATA"]) / "assets"
    for name in options.damaged:
        model = create_model(name, checkpoint=next((data / "weights").glob(f"{name}.*")))
        few, all_layers = patch(model, "deploy"), patch(model)
        calibration = open_images(model, DataSettings(data_dir=data / "imagenet/calibration", labels=False))
        some = spread_images(calibration, 128)
        images = torch.stack([some[index].image for index in range(len(some))])
        dataset = open_images(model, DataSettings(data_dir=data / "imagenet/val", limit=options.limit))
        with tempfile.TemporaryDirectory() as folder:
            models: dict[str, Any] = {UNREDUCED: model, "deploy": few, "all layers": all_layers}
            for engine in ENGINES.values():
                for label, each in (("int8", patch(model, "identity")), ("int8 + deploy", few)):
                    path = Path(folder) / f"{label}{engine.suffix}"
                    export(each, path, precision="int8", images=images)
                    models[f"{engine.name} {label}"] = ExportedModel(path, "int8", options.threads)
            found = {score.name: score for score in evaluate(models, dataset, workers=1).scores}
        kl = {key: score["kl"].value for key, score in found.items()}
        for engine in ENGINES:
            alone, both = kl[f"{engine} int8"], kl[f"{engine} int8 + deploy"]
            yield {
                "model": name,
                "engine": engine,
                "images": found[UNREDUCED].images,
                "kl_deploy": kl["deploy"],
                "kl_all_layers": kl["all layers"],
                "deploy_over_all_layers": round(kl["deploy"] / kl["all layers"], 3),
                "kl_int8": alone,
                "kl_int8_deploy": both,
                "allowed": alone + 1.1 * kl["deploy"],
                "top1": {key: score["top1"].value for key, score in found.items()},
                "agreement": {key: score["agreement"].value for key, score in found.items()},
                "share_of_macs": {
                    "deploy": round(macs(few).total / macs(model).total, 4),
                    "all layers": round(macs(all_layers).total / macs(model).total, 4),
                },
            }


def equality(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each method and family: the largest difference to torch in each engine, and on how many images."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import families

    for family in options.families or families.NAMES:
        for name in METHODS:
            try:
                fast = patch(families.make(family), _settings(name))
            except ValueError as error:
                yield {"family": family, "method": name, "refused": str(error)}
                continue
            row: dict[str, Any] = {"family": family, "method": name}
            with tempfile.TemporaryDirectory() as folder:
                onnx = Path(folder) / "model.onnx"
                write_onnx(fast, onnx)
                for engine in ENGINES.values():
                    path = Path(folder) / f"made{engine.suffix}"
                    engine.make(onnx, path, "f32", None, "")
                    run = engine.load(path, "f32", options.threads, None)
                    worst, off = 0.0, 0
                    for batch in (1, 3, 8):
                        images = families.images(family, batch)
                        with torch.inference_mode():
                            wanted = fast(images).flatten(1)
                        apart = (torch.from_numpy(run(images.numpy())).flatten(1) - wanted).abs().amax(dim=1)
                        worst, off = max(worst, float(apart.max())), off + int((apart > 1e-4).sum())
                    row[engine.name] = {"largest_difference": worst, "images_beyond_1e-4": off, "images": 12}
            yield row


def _settings(name: str) -> Any:
    return make_method(name, budget=4) if name == "ats" else make_method(name)


def main() -> None:
    options = tyro.cli(Options)
    warnings.simplefilter("ignore")
    rows, machine = [], dataclasses.asdict(environment())
    for engine in ENGINES.values():
        machine |= engine.versions()
    chosen = {key: str(value) for key, value in dataclasses.asdict(options).items() if key != "json"}
    for row in {"speed": speed, "damage": damage, "equality": equality}[options.what](options):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json is not None:
            result = {"date": str(date.today()), "environment": machine, "options": chosen, "rows": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
