"""How near are restored features to the unreduced ones, patch by patch? Candidates, depths, methods, and a real head.

    python benchmarks/dense.py candidates --weights FOLDER --images imagenet/calibration --json candidates.json
    python benchmarks/dense.py heat-maps --weights FOLDER --images imagenet/val --json heat-maps.json

`candidates` compares ways to restore on calibration images, at layers 2, 5, 8 and 11 (the last after its norm): copy
(the owner's feature), whole (and all that the patch had of its own), faded (what the package does), and for GTP the
transposed propagation, where a removed patch is a mean of all that took a part of it. `heat-maps` puts restored
features through the saliency decoder, on validation images, for all methods. Both resume after an interruption.
`late` gives all patches back before the last layers, which then run on all of them, at the same MACs. `picture` draws
one image with its features and heat maps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from gtp_vit import GTPPlus, Identity, calibrate, patch
from gtp_vit.core import loop
from gtp_vit.core.loop import run
from gtp_vit.core.reducer import Method
from gtp_vit.core.restoring import restore_patches
from gtp_vit.core.schedule import CALIBRATED_SHAPE
from gtp_vit.core.tokens import Tokens
from gtp_vit.data.loader import evenly_spaced_images, take_images
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.methods import METHODS
from gtp_vit.metrics.evaluate import bootstrap
from gtp_vit.patching import host_of
from gtp_vit.profiling.budget import method_at_cost
from gtp_vit.recipes.recipe import read_recipe
from gtp_vit.report.patch_features import feature_panels
from gtp_vit.tensors import select_rows, split_by_score
from gtp_vit.tuning.space import ScheduleLimits, ScheduleSpace
from subject import at_share

SHARES = (0.8, 0.65, 0.55)
LAYERS = (2, 5, 8, 11)
FILES = {
    "vit_tiny_patch16_224": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "deit_tiny_patch16_224": "deit_tiny_patch16_224.rounded-layernorm.safetensors",
    "vit_small_patch14_dinov2": "vit_small_patch14_dinov2.saliency.fp16.safetensors",
}
SALIENCY = "vit_small_patch14_dinov2"


def load(name: str, weights: Path) -> Any:
    """A model of FILES in eval mode; the saliency model at 224 pixels, with resampled positions."""
    stored = {key: value.float() for key, value in load_file(weights / FILES[name]).items()}
    sizes: dict[str, Any] = {"img_size": 224, "num_classes": 0} if name == SALIENCY else {}
    model = timm.create_model(name, **sizes).eval()
    if name == SALIENCY:
        stored["pos_embed"] = resample_abs_pos_embed(stored["pos_embed"], new_size=[16, 16], num_prefix_tokens=1)
    model.load_state_dict(stored)
    return model


def read(model: Any, folder: Path, count: int) -> Tensor:
    """Images, evenly spread over the folder, in the size of the model's grid."""
    settings = DataSettings(folder, crop_pct=0.9, img_size=224, labels=False, ignore_exif=True)
    return take_images(evenly_spaced_images(open_images(model, settings), count), count, model)


