"""Writes the pages on encoders, dense features and measures: python docs/make_encoders.py"""
# ruff: noqa: E501  (the texts of the pages have long lines)

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from typing import Any

from gtp_vit.metrics.registry import MEASURES

FOLDER = Path(__file__).parent
MODELS = {
    "vit_tiny_patch16_224": "ViT-Ti (AugReg)",
    "deit_tiny_patch16_224": "DeiT-Ti, its LayerNorms rounded",
    "vit_small_patch14_dinov2": "ViT-S/14, saliency",
}
ENCODERS = """\
# Encoders: damage by method

For readers who use a ViT as an encoder (CLIP, SigLIP, DINOv2 and 3, a classifier without its head) and want to know how far each method moves
the embeddings. How to embed images is in [a guide](guides/features.md); what the figures mean is under [measures](reference/measures.md).

{ratios}

{tables}

*Both models without their heads, {share} of the MACs, {images} ImageNet validation images read without EXIF orientation, no finetuning. Brackets are 95 % intervals over
images. 18 November 2026, commit 12f1fc2, `python benchmarks/encoders.py`, [encoders.json](results/encoders.json).*

- *calibrated*: the default schedule after `gtp_vit.calibrate(encoder, images)` on 300 training images.
- *tuned*: the recipe in the package, which was calibrated and searched on the classifier with its head. `patch(encoder)` uses it on these weights.
- *KL of the classifier*: the original head applied to the reduced embedding, which is what a user of the classifier would see.
- *KL over channels*: the KL divergence of a softmax over the channels of the embedding.

## Does the cosine rank methods correctly?

Nearly:{verdict}

On these models a softmax over channels, which has no meaning of its own, ranks as well; we had expected it to rank worse.
"""
DENSE = """\
# Dense features: damage by method

For readers who need a feature for every patch (segmentation, depth, detection) and want to know how near restored features are to the unreduced ones. How to
get them is in [a guide](guides/features.md); how a patch is restored is [explained here](explanation/restoring.md).

## Results

Each cell: correlation of the heat map with the unreduced model's (mean, median) / relative error per patch / 1 - cosine of the class token.

{heat}

*A ViT-S/14 of DINOv2's shape with a saliency decoder, {heat_images} validation images read without EXIF orientation, restored features passed through the decoder. 18 November
2026, commit a5b702a, `python benchmarks/dense.py heat-maps`, [dense-heat-maps.json](results/dense-heat-maps.json).*

- Methods are at their defaults, with the setting for how much is removed chosen for the MACs.
- *calibrated*: after `gtp_vit.calibrate` on 200 training images, for the class token's embedding or for the features of patches (`measure="dense"`), with the
  default schedule.
- *dense-0.65*: recipes of `gtp-vit tune --measure dense --macs 0.65 --search-passes 30` on 100 training images, without and with (`learned`) calibration.

Calibrated for patches, GTP+ is best at 0.8 and 0.65: at 0.65 features are {nearer:.0f} % nearer than without calibration, the class token {class_nearer:.0f} %. At 0.55 ATC's features
are as near. Our aim was a mean correlation of 0.996 at 0.65; the best result is {best:.3f} (median {median:.3f}). What was tried for it is in
[the notebook](research/dense.md).

![A drawn image; features and segments of its patches, and below its heat maps, unreduced and restored](saliency.png)

*A drawing, since photos of ImageNet may not be published; GTP+ at 0.65 of the MACs (`python benchmarks/dense.py picture`).*
"""
DENSE_NOTEBOOK = """\
# Notebook: restoring features

For researchers. What was tried for [dense features](../dense.md), including what failed. Written by `python docs/make_encoders.py` from
`docs/results`.

## How much of the difference to keep

Relative error per patch against the unreduced model on {candidate_images} calibration images, read without EXIF orientation
(`python benchmarks/dense.py candidates`). *copy*: the owner's feature; *whole*: with all of d; *faded*: d times (l + 1) / (L + 2), which is what
the package does; for GTP also *transposed*: a mean of all tokens that took a part of the patch. The last column is the paired difference of faded to
copy, 95 % interval. Layer 11 is after the last norm. Least squares on calibration images, layer by layer, find nearly the factors of *faded*; a
full linear map of d, fitted, is hardly nearer.

{candidates}

These rows: [dense-candidates.json](../results/dense-candidates.json). The other layers and costs: `git show ecdb9af:docs/results/dense-candidates.json`.

## Towards a correlation of 0.996

We had hoped for a mean correlation of 0.996 at 0.65 after tuning for dense output: it is {best:.3f}, its median {median:.3f}: a few images pull the mean down.
Tuned schedules bring features nearer, and leave the heat map about where it was. More was tried on training images. All patches back before the last
layers, which then run on all of them, at the same MACs (`python benchmarks/dense.py late`, [figures](../results/dense-late.json)): correlation {late}. A calibration for the decoder's own
output, by hand on 64 images: median 0.9969 instead of GTP+'s 0.9967, mean 0.9922 instead of 0.9931, as single images became worse.

Nine tenths of the squared error are in patches that were merged. A mean of the five most similar tokens that stay, with weights that come nearest to
the patch when it leaves, instead of its owner (by hand, 64 training images, the recipe dense-0.65-learned): error 0.0909 instead of 0.0976, correlation
0.9956 instead of 0.9949. It is better, but needs a system of equations for every patch, which engines do not have, and on these images, some of which the
recipe was searched on, it is still below 0.996: not in the package.
"""


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def inversions(rows: list[dict[str, Any]], figure: str) -> int:
    """Pairs of methods that a figure puts in the other order than the classifier's KL."""
    pairs = itertools.combinations([row["figures"] for row in rows if row["method"] != "unreduced"], 2)
    return sum((one["head_kl"][0] < two["head_kl"][0]) != (one[figure][0] < two[figure][0]) for one, two in pairs)


