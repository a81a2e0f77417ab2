"""What export is worth: speed in ONNX Runtime and OpenVINO, damage of 8 bits, and equality with torch.

    python benchmarks/engines.py speed --json docs/results/engines-speed.json
    GTP_VIT_DATA=../shared python benchmarks/engines.py damage --json docs/results/engines-damage.json
    python benchmarks/engines.py equality --json docs/results/engines-equality.json

speed: unreduced, GTP+ with the deploy schedule and slicing with the same one, all in the engine, and eager torch; in
turns in one process, so that only ratios matter. damage: KL to the unreduced float model of GTP+ alone, of 8 bits alone
and of both. equality: the largest difference to torch, and images for which other tokens are kept, of every method on a
tiny model of one family of each backbone and of each kind of prefix, and of GTP+ on all other families, in both
engines. Takes an hour or two, and goes on where it was interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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
from unittest import mock

import torch
import tyro
from torch import Tensor

import gtp_vit
from gtp_vit import METHODS, GTPError, create_model, make_method, patch
from gtp_vit.core.tokens import Tokens
from gtp_vit.data.loader import evenly_spaced_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.engines import ENGINES, program
from gtp_vit.engines.export import export
from gtp_vit.engines.program import Program, check_exportable, output_spec
from gtp_vit.engines.runtime import ExportedModel, compile_for_engine
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.patching import tower_of
from gtp_vit.profiling.benchmark import PAUSE_SECONDS, interleave, speedups_over
from gtp_vit.profiling.environment import environment
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.slicing import slicing_like
from gtp_vit.runs.files import write_atomically

EAGER = "eager torch, unreduced"
CLOSE = 1e-4
COMPARED = {name: ENGINES[name] for name in ("onnxruntime", "openvino")}
BATCHES = (1, 3, 8)  # of equality
# method -> layers, settings; others get two layers and their defaults. Of three layers one reduces tokens of equal
# sizes, one tokens of different ones, and one may be shortened; two have all but the second of these.
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "gtp_plus": (3, {"remove": 6}),
    "gtp": (2, {"propagate": 6}),
    "evovit": (3, {}),
    "tome": (2, {"r": 6}),
    "mctf": (2, {"r": 6}),
    "evit": (2, {"keep_rate": 0.7, "drop_loc": (0,)}),
    "ats": (2, {"budget": "keep:0.6:0:1"}),
    "ppt": (2, {"r": 9, "pp_loc_list": (0, 1)}),
    "diffrate": (2, {"prune": (5, 0), "merge": (4, 0)}),
}
# Families on which all methods are compared; on the others, which differ from one of these in details, GTP+ is.
ALL_METHODS = (
    *("vit", "deit_distilled", "dinov2_registers", "siglip", "gap", "dinov3", "beit_shared", "lvvit", "hf_vit"),
    *("torchvision", "open_clip"),
)
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
    """Families of src/gtp_vit/testing/families.py for equality, beside those in the file already; none = all."""
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
    sliced = slicing_like(fast.reducer)
    assert sliced is not None
    models = {UNREDUCED: model, "reduced": fast, "slicing": patch(model, sliced)}
    size = create_model(options.model, meta=True).patch_embed.img_size
    images = torch.randn(max(options.batches), 3, *size)
    share = macs(fast).total / macs(model).total
    for case in options.cases:
        engine, precision = case.split(":")
        begin = time.perf_counter()
        with compile_for_engine(engine, precision, models, images, options.threads) as loaded, torch.inference_mode():
            exported = time.perf_counter() - begin
            for batch in options.batches:
                some = images[:batch]
                calls = {name: functools.partial(each, some) for name, each in {**loaded, EAGER: model}.items()}
                samples = interleave(calls, rounds=options.rounds, pause=PAUSE_SECONDS)
                timings = {each.name: each for each in speedups_over(samples, UNREDUCED)}
                eager = {each.name: each for each in speedups_over(samples, EAGER)}
                ratio = {each.name: each for each in speedups_over(samples, "slicing")}["reduced"]
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
        calibration = open_images(
            model, DataSettings(data_dir=data / "imagenet/calibration", labels=False, ignore_exif=True)
        )
        some = evenly_spaced_images(calibration, 128)
        images = torch.stack([some[index].image for index in range(len(some))])
        dataset = open_images(
            model, DataSettings(data_dir=data / "imagenet/val", limit=options.limit, ignore_exif=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            models: dict[str, Any] = {UNREDUCED: model, "deploy": few, "all layers": all_layers}
            for engine in COMPARED.values():
                for label, each in (("int8", patch(model, "identity")), ("int8 + deploy", few)):
                    path = Path(folder) / f"{label}{engine.suffix}"
                    export(each, path, precision="int8", images=images)
                    models[f"{engine.name} {label}"] = ExportedModel(path, "int8", options.threads)
            found = {score.name: score for score in evaluate(models, dataset, workers=1).scores}
        kl = {key: score["kl"].value for key, score in found.items()}
        for engine in COMPARED:
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
    """A row for each method and family: in each engine the largest difference to torch, and other tokens kept."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from gtp_vit.testing import families

    torch.set_num_threads(options.threads)
    earlier = _earlier(options)
    yield from earlier
    done = {(row["family"], row["method"]) for row in earlier}
    for family in options.families or sorted(families.NAMES, key=lambda name: name not in ALL_METHODS):
        for name in METHODS if family in ALL_METHODS else ("gtp_plus",):
            if (family, name) in done:
                continue
            layers, settings = SETTINGS.get(name, (2, {}))
            row: dict[str, Any] = {"family": family, "method": name}
            try:
                fast = patch(families.make(family, layers), make_method(name, **settings), quiet=True)
                check_exportable(fast)
            except GTPError as error:
                yield {**row, "refused": str(error)}
                continue
            row |= {"layers": layers, "settings": str(_method_of(fast))}
            try:
                yield {**row, **_compared(fast, family, options)}
            except GTPError as error:  # the others are measured all the same
                yield {**row, "failed": str(error)}