class Decoder(nn.Module):
    """The saliency model's head, from a 16 x 16 map of features to a 128 x 128 heat map."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        widths = (384, 256, 128, 64)
        for number in (1, 2, 3):
            self.add_module(f"upconv{number}", nn.ConvTranspose2d(*widths[number - 1 : number + 1], 4, 2, 1))
            self.add_module(f"bn{number}", nn.BatchNorm2d(widths[number]))
        self.final_conv = nn.Conv2d(64, 1, 1)
        stored = {k: v.float() for k, v in load_file(weights / "saliency_decoder.fp16.safetensors").items()}
        found = self.load_state_dict(stored, strict=False)
        assert not found.unexpected_keys
        assert all("num_batches" in key for key in found.missing_keys)
        self.eval()

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, 256, 384] -> heat maps [B, 128, 128]."""
        x = features.transpose(1, 2).unflatten(2, (16, 16))
        for number in (1, 2, 3):
            x = F.relu(self.get_submodule(f"bn{number}")(self.get_submodule(f"upconv{number}")(x)))
        return self.final_conv(x).sigmoid()[:, 0]


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Pearson's, of each image's heat maps, [B]."""
    one, other = (each.flatten(1) - each.flatten(1).mean(dim=1, keepdim=True) for each in (one, other))
    return F.cosine_similarity(one, other, dim=1)


@dataclass
class Lost:
    """What patches lost at each reduction, and for GTP how much each token has of each patch."""

    parts: list[tuple[int, Tensor]]
    membership: Tensor | None = None  # [B, M0, M]


def watched(model: Any, images: Tensor, observe: Callable[[Tokens], None]) -> Lost:
    """Run a model with restore, and record what `record_losses` adds up."""
    seen = Lost([])
    own = loop.record_losses

    def followed(reducer: Any, layer: int, before: Tokens, after: Tokens, branch: Tensor | None = None) -> Tokens:
        found = own(reducer, layer, before, after, branch)
        if found.cell is not before.cell and found.restore_residual is not None:
            if found.restore_residual.ndim == 0:
                seen.parts.clear()
            else:
                seen.parts.append((layer, (found.restore_residual - before.restore_residual) / (layer + 1)))
            if reducer.method is not None and reducer.method.name == "gtp":
                seen.membership = transposed(reducer, before, found, seen.membership)
        return found

    loop.record_losses = followed
    try:
        with torch.no_grad():
            run(model, images, observe=observe, restore=True)
    finally:
        loop.record_losses = own
    return seen


def transposed(reducer: Any, before: Tokens, after: Tokens, membership: Tensor | None) -> Tensor:
    """Each patch as a mean of the tokens that took a part of it, weighted by these parts; [B, M0, M]."""
    if membership is None:
        membership = torch.eye(before.cell.shape[1]).expand(len(before.x), -1, -1)
    stays = (before.cell.unsqueeze(2) == after.cell.unsqueeze(1)).any(dim=2)
    kept, gone = split_by_score(stays.float(), before.cell.shape[1] - after.cell.shape[1])
    weights = reducer._weights(before, kept, gone)  # [B, K, P]
    share = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)
    rows = membership.transpose(1, 2)  # [B, M, M0]
    return (select_rows(rows, kept) + share @ select_rows(rows, gone)).transpose(1, 2)


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean over an image's patches, [B]."""
    return ((found - wanted).norm(dim=2) / wanted.norm(dim=2)).mean(dim=1)


def errors(found: Tensor, wanted: Tensor) -> dict[str, list[float]]:
    """Relative error and 1 - cosine, each the mean over an image's patches."""
    error = relative_error(found, wanted)
    return {"error": error.tolist(), "distance": (1 - F.cosine_similarity(found, wanted, dim=2)).mean(dim=1).tolist()}


def candidates_of(model: Any, method: Method, images: Tensor, wanted: list[Tensor]) -> list[dict[str, Any]]:
    """Figures of each candidate at each layer, with the paired difference of each to plain copies."""
    fast = patch(model, method, restore=True, quiet=True)
    states: list[Tokens] = []
    lost = watched(fast, images, states.append)
    rows = []
    for layer in LAYERS:
        tokens = states[layer + 1]
        norm = model.norm if layer == 11 else nn.Identity()
        copied = tokens.image
        if tokens.owner is not None and tokens.restore_residual is not None and tokens.restore_residual.ndim:
            copied = select_rows(tokens.image, tokens.owner)
        whole = copied + sum((part for at, part in lost.parts if at <= layer), torch.zeros(()))
        found = {"copy": copied, "whole": whole, "faded": restore_patches(tokens)[:, tokens.prefix :]}
        if lost.membership is not None and layer == 11:
            found["transposed"] = lost.membership @ tokens.image
        target = norm(wanted[layer])
        figures = {name: errors(norm(each), target) for name, each in found.items()}
        for name, each in figures.items():
            difference = torch.tensor([each["error"]]) - torch.tensor([figures["copy"]["error"]])
            interval = bootstrap(difference.numpy())[0]
            row = {"layer": layer, "candidate": name, **{key: sum(v) / len(v) for key, v in each.items()}}
            rows.append({**row, "error_minus_copy": [interval.value, interval.low, interval.high]})
    return rows