def measures() -> str:
    """A row for each measure: for which models it is, what it says of them, and what a search can aim at."""
    rows = [["models", "`--measure`", "figures", "targets of `tune`"]]
    for name, measure in MEASURES.items():
        models = inspect.cleandoc(measure.__doc__ or "").splitlines()[0].removeprefix("For models ").rstrip(".")
        figures = "; ".join(figure.title for figure in measure.metrics)
        targets = ", ".join(f"`--{bound.name.replace('_', '-')}`" for bound in measure.bounds)
        rows.append([models, f"`{name}`", figures, targets])
    return table(rows[0], rows[1:])


def encoders() -> str:
    rows = load("encoders")
    said, ratios = [], []
    for model, title in MODELS.items():
        own = [row for row in rows if row["model"] == model]
        if not own:
            continue
        pairs = len(own[1:]) * (len(own) - 2) // 2
        said.append(
            f"{title}: ranking by 1 - cosine disagrees with ranking by this KL on {inversions(own, 'distance')} of {pairs} pairs of "
            f"methods, ranking by a softmax over channels on {inversions(own, 'channel_kl')}."
        )
        distance = {row["method"]: row["figures"]["distance"][0] for row in own}
        of_tome = {name: f"{value / distance['tome']:.2f}" for name, value in distance.items()}
        ratios.append(
            f"- {title}: 1 - cosine of GTP+ is {of_tome['gtp_plus']} of ToMe's; calibrated on the encoder "
            f"{of_tome['gtp_plus, calibrated']}, with the recipe in the package {of_tome['gtp_plus, tuned']}."
        )
    return ENCODERS.format(
        share=0.65,
        images=f"{rows[0]['images']:,}",
        verdict="\n\n" + "\n".join(f"- {line}" for line in said),
        ratios="\n".join(ratios),
        tables=encoder_tables(rows),
    )


