"""All that a new family of models is: one file like this one, and one line in BACKBONES, or an entry point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.backbones.modules import check_images, is_overridden
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo


class ToyBlock(nn.Module):
    """A transformer block whose modules are called as nowhere else."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (self.split(layer(y)) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ToyViT(nn.Module):
    """The network: 8 x 8 patches of 8 pixels, a class token, ten classes."""

    def __init__(self, dim: int = 24, depth: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 8, stride=8)
        self.start = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, 65, dim))
        self.layers = nn.ModuleList(ToyBlock(dim, heads) for _ in range(depth))
        self.last, self.classes = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def tokens(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return torch.cat([self.start.expand(len(x), -1, -1), x], dim=1) + self.places

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for layer in self.layers:
            x = layer(x)
        return self.classes(self.last(x)[:, 0])


class Toys(Library):
    """Where these networks come from."""

    title = "the toys"
    prefix = "toy"

    def has_model(self, name: str) -> bool:
        return name in SIZES

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        with torch.device("meta" if meta else "cpu"):
            return ToyViT(**SIZES[name]).eval()


SIZES = {"small": {"depth": 4}, "deep": {"depth": 6}}
TOYS = Toys()


class ToyForwards:
    """The entry points of a patched ToyViT."""

    def forward(self, images: Tensor) -> Tensor:
        model: Any = self
        tokens = run(model, images, prefix_only=model.reduction.may_skip_image_tokens(model))
        return model.classes(model.reducer.finish(tokens, model.last)[:, 0])


class ToyBackbone(Backbone):
    """What the library must know of a ToyViT."""

    classes = ("ToyViT",)
    models = "the toys of the tests"
    forwards = ToyForwards

    def library(self) -> Library:
        return TOYS

    def model_names(self) -> list[str]:
        return list(SIZES)

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        return {"toy": functools.partial(ToyViT, depth=depth)}

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, ToyViT)

    def unsupported_reason(self, model: Any) -> str | None:
        if type(model) is not ToyViT or is_overridden(model, hooks=False):
            return "the model's forward may be its own"
        for index, block in enumerate(model.layers):
            if type(block) is not ToyBlock or is_overridden(block, hooks=True):
                return f"layers[{index}] is not a plain ToyBlock"
        return None

    def vit_info(self, model: Any) -> ViTInfo:
        dim, heads = model.stem.out_channels, model.layers[0].heads
        return ViTInfo(
            depth=len(model.layers),
            dim=dim,
            heads=heads,
            head_dim=dim // heads,
            grid=self.grid(model),
            prefix=1,
            class_token=True,
            head_reads_image_tokens=False,
            head_averages_image_tokens=False,
        )

    def inputs(self, model: Any) -> Inputs:
        kind, width = self.output(model)
        classes = width if kind == "classes" else 0
        return Inputs("toy_vit", size=(64, 64), any_size=False, patch=(8, 8), channels=3, classes=classes)

    def output(self, model: Any) -> Output:
        has_classes = isinstance(model.classes, nn.Linear)
        return Output("classes", 10) if has_classes else Output("features", model.last.normalized_shape[0])

    def remove_classifier(self, model: Any) -> None:
        model.classes = nn.Identity()

    def grid(self, model: Any) -> tuple[int, int]:
        return 8, 8

    def head_reads_image_tokens(self, model: Any) -> bool:
        return False

    def embed(self, model: Any, images: Tensor) -> Tokens:
        check_images(images, model.stem, (64, 64), None)
        x = model.tokens(images)
        return Tokens(x, torch.arange(64, device=x.device).expand(len(x), -1), prefix=1, grid=(8, 8))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.layers

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        y = block.before(tokens.x)
        q, k, v = block.split(block.q(y[:, :queries])), block.split(block.k(y)), block.split(block.v(y))
        return QKV(q, k, v, scale=q.shape[-1] ** -0.5)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return block.out(out)

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.down(F.gelu(block.up(block.between(x))))

    def norm(self, model: Any) -> nn.Module:
        return model.last

    def head(self, model: Any, features: Tensor) -> Tensor:
        return model.classes(features[:, 0])

    def classifier(self, model: Any) -> nn.Module:
        return model.classes
