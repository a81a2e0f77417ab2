"""Writes docs/encoders.md and docs/dense.md from docs/results: python docs/make_encoders.py"""
# ruff: noqa: E501  (the texts of the pages have long lines)

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODELS = {
    "vit_tiny_patch16_224": "ViT-Ti (AugReg)",
    "deit_tiny_patch16_224": "DeiT-Ti, its LayerNorms rounded",
    "vit_small_patch14_dinov2": "ViT-S/14, saliency",
}
ENCODERS = """\
# Encoders: how far is an embedding?

Written by `python docs/make_encoders.py` from `docs/results`; a test compares it with them.

Most ViTs are read as an embedding: CLIP, SigLIP, DINOv2 and 3, any classifier without its head. `evaluate`, `compare`, `tune` and
`accelerate` choose the measure by what a model returns (`--measure` overrules it), and every table, page, recipe and journal names it:

| the model returns | measure | figures | targets of `tune` |
|---|---|---|---|
| scores of classes | `classes` | top-1, top-5, agreement, KL | `--max-kl`, `--min-agreement` |
| an embedding, pooled features | `embedding` | 1 - cosine (mean, 95th percentile), how many of the 10 nearest images stay the same, k-NN accuracy where there are labels, zero-shot agreement with `--text-embeddings` | `--min-cosine`, `--min-neighbours` |
| one number, or a regression (`--measure numbers`) | `numbers` | difference to the unreduced model by the mean size of its outputs | `--max-error` |
| tokens, or any model with `--measure dense` | `dense` | relative error and 1 - cosine of restored features, patch by patch ([dense.md](dense.md)) | `--max-error`, `--min-cosine` |

```
gtp-vit evaluate vit_small_patch14_dinov2 --pretrained --data-dir photos
gtp-vit compare open_clip:ViT-B-32/openai --pretrained --data-dir photos --output compared
gtp-vit tune hf:facebook/dinov2-small --data-dir photos --min-neighbours 90 --output recipe.json
```

Neighbours are sought among the evaluated images, of more than 5,000 among 5,000 that are evenly spread. k-NN accuracy is that of the
10 nearest other images' labels, near ones counting more; it is left out where labels are all alike or all different.

## Does it rank rightly?

Two classifiers without their heads, all methods at {share} of the MACs, {images} ImageNet validation images, no finetuning
(`python benchmarks/encoders.py`). The images were read without EXIF orientation (`--ignore-exif`). The head is used for one thing: the KL that a user of the classifier would see from the same
embedding. {verdict} So the angle ranks nearly as the classifier does. On these models a softmax over channels, which means nothing by
itself, does no worse; we had expected it to.

{ratios}

{tables}

Brackets are 95 % intervals over images. "calibrated" is the default shape after `gtp_vit.calibrate(encoder, images)` on 300 training images: it has
learned what matters to the embedding. "tuned" is the package's recipe, calibrated and searched on the classifier with its head; `patch(encoder)` takes
it on these weights, and it holds for this measure, too: what matters to the classes matters to the embedding.
"""
DENSE = """\
# Features of all patches

Written by `python docs/make_encoders.py` from `docs/results`; a test compares it with them.

```python
fast = gtp_vit.patch(model, restore=True)
fast.forward_features(images)  # [B, prefix + all patches, C], in order
fast.forward_intermediates(images, [2, 5, 8])  # NCHW, as a detector or a depth head reads them
```

Tokens are reduced inside the model as ever; where it returns tokens (`forward_features`, `forward_intermediates`,
`get_intermediate_layers`, timm's `features_only=True`, Hugging Face's `last_hidden_state` and `hidden_states`, open_clip's tokens) every
patch has a feature. What a model pools is pooled from the tokens that remain, as without restore. It costs no MACs, is
differentiable, and is part of exported programs. With nothing removed it is the original, exactly.

## How

A removed patch has an owner, the token that took most of it. It gets the owner's feature and a part of what it had of its own when it
was removed: with d = its feature before - its owner's after the reduction in layer l, restored after layer L =
owner's + (l + 1) / (L + 2) d, summed over all reductions (`src/gtp_vit/core/restoring.py`). Nothing is fitted. Least squares on
calibration images, layer by layer, find nearly these factors; a full linear map of d, fitted, is hardly nearer. A patch that a method
drops without an owner (DynamicViT, ATS, DiffRate and others; `patch` warns) belongs to the nearest token in the grid.

Relative error per patch against the unreduced model on {candidate_images} calibration images, read, as all on this page, without EXIF orientation (`python benchmarks/dense.py candidates`).
copy: the owner's feature; whole: with all of d; faded: as above, and what the package does; for GTP also transposed: a mean of all tokens that
took a part of the patch. The last column is the paired difference of faded to copy, 95 % interval. Layer 11 is after the last norm.

{candidates}

All figures, at 0.8, 0.65 and 0.55 of the MACs and layers 2, 5, 8, 11: [results/dense-candidates.json](results/dense-candidates.json).

## A real head

A ViT-S/14 of DINOv2's shape with a saliency decoder, {heat_images} validation images, restored features through the decoder
(`python benchmarks/dense.py heat-maps`): correlation of the heat map with the unreduced model's, its mean and its median / relative error per patch /
1 - cosine of the class token. Methods are at their defaults with the setting that says how much is removed chosen for the MACs. "calibrated" is GTP+
after `gtp_vit.calibrate` on 200 training images, for the class token's embedding or for the features of patches (`measure="dense"`), with the default
shape: a third model that nothing was designed on. The rows dense-0.65 are recipes of `gtp-vit tune --measure dense --macs 0.65 --evaluations 30` on 100
training images, without and with calibration (`learned`): they bring features nearer, and leave the heat map about where it was.

{heat}

Calibrated for what is read, GTP+ is best at 0.8 and 0.65: features at 0.65 are {nearer:.0f} % nearer than without calibration, the class token
{class_nearer:.0f} %. At 0.55 ATC's features are as near. We had hoped for a mean correlation of 0.996 at 0.65 after tuning for dense output: it is {best:.3f}, its median {median:.3f}: a
few images pull the mean down. More was tried for it on training images. All patches back before the last layers, which
then run on all of them, at the same MACs (`python benchmarks/dense.py late`): correlation {late}. A calibration for the decoder's own output, by hand on
64 images: median 0.9969 instead of GTP+'s 0.9967, mean 0.9922 instead of 0.9931, as single images became worse.
Nine tenths of the squared error are in patches that were merged. A mean of the five most similar tokens that stay, with weights that come nearest to the patch when it
leaves, instead of its owner (by hand, 64 training images, the recipe dense-0.65-learned): error 0.0909 instead of 0.0976, correlation 0.9956 instead of 0.9949. It is better,
but needs a system of equations for every patch, which engines do not have, and on these images, some of which the recipe was searched on, it is still below 0.996: not in the package.

![A drawn image; features and segments of its patches, and below its heat maps, unreduced and restored](saliency.png)

(A drawing, as ImageNet's photos may not be published; GTP+ at 0.65 of the MACs, `python benchmarks/dense.py picture`.)

## Tuning for dense output

A schedule that is good for the class token is not the best for patches: it may merge what the class token does not read.

```
gtp-vit tune vit_small_patch14_dinov2 --pretrained --data-dir photos --measure dense --macs 0.65 --output dense.json
gtp-vit visualise vit_small_patch14_dinov2 cat.jpg --pretrained --method dense.json --features
```

`accelerate(model, images, measure="dense")` does the first and patches with restore. `visualise --features` draws features of both models side
by side (principal components as colours, k-means segments below) and says how many patches keep their segment.
"""


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def inversions(rows: list[dict[str, Any]], figure: str) -> int:
    """Pairs of methods that a figure puts in the other order than the classifier's KL."""
    pairs = itertools.combinations([row["figures"] for row in rows if row["settings"] is not None], 2)
    return sum((one["head_kl"][0] < two["head_kl"][0]) != (one[figure][0] < two[figure][0]) for one, two in pairs)


