"""DynamicViT: small learned predictors decide in three stages which tokens stay; tokens leave before a layer.

In training no token leaves: decisions are sampled and mask attention. The losses are in training/dynamicvit.py.

Shapes: B batch, N tokens, M image tokens, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.attention import Adjustments
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import check_layers
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import SettingError, check_range
from gtp_vit.tensors import at_least_float32, split_by_score


@dataclass(frozen=True, kw_only=True, repr=False)
class DynamicViT(Method):
    """Drop tokens in three stages, chosen by predictors that must be trained.

    >>> from gtp_vit import DynamicViT, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), DynamicViT(keep_ratio=0.7)))
    0.801 GMACs
    """

    name: ClassVar[str] = "dynamicvit"
    source: ClassVar[Source] = Source("arXiv 2106.02034 (NeurIPS 2021)", "raoyongming/DynamicViT", "MIT")
    trained_parts: ClassVar[str] = "a predictor for each stage"
    keep_ratio_field: ClassVar[str | None] = "keep_ratio"
    weight_file_fields: ClassVar[tuple[str, ...]] = ("predictors",)

    keep_ratio: float = 0.7
    """Share of the image tokens that is left after the first stage (the paper's rho); its powers after the others."""
    pruning_loc: tuple[int, ...] | None = None
    """Layers before which tokens leave, from 0; by default at one, two and three quarters: 3, 6, 9 of 12."""
    predictors: str | None = None
    """A file with trained predictors: safetensors or pth, also a whole DynamicViT checkpoint."""
    seed: int = 0
    """Seed of the predictors' weights if no file is given; they then prune about as well as random."""

    def build(self, vit: ViTInfo) -> DynamicViTReducer:
        check_range("keep_ratio", self.keep_ratio, 0, 1, exclude_low=True)
        return DynamicViTReducer(self, vit)

    def warning(self) -> str | None:
        if self.predictors is not None or self.keep_ratio == 1:
            return None
        return (
            f"DynamicViT's predictors are untrained (seed {self.seed}): it prunes about as well as random. Train them, "
            "or give trained ones with predictors=FILE"
        )


class Predictor(nn.Module):
    """Log-probabilities that each token stays or goes; submodules are named as in the original's checkpoints."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_conv = nn.Sequential(nn.LayerNorm(dim, eps=1e-5), nn.Linear(dim, dim), nn.GELU())
        self.out_conv = nn.Sequential(
            *(nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU()),
            *(nn.Linear(dim // 4, 2), nn.LogSoftmax(dim=-1)),
        )

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """[B, M, C], and 1 for each token that is still there [B, M, 1] -> [B, M, 2]: stay, go."""
        x = self.in_conv(x)
        own, shared = x.chunk(2, dim=-1)
        mean = (shared * present).sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True)
        x = torch.cat([own, mean.expand_as(own)], dim=-1)
        *layers, log_softmax = self.out_conv
        for layer in layers:
            x = layer(x)
        return log_softmax(at_least_float32(x))  # numbers near log 1/2 would all be equal in half precision


class KeepDecisions(NamedTuple):
    """The decisions of the stages so far, in training: 1 = the token stays, [B, M, 1]."""

    stages: tuple[Tensor, ...] = ()  # after each stage


class DynamicViTReducer(Reducer):
    """DynamicViT in a forward pass."""

    def __init__(self, method: DynamicViT, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        if vit.dim % 4:
            raise SettingError(
                f"DynamicViT's predictors need a number of channels that is a multiple of 4, not {vit.dim}"
            )
        self.layers = check_layers("pruning_loc", method.pruning_loc, vit.depth)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(method.seed)
            self.predictors = nn.ModuleList(Predictor(vit.dim) for _ in self.layers)
            for module in self.predictors.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    nn.init.zeros_(module.bias)
        if method.predictors is not None:
            load_predictors(self.predictors, method.predictors)

    def tokens_after(self, stage: int, patches: int) -> int:
        return max(int(patches * self.method.keep_ratio ** (stage + 1)), 1)

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        patches = grid[0] * grid[1]
        left, layers = patches, []
        for layer in range(self.vit.depth):
            if layer in self.layers:
                left = self.tokens_after(self.layers.index(layer), patches)
            layers.append(LayerTokens(left, left, left, left))
        return tuple(layers)

    def start(self, tokens: Tokens) -> Tokens:
        return tokens.replace(method_state=KeepDecisions()) if self.training else tokens

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        if layer not in self.layers or self.method.keep_ratio == 1:
            return tokens
        stage = self.layers.index(layer)
        if self.training:
            return self._decide(stage, tokens)
        present = torch.ones(*tokens.cell.shape, 1, device=tokens.x.device, dtype=tokens.x.dtype)
        scores = self.predictors[stage](tokens.image, present)[..., 0]
        left = self.tokens_after(stage, tokens.grid[0] * tokens.grid[1])
        return tokens.keep(split_by_score(scores, scores.shape[1] - left)[0])

    def _decide(self, stage: int, tokens: Tokens) -> Tokens:
        """Sample which tokens stay, with a straight-through gradient."""
        stages = tokens.method_state.stages
        before = stages[-1] if stages else torch.ones(*tokens.cell.shape, 1, device=tokens.x.device)
        log_p = self.predictors[stage](tokens.image, before.to(tokens.x.dtype)).float()
        soft = (log_p + self.gumbel(stage, log_p)).softmax(dim=-1)
        hard = F.one_hot(soft.argmax(dim=-1), 2) + soft - soft.detach()
        return tokens.replace(method_state=KeepDecisions((*stages, hard[..., :1] * before)))

    def gumbel(self, stage: int, like: Tensor) -> Tensor:
        """Gumbel noise: the argmax of log-probabilities plus this is a sample."""
        return -torch.empty_like(like).exponential_().log()

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        if not self.training or not tokens.method_state.stages:
            return None  # before the first stage the masked softmax is the plain one but for its epsilon
        ones = torch.ones(tokens.x.shape[0], tokens.prefix, 1, device=tokens.x.device)
        stays = torch.cat([ones, tokens.method_state.stages[-1]], dim=1)
        itself = torch.eye(tokens.x.shape[1], device=tokens.x.device)
        row = stays.transpose(1, 2)
        return Adjustments(mask=row + (1 - row) * itself)  # a token may always attend to itself

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        if self.method.keep_ratio == 1:
            return 0
        dim, before, total = self.vit.dim, forward_pass.grid[0] * forward_pass.grid[1], 0
        for layer, step in enumerate(forward_pass.steps):  # before a layer, so the last one counts too
            if layer in self.layers:
                total += before * (dim**2 + dim**2 // 2 + dim // 2 * (dim // 4) + dim // 4 * 2)
            before = step.keys
        return total


def load_predictors(predictors: nn.ModuleList, file: str) -> None:
    """Load predictors from a file of their own, or from a whole checkpoint of DynamicViT or of a finetuned model."""
    from gtp_vit.weights import read_weights, why_no_weight

    stored = read_weights(Path(file))
    for prefix in ("score_predictor.", "reducer.predictors.", "predictors."):
        if any(key.startswith(prefix) for key in stored):
            stored = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    expected = predictors.state_dict()
    if set(stored) != set(expected):
        stages = len({key.split(".", 1)[0] for key in stored if ".in_conv." in key})
        raise SettingError(
            f"{file} has predictors of {stages} stages, and {len(predictors)} are needed; give pruning_loc as many "
            "layers as there are stages, or a different file"
        )
    for key, value in expected.items():
        if stored[key].shape != value.shape:
            raise SettingError(
                f"{file} has predictors for a different width: {key} is {tuple(stored[key].shape)}, this model needs "
                f"{tuple(value.shape)}; give predictors trained on a model with "
                f"{expected['0.in_conv.0.weight'].numel()} channels"
            )
        if (problem := why_no_weight(stored[key], value)) is not None:
            raise SettingError(f"{file}: {key} is {problem}")
    predictors.load_state_dict(stored)