def encoder_tables(rows: list[dict[str, Any]]) -> str:
    parts = []
    for model, title in MODELS.items():
        own = [row for row in rows if row["model"] == model]
        if not own:
            continue
        reduced = sorted(own[1:], key=lambda row: row["figures"]["distance"][0])
        cells = []
        for row in reduced:
            found = row["figures"]
            distance = "{:.4f} [{:.4f}, {:.4f}]".format(*found["distance"])
            others = [f"{found['distance_p95'][0]:.4f}", f"{found['neighbours'][0]:.1f}"]
            cells.append(
                [row["method"], distance, *others, f"{found['head_kl'][0]:.4f}", f"{found['channel_kl'][0]:.5f}"]
            )
        titles = [
            "method",
            "1 - cosine",
            "95th percentile",
            "same neighbours %",
            "KL of the classifier",
            "KL over channels",
        ]
        parts.append(f"**{title}**\n\n{table(titles, cells)}")
    return "\n\n".join(parts)


def candidates(rows: list[dict[str, Any]]) -> str:
    columns = ["model", "method", "layer", "copy", "whole", "faded", "transposed", "faded - copy"]
    cells = []
    for (model, method, layer), group in itertools.groupby(
        [row for row in rows if row["share"] == 0.65 and row["layer"] in (5, 11)],
        key=lambda row: (row["model"], row["method"], row["layer"]),
    ):
        found = {row["candidate"]: row for row in group}
        errors = [
            f"{found[name]['error']:.4f}" if name in found else "-" for name in ("copy", "whole", "faded", "transposed")
        ]
        difference = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found["faded"]["error_minus_copy"])
        cells.append([MODELS[model], method, str(layer), *errors, difference])
    return table(columns, cells)


def heat(rows: list[dict[str, Any]]) -> str:
    shares = (0.8, 0.65, 0.55)
    names = list(dict.fromkeys(row["method"] for row in rows))
    cells = []
    for name in names:
        found = {min(shares, key=lambda share: abs(share - row["share"])): row for row in rows if row["method"] == name}
        figures = [
            f"{r['correlation'][0]:.3f}, {r['correlation_median']:.3f} / {r['patch_error'][0]:.3f} / "
            f"{r['class_distance'][0]:.4f}"
            if (r := found.get(share))
            else "-"
            for share in shares
        ]
        cells.append([name, *figures])
    return table(["method", *(f"{share} of the MACs" for share in shares)], cells)


def dense() -> tuple[str, str]:
    """The page, and its notebook."""
    tried, maps = load("dense-candidates"), load("dense-heat-maps")
    at_065 = {row["method"]: row for row in maps if row["share"] == 0.65}
    plain = at_065["gtp_plus"]
    for_class, for_dense = (at_065[f"gtp_plus, calibrated for {output}"] for output in ("embedding", "dense"))
    figures = {
        "candidate_images": tried[0]["images"],
        "candidates": candidates(tried),
        "heat_images": maps[0]["images"],
        "heat": heat(maps),
        "nearer": 100 * (1 - for_dense["patch_error"][0] / plain["patch_error"][0]),
        "class_nearer": 100 * (1 - for_class["class_distance"][0] / plain["class_distance"][0]),
        "best": for_dense["correlation"][0],
        "median": for_dense["correlation_median"],
        "late": ", ".join(
            f"{row['correlation']:.3f} with {row['layers on all patches']}" for row in load("dense-late")
        ),
    }
    return DENSE.format(**figures), DENSE_NOTEBOOK.format(**figures)


def with_measures(text: str) -> str:
    """The page of measures with its table as the registry has it."""
    before, rest = text.split("<!-- measures -->")
    return f"{before}<!-- measures -->\n\n{measures()}\n\n<!-- end -->{rest.split('<!-- end -->')[1]}"


def pages() -> dict[str, str]:
    page, notebook = dense()
    reference = FOLDER / "reference/measures.md"
    return {
        "reference/measures.md": with_measures(reference.read_text()),
        "encoders.md": encoders(),
        "dense.md": page,
        "research/dense.md": notebook,
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