def encoders() -> str:
    rows = load("encoders")
    said, ratios = [], []
    for model, title in MODELS.items():
        own = [row for row in rows if row["model"] == model]
        if not own:
            continue
        pairs = len(own[1:]) * (len(own) - 2) // 2
        said.append(
            f"{title}: of {pairs} pairs of methods 1 - cosine puts {inversions(own, 'distance')} in another order than this "
            f"KL does, a softmax over channels {inversions(own, 'channel_kl')}."
        )
        distance = {row["method"]: row["figures"]["distance"][0] for row in own}
        of_tome = {name: f"{value / distance['tome']:.2f}" for name, value in distance.items()}
        ratios.append(
            f"{title}: GTP+ has {of_tome['gtp_plus']} of ToMe's 1 - cosine, calibrated on the encoder "
            f"{of_tome['gtp_plus, calibrated']}, with the package's recipe {of_tome['gtp_plus, tuned']}."
        )
    return ENCODERS.format(
        share=0.65,
        images=f"{rows[0]['images']:,}",
        verdict=" ".join(said),
        ratios=" ".join(ratios),
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
        parts.append(f"{title}.\n\n{table(titles, cells)}")
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


def dense() -> str:
    tried, maps = load("dense-candidates"), load("dense-heat-maps")
    at_065 = {row["method"]: row for row in maps if row["share"] == 0.65}
    plain = at_065["gtp_plus"]
    for_class, for_dense = (at_065[f"gtp_plus, calibrated for {each}"] for each in ("embedding", "dense"))
    return DENSE.format(
        candidate_images=tried[0]["images"],
        candidates=candidates(tried),
        heat_images=maps[0]["images"],
        heat=heat(maps),
        nearer=100 * (1 - for_dense["patch_error"][0] / plain["patch_error"][0]),
        class_nearer=100 * (1 - for_class["class_distance"][0] / plain["class_distance"][0]),
        best=for_dense["correlation"][0],
        median=for_dense["correlation_median"],
        late=", ".join(f"{row['correlation']:.3f} with {row['layers on all patches']}" for row in load("dense-late")),
    )


if __name__ == "__main__":
    (FOLDER / "encoders.md").write_text(encoders())
    (FOLDER / "dense.md").write_text(dense())