@dataclass(frozen=True)
class Candidates:
    """Ways to restore, on calibration images."""

    weights: Path
    images: Path
    json: Path
    count: int = 48
    methods: tuple[str, ...] = ("gtp_plus", "tome", "gtp", "evit", "diffrate", "dynamicvit")

    def run(self) -> None:
        rows = json.loads(self.json.read_text()) if self.json.exists() else []
        for name in FILES:
            model = load(name, self.weights)
            images = read(model, self.images, self.count)
            costs, states = host_of(model).costs(), []
            with torch.no_grad():
                run(patch(model, Identity()), images, observe=lambda tokens, states=states: states.append(tokens.image))
            for share in SHARES:
                for method in self.methods:
                    if any((row["model"], row["share"], row["method"]) == (name, share, method) for row in rows):
                        continue
                    settings = method_at_cost(costs, method, share * costs.unreduced)
                    found = candidates_of(model, settings, images, states[1:])
                    head = {"model": name, "share": share, "method": method, "images": self.count}
                    rows += [{**head, **row} for row in found]
                    self.json.write_text(json.dumps(rows, indent=0) + "\n")
                    last = {row["candidate"]: round(row["error"], 4) for row in found if row["layer"] == 11}
                    print(name, share, method, last, flush=True)


@dataclass(frozen=True)
class HeatMaps:
    """The saliency model with its decoder, all methods, and recipes that were tuned for dense output."""

    weights: Path
    images: Path
    json: Path
    count: int = 100
    recipes: tuple[str, ...] = ()
    """Recipes to measure as well."""
    methods: tuple[str, ...] = ()
    """Names of methods; all if none is given."""
    learn: Path | None = None
    """Folder of other images: GTP+ is then measured with what it learned from 200 of them as well."""

    def run(self) -> None:
        rows = json.loads(self.json.read_text()) if self.json.exists() else []
        model, decoder = load(SALIENCY, self.weights), Decoder(self.weights)
        images, costs = read(model, self.images, self.count), host_of(model).costs()
        wanted = features_of(model, images)
        maps, class_tokens = decoded(decoder, wanted[0]), wanted[1]
        plans: list[tuple[str, float, Method]] = []
        for share in SHARES:
            for name in self.methods or [name for name in METHODS if name != "identity"]:
                plans.append((name, share, method_at_cost(costs, name, share * costs.unreduced)))
        plans += self.learned(model)
        for path in self.recipes:
            method = read_recipe(path).method
            plans.append((f"{method.name}, {Path(path).stem}", costs.macs_with(method) / costs.unreduced, method))
        for name, share, method in plans:
            if any((row["method"], row["share"]) == (name, share) for row in rows):
                continue
            fast = patch(model, method, restore=True, quiet=True)
            patches, class_token = features_of(fast, images)
            figures = {
                "correlation": correlation(decoded(decoder, patches), maps),
                "patch_error": relative_error(patches, wanted[0]),
                "class_distance": 1 - F.cosine_similarity(class_token, class_tokens, dim=1),
            }
            intervals = bootstrap(torch.stack(list(figures.values())).double().numpy())
            row = {"method": name, "share": share, "macs": costs.macs_with(method), "images": self.count}
            row |= {key: [i.value, i.low, i.high] for key, i in zip(figures, intervals, strict=True)}
            row["correlation_median"] = float(figures["correlation"].quantile(0.5))
            rows.append({**row, "settings": method.to_dict()})
            self.json.write_text(json.dumps(rows, indent=0) + "\n")
            print(name, share, {key: round(row[key][0], 4) for key in figures}, flush=True)

    def learned(self, model: Any) -> list[tuple[str, float, Method]]:
        """GTP+ calibrated for the class token's embedding and for the features of patches, without a search."""
        if self.learn is None:
            return []
        images, costs = read(model, self.learn, 200), host_of(model).costs()
        found: list[tuple[str, float, Method]] = []
        for measure in ("embedding", "dense"):
            method = dataclasses.replace(calibrate(model, images, measure=measure).method, remove=CALIBRATED_SHAPE)
            space = ScheduleSpace(costs, method, ScheduleLimits())
            found += [(f"gtp_plus, calibrated for {measure}", share, at_share(space, share)) for share in SHARES]
        return found


