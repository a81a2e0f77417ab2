"""Does 1 - cosine of embeddings rank methods as the classifier's KL does? And how far are all methods at one cost?

    python benchmarks/encoders.py --weights FOLDER --data-dir imagenet/val --calibration imagenet/calibration \\
        --json docs/results/encoders.json

The two Ti classifiers without their heads, all methods at one share of the MACs, validation images. The heads are used
for one thing only: the KL that a user of the classifier would see from the same embedding, beside it. Also a softmax
over the channels of the embedding, which people use where there are no classes. It resumes after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import tyro
from torch import Tensor, nn

from gtp_vit import calibrate, create_model
from gtp_vit.data.loader import evenly_spaced_images, take_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics.base import Arrays, Metric, to_array
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.metrics.embeddings import Embeddings
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.recipes.recipe import Recipe, read_recipe
from gtp_vit.tuning.compare import models_of, plan_comparison
from gtp_vit.weights import load_weights

MODELS = {
    "vit_tiny_patch16_224": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "deit_tiny_patch16_224": "deit_tiny_patch16_224.rounded-layernorm.safetensors",
}


LEARNED_ON = 300  # images


@dataclass(frozen=True)
class Options:
    """Compare measures of embeddings on models whose classifier is known."""

    weights: Path
    """Folder with the two files of weights."""
    data_dir: Path
    """Labelled images."""
    json: Path
    """Written here; models that are there are not measured again."""
    share: float = 0.65
    """Of the encoder's MACs."""
    images: int = 2000
    """Evenly spread over the data set."""
    methods: tuple[str, ...] = ()
    """Names of methods; all if none is given."""
    calibration: Path | None = None
    """Folder of other images, on 300 of which GTP+ also learns what matters to the embedding."""
    threads: int = 0
    """0 = torch's default."""


@dataclass(frozen=True, eq=False)
class WithHead(Embeddings):
    """Embeddings, and what two softmaxes say of them."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        *Embeddings.metrics,
        Metric("head_kl", "KL of the classifier"),
        Metric("channel_kl", "KL over channels"),
    )
    head: nn.Module = field(default_factory=nn.Identity)

    def compare(self, base: Tensor, output: Tensor, labels: Tensor, keep_arrays: Tensor) -> Arrays:
        own = super().compare(base, output, labels, keep_arrays)
        own["head_kl"] = to_array(kl_per_image(self.head(base), self.head(output)))
        own["channel_kl"] = to_array(kl_per_image(base, output))
        return own

    def per_image_values(self, stored: Mapping[str, Arrays]) -> dict[str, Arrays]:
        found = super().per_image_values(stored)
        return {
            name: {**own, **{key: stored[name][key] for key in ("head_kl", "channel_kl")}}
            for name, own in found.items()
        }


def measure(name: str, options: Options) -> list[dict[str, Any]]:
    whole = create_model(name)
    load_weights(whole, options.weights / MODELS[name], name)
    encoder = create_model(name, checkpoint=options.weights / MODELS[name], num_classes=0)
    budget = options.share * encoder_macs(encoder)
    learned = calibrated(encoder, name, options)
    recipes = [read_recipe(f"{name}-{options.share}"), *learned]
    plans, _ = plan_comparison(encoder, options.methods, [budget], recipes)
    dataset = evenly_spaced_images(
        open_images(encoder, DataSettings(options.data_dir, crop_pct=0.9, labels=False, ignore_exif=True)),
        options.images,
    )
    models = models_of(encoder, plans)
    found = evaluate(models, dataset, batch_size=32, workers=1, measure=WithHead(head=whole.head.eval()))
    rows = []
    for plan_, score in zip(plans, found.scores, strict=True):
        figures = {key: [each.value, each.low, each.high] for key, each in score.figures.items()}
        settings = None if plan_.method is None else plan_.method.to_dict()
        label = "gtp_plus, calibrated" if plan_.method in [recipe.method for recipe in learned] else plan_.label
        row = {"model": name, "method": label, "gmacs": plan_.macs / 1e9, "images": score.images}
        rows.append({**row, "figures": figures, "settings": settings})
    return rows


def calibrated(encoder: nn.Module, name: str, options: Options) -> list[Recipe]:
    """GTP+ that has learned on other images what matters to the embedding, if such images are given."""
    if options.calibration is None:
        return []
    others = open_images(encoder, DataSettings(options.calibration, crop_pct=0.9, labels=False, ignore_exif=True))
    images = take_images(evenly_spaced_images(others, LEARNED_ON), LEARNED_ON, encoder)
    return [calibrate(encoder, images, macs=options.share).labelled(model=name)]


def encoder_macs(encoder: nn.Module) -> int:
    from gtp_vit import macs

    return macs(encoder).total


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    for name in MODELS:
        if not any(row["model"] == name for row in rows):
            rows += measure(name, options)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        own = [row for row in rows if row["model"] == name]
        for row in sorted(own[1:], key=lambda row: row["figures"]["head_kl"][0]):
            shown = {key: round(each[0], 4) for key, each in row["figures"].items()}
            print(name, f"{row['method']:20}", shown, flush=True)


if __name__ == "__main__":
    main()
