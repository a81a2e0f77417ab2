"""Evo-ViT: the tokens that the class token attends to go through a stage of layers; the others wait and come back.

Shapes: B batch, M image tokens, M0 patches, K informative tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import check_layers
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import SettingError, check_name, check_range
from gtp_vit.tensors import full_precision, select_rows, split_by_score

Head = Literal["class", "pooled"]


@dataclass(frozen=True, kw_only=True, repr=False)
class EvoViT(Method):
    """Let only the informative tokens go through a stage; the others skip it and may be chosen again.

    >>> from gtp_vit import EvoViT, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), EvoViT(keep_ratio=0.5)))
    0.818 GMACs
    """

    name: ClassVar[str] = "evovit"
    source: ClassVar[Source] = Source("arXiv 2108.01390 (AAAI 2022)", "YifanXu74/Evo-ViT", "MIT")
    needs_class_token: ClassVar[bool] = True
    attention_inputs: ClassVar[str] = "class row"
    keep_ratio_field: ClassVar[str | None] = "keep_ratio"

    keep_ratio: float = 0.5
    """Share of the image tokens that is informative (the paper's p)."""
    stages: tuple[int, ...] | None = None
    """Layers before which tokens are chosen, counted from 0; by default at one and two thirds: 4 and 8 of 12."""
    layer_wise: bool = False
    """Choose again in every layer from the first stage on, as in the first part of the original's training."""
    tradeoff: float = 0.5
    """How much the newest layer counts in a token's attention score."""
    representative_token: bool = False
    """Add a weighted mean of the waiting tokens to the stage, and add its change to the waiting tokens."""
    head: Head = "class"
    """What the classifier reads in the model's forward: the class token, as the pre-trained model does, or the mean of
    all image tokens."""

    def build(self, vit: ViTInfo) -> EvoViTReducer:
        self.check_class_token(vit)
        check_range("keep_ratio", self.keep_ratio, 0, 1, exclude_low=True)
        check_range("tradeoff", self.tradeoff, 0, 1)
        check_name("head", self.head, get_args(Head))
        if self.head == "pooled" and vit.head_reads_image_tokens:
            raise SettingError(
                "head='pooled' is for models whose head reads the class token; this one's pools by itself"
            )
        return EvoViTReducer(self, vit)


class StageState(NamedTuple):
    """Evo-ViT's state between layers."""

    score: Tensor | None = None  # [B, M0]: the class token's attention to each patch, summed over heads
    informative: Tensor | None = None  # [B, K]: the patches that are in the stage; None = no stage is running
    x: Tensor | None = None  # [B, M0, C]: all image tokens as they were when the stage began
    mean: Tensor | None = None  # [B, 1, C]: the representative token as it was


class EvoViTReducer(Reducer):
    """Evo-ViT in a forward pass. Tokens keep their raster order: those that wait come back to their places."""

    def __init__(self, method: EvoViT, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        stages = (vit.depth // 3, 2 * vit.depth // 3) if method.stages is None else method.stages
        stages = check_layers("stages", tuple(dict.fromkeys(stages)), vit.depth, first=1)  # the first needs a score
        first = stages[0] if stages else vit.depth
        self.stages = tuple(range(first, vit.depth)) if method.layer_wise else stages
        self.ends = (*(layer - 1 for layer in self.stages[1:]), vit.depth - 1)
        self.reads_image_tokens = method.head == "pooled"
        # Scores are read when the next stage begins, so the last stage needs none.
        self.scored = range(first - 1, self.stages[-1]) if stages and method.keep_ratio < 1 else range(0)
        self.drops_patches = not method.representative_token

    def num_informative(self, patches: int) -> int:
        return max(int(patches * self.method.keep_ratio), 1)

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        patches = grid[0] * grid[1]
        inside = self.num_informative(patches)
        inside += int(self.method.representative_token and inside < patches)
        layers = []
        for layer in range(self.vit.depth):
            count = inside if self.stages and layer >= self.stages[0] else patches
            layers.append(LayerTokens(count, count, count, patches if layer in self.ends else count))
        return tuple(layers)

    def start(self, tokens: Tokens) -> Tokens:
        return tokens.replace(method_state=StageState())

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        patches = tokens.cell.shape[1]
        count = self.num_informative(patches) if layer in self.stages else patches
        if count == patches:
            return tokens
        score, x = tokens.method_state.score, tokens.image
        chosen, waiting = split_by_score(score, patches - count)
        if not self.method.representative_token:
            return tokens.keep(chosen).replace(method_state=StageState(score, chosen, x))
        weights = score.gather(1, waiting)
        weights = (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype).unsqueeze(1)
        with full_precision(x):
            mean = weights @ select_rows(x, waiting)
        return tokens.fuse(chosen, waiting, mean, patches).replace(method_state=StageState(score, chosen, x, mean))

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        return PLAIN if layer in self.scored else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        row = attention.statistics("class_row", heads="mean").class_row
        assert row is not None
        tokens, waiting, row = attention.add(), attention.tokens.method_state, row * self.vit.heads
        if waiting.informative is None:
            return tokens.replace(method_state=StageState(row))
        row, t = row[:, : waiting.informative.shape[1]], self.method.tradeoff  # without the representative token
        score = waiting.score.scatter(
            1, waiting.informative, (1 - t) * waiting.score.gather(1, waiting.informative) + t * row
        )
        return tokens.replace(method_state=StageState(score, waiting.informative, waiting.x, waiting.mean))

    def after(self, layer: int, tokens: Tokens) -> Tokens:
        waiting = tokens.method_state
        if layer not in self.ends or waiting.informative is None:
            return tokens
        count, x = waiting.informative.shape[1], waiting.x
        if waiting.mean is not None:
            x = x + (tokens.image[:, count:] - waiting.mean)
        index = waiting.informative.unsqueeze(-1)
        image = x.scatter(1, index.expand(-1, -1, x.shape[2]), tokens.image[:, :count])
        cell = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        owner = None if tokens.owner is None else cell
        x = torch.cat([tokens.x[:, : tokens.prefix], image], dim=1)
        return tokens.replace(
            x=x, cell=cell, token_id=None, size=None, owner=owner, method_state=StageState(waiting.score)
        )

    def finish(self, tokens: Tokens, norm: Callable[[Tensor], Tensor]) -> Tensor:
        if self.method.head == "class":
            return norm(tokens.x)
        mean = tokens.image.mean(dim=1, keepdim=True)  # before the norm, as in the original
        return norm(torch.cat([mean, tokens.x[:, 1 : tokens.prefix]], dim=1))

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        patches, total = forward_pass.grid[0] * forward_pass.grid[1], 0
        for layer, step in enumerate(forward_pass.steps):
            total += (
                self.class_row_macs(step.keys) if layer in self.scored and layer < len(forward_pass.reducing) else 0
            )
            if layer in self.stages and self.method.representative_token:
                total += (patches - self.num_informative(patches)) * self.vit.dim
        return total