def _compared(fast: Any, family: str, options: Options) -> dict[str, Any]:
    """A patched model in torch and in each engine, on the same images."""
    from gtp_vit.testing import families

    images = [families.images(family, batch) for batch in BATCHES]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(program, "PrimaryOutput", OutputAndNames):
        forms = Program(fast, Path(folder))
        observed = OutputAndNames(fast, output_spec(fast).kind)
        with torch.inference_mode():
            wanted = [observed(each) for each in images]
        names = observed.names
        assert sum(names) < wanted[0].shape[1]
        found: dict[str, Any] = {"tokens": names}
        for engine in COMPARED.values():
            path = Path(folder) / f"made{engine.suffix}"
            engine.convert(forms, path, "f32", None, "")
            run = engine.load(path, "f32", options.threads, None)
            worst, off, others = 0.0, 0, 0
            for given, one in zip(images, wanted, strict=True):
                other = torch.from_numpy(run(given.numpy()))
                assert other.shape == one.shape
                outputs = one.shape[1] - sum(names)
                apart = (other - one)[:, :outputs].abs().amax(dim=1)
                assert bool(apart.isfinite().all())
                pairs = [each[:, outputs:].split(names, dim=1) for each in (one, other)]
                same = [(a.sort(dim=1).values == b.sort(dim=1).values).all(dim=1) for a, b in zip(*pairs, strict=True)]
                others += int((~torch.stack(same).all(dim=0)).sum()) if same else 0
                worst, off = max(worst, float(apart.max())), off + int((apart > CLOSE).sum())
            found[engine.name] = {
                "largest_difference": worst,
                "images_beyond_1e-4": off,
                "images_with_other_tokens": others,
                "images": sum(BATCHES),
            }
    return found


class OutputAndNames(program.PrimaryOutput):
    """A model that returns its output and behind it, for each layer, the names of the tokens that are left.

    The names come from the very pass that makes the output, so the engine says itself which tokens it keeps.
    """

    names: list[int]  # how many there are after each layer

    def forward(self, images: Tensor) -> Tensor:
        reducer, seen = tower_of(self.model).reducer, []
        after = reducer.after

        def observed(layer: int, tokens: Tokens) -> Tokens:
            tokens = after(layer, tokens)
            names = tokens.token_ids
            padding = None if tokens.size is None else tokens.size[:, -names.shape[1] :] == 0
            seen.append(names if padding is None else names.masked_fill(padding, -1))
            return tokens

        reducer.after = observed
        try:
            output = super().forward(images)
        finally:
            del reducer.after
        self.names = [each.shape[1] for each in seen]
        return torch.cat([output.flatten(1), *(each.to(output.dtype) for each in seen)], dim=1)


def _method_of(fast: Any) -> Any:
    return tower_of(fast).reduction.method


def _earlier(options: Options) -> list[dict[str, Any]]:
    """Rows of a run that was interrupted; ends the program if they are of other code or another machine."""
    if options.json is None or not options.json.exists():
        return []
    found = json.loads(options.json.read_text())
    for key, value in _header().items():
        if found.get(key) != value and key != "date":
            sys.exit(f"{options.json} has another {key} ({found.get(key)}, here {value}); move it away to begin again")
    return list(found["rows"])


def _code() -> str:
    """A hash of the code that makes and runs files."""
    root = Path(gtp_vit.__file__).parent
    digest = hashlib.sha256()
    makers = [
        root / name
        for name in (
            "patching.py",
            "tensors.py",
            "engines/onnx_export.py",
            "engines/program.py",
            "engines/onnxruntime.py",
            "engines/openvino.py",
        )
    ]
    for name in ("backbones", "core", "kernels", "methods", "models", "paper"):
        makers += sorted((root / name).rglob("*.py"))
    for path in makers:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _header() -> dict[str, Any]:
    machine = dataclasses.asdict(environment())
    for engine in COMPARED.values():
        machine |= engine.versions()
    return {"date": str(date.today()), "environment": json.loads(json.dumps(machine)), "code": _code()}


def main() -> None:
    options = tyro.cli(Options)
    warnings.simplefilter("ignore")
    rows = []
    chosen = {key: str(value) for key, value in dataclasses.asdict(options).items() if key not in ("json", "families")}
    for row in {"speed": speed, "damage": damage, "equality": equality}[options.what](options):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json is not None:
            result = {**_header(), "options": chosen, "rows": rows}
            write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