@dataclass(frozen=True)
class Late:
    """All patches back before the last layers of the saliency model, at the same MACs: GTP+ on calibration images."""

    weights: Path
    images: Path
    json: Path
    count: int = 48
    share: float = 0.65
    whole: tuple[int, ...] = (0, 1, 2)
    """Layers at the end that run on all patches."""

    def run(self) -> None:
        model, decoder = load(SALIENCY, self.weights), Decoder(self.weights)
        images = read(model, self.images, self.count)
        wanted = features_of(model, images)[0]
        maps, rows = decoded(decoder, wanted), []
        for whole in self.whole:
            method, macs = self.method(model, whole)
            fast = patch(model, method, restore=True, quiet=True)
            with torch.inference_mode():
                found = torch.cat([self.features(model, fast, part, whole) for part in images.split(16)])
            row = {"layers on all patches": whole, "share": round(macs, 4), "images": self.count}
            row["correlation"] = round(float(correlation(decoded(decoder, found), maps).mean()), 4)
            row["patch_error"] = round(float(relative_error(found, wanted).mean()), 4)
            rows.append({**row, "method": str(method)})
            print(json.dumps(rows[-1]), flush=True)
            self.json.write_text(json.dumps(rows, indent=1) + "\n")

    def method(self, model: Any, whole: int) -> tuple[Method, float]:
        """GTP+ of its default shape that costs `share` together with the layers on all patches, and that cost."""
        costs, last = host_of(model).costs(), len(model.blocks) - whole
        low, high, best = 0.0, 1.0, None
        for _ in range(16):
            middle = (low + high) / 2
            given: Any = GTPPlus.at_strength(host_of(model).vit, middle)
            method = dataclasses.replace(given, remove=(*given.remove[:last], *[0] * whole))
            steps = patch(model, method, quiet=True).reducer.steps((16, 16))
            more = sum(block_macs(256, 256) - block_macs(step.keys, step.mlp) for step in steps[last:])
            found = (costs.macs_with(method) + more) / costs.unreduced
            if found <= self.share:
                best, high = (method, found), middle
            else:
                low = middle
        assert best is not None
        return best

    def features(self, model: Any, fast: Any, images: Tensor, whole: int) -> Tensor:
        last = len(model.blocks) - whole
        x = restore_patches(run(fast, images, layers=last, restore=True))
        for block in model.blocks[last:]:
            x = block(x)
        return model.norm(x)[:, 1:]


def block_macs(keys: int, mlp: int, channels: int = 384) -> int:
    """MACs of a block of the saliency model with so many patches in its attention and in its MLP."""
    keys, mlp = keys + 1, mlp + 1
    return 4 * keys * channels**2 + 2 * keys**2 * channels + 8 * mlp * channels**2


@dataclass(frozen=True)
class Picture:
    """One image, its heat maps and its features, unreduced and restored, side by side."""

    weights: Path
    image: Path
    output: Path
    share: float = 0.65

    def run(self) -> None:
        from PIL import Image

        model, decoder = load(SALIENCY, self.weights), Decoder(self.weights)
        seen = Image.open(self.image).convert("RGB").resize((224, 224))
        config = timm.data.resolve_data_config({"input_size": (3, 224, 224), "crop_pct": 1.0}, model=model)
        pixels = timm.data.create_transform(**config)(seen)[None]
        costs = host_of(model).costs()
        fast = patch(model, method_at_cost(costs, "gtp_plus", self.share * costs.unreduced), restore=True)
        both = [features_of(each, pixels)[0] for each in (model, fast)]
        features = feature_panels(seen, both[0][0], both[1][0], (16, 16))
        width, height = features.size
        canvas = Image.new("RGB", (width, height + 266), "white")
        canvas.paste(features, (0, 0))
        for index, each in enumerate(both, start=1):
            shades = (255 * decoded(decoder, each)[0]).byte().numpy()
            canvas.paste(Image.fromarray(shades).resize((256, 256)), (index * 266, height + 10))
        canvas.save(self.output, optimize=True)


def decoded(decoder: Decoder, features: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([decoder(part) for part in features.split(32)])


def features_of(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Normed features of all patches, and of the class token, which is what the model returns."""
    with torch.inference_mode():
        features = torch.cat([model.forward_features(part) for part in images.split(32)])
    return features[:, 1:], features[:, 0]


Command = (
    Annotated[Candidates, tyro.conf.subcommand("candidates")]
    | Annotated[HeatMaps, tyro.conf.subcommand("heat-maps")]
    | Annotated[Late, tyro.conf.subcommand("late")]
    | Annotated[Picture, tyro.conf.subcommand("picture")]
)

if __name__ == "__main__":
    tyro.cli(Command).run()  # type: ignore[arg-type]
