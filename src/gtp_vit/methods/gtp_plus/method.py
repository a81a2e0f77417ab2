"""GTP+: redundant and unimportant tokens are merged into the most similar token that stays.

A layer that removes P tokens does so after the attention residual. It chooses the P tokens that cost least to merge:
those that matter little to the output and resemble a more important token. Each is merged into the most similar of the
more important tokens that stay. The features are averaged, weighted by size, and scaled to the largest norm among the
merged tokens; the sizes are added, so that they count patches; and attention favours tokens by their size.

The importance of a token is the class token's attention to it, or all tokens' where there is no class token. After a
calibration on some images (calibration.py) it is predicted by a linear probe of the token's features; then tokens in
cells that the model uses as registers stay, and nothing is merged into them.

This file has the settings, then the forward pass; the arithmetic is in merge.py.

Shapes: B batch, M image tokens, M0 patches, L layers, C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gtp_vit.core.attention import Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule, default, round_schedule
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import ScheduleError, SettingError, check_range
from gtp_vit.kernels import NormParams
from gtp_vit.kernels.arguments import GTPPlusMergeByProbeInputs, GTPPlusMergeInputs, GTPPlusMergeResult
from gtp_vit.methods.gtp_plus.calibration import RECALIBRATE_HINT, Calibration, calibration_from_text
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge, gtp_plus_merge_by_probe, num_similarities


@dataclass(frozen=True, kw_only=True, repr=False)
class GTPPlus(Method):
    """Merge each unimportant token into the most similar of the more important tokens.

    >>> from gtp_vit import GTPPlus, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), GTPPlus(remove=8)))
    0.956 GMACs
    """

    name: ClassVar[str] = "gtp_plus"
    source: ClassVar[Source] = Source("none, our own", "this package", "Apache-2.0")
    attention_inputs: ClassVar[str] = "class row; column sums where there is no class token; nothing if calibrated"
    schedule_field: ClassVar[str | None] = "remove"
    opaque_fields: ClassVar[tuple[str, ...]] = ("calibration",)
    tunable: ClassVar[dict[str, tuple[float, float]]] = {"importance_floor": (0.02, 20.0), "size_bias": (0.3, 1.5)}

    remove: Schedule = "default:8"
    """Tokens removed in each layer: a number, one per layer, or a named schedule."""
    importance_floor: float = 0.5
    """Importance of a token that gets no attention; the mean token has 1. Large values ignore importance."""
    preserve_norm: bool = True
    """Scale each averaged token to the largest norm among the tokens it was merged from."""
    size_bias: float = 0.9
    """How much attention favours large tokens: 1 = as if all their merged tokens were still there, 0 = not at all."""
    calibration: str | None = None
    """What was learned from the model, as text in recipes of calibrate or tune; as a flag, the path of a recipe."""

    def build(self, vit: ViTInfo) -> GTPPlusReducer:
        check_range("importance_floor", self.importance_floor, 0, 1000)
        check_range("size_bias", self.size_bias, 0, 2)
        if self.calibration is None:
            return GTPPlusReducer(self, vit)
        return CalibratedReducer(self, vit, calibration_from_text(self.calibration))

    def check_weights(self, weights: Iterable[Tensor]) -> None:
        if self.calibration is not None:
            calibration_from_text(self.calibration).check_weights(weights)

    def with_fingerprint_of(self, weights: Iterable[Tensor]) -> GTPPlus:
        if self.calibration is None:
            return self
        calibration = calibration_from_text(self.calibration).with_fingerprint_of(weights)
        return dataclasses.replace(self, calibration=calibration.to_text())

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> GTPPlus:
        """The default schedule, scaled: 0.5 removes half of the tokens, 1 leaves one from its first layer on."""
        numbers = default(vit.depth, vit.image_tokens, vit.image_tokens / (2 * vit.depth))
        if not vit.head_reads_image_tokens:
            numbers[-1] = 0  # the last block computes no image tokens then, so removing some has no effect
        scale = strength / max(1 - strength, 1e-9)
        return cls(remove=tuple(round_schedule([scale * number for number in numbers], vit.image_tokens)))


class GTPPlusReducer(Reducer):
    """GTP+ in a forward pass."""

    drops_patches = False

    def __init__(self, method: GTPPlus, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.plan = self.removals(vit.grid)

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        power, weights = self.method.size_bias, tokens.key_sizes
        if weights is None or power == 0:
            return super().adjust(layer, tokens)
        return Adjustments(weights if power == 1 else weights.pow(power))

    def reduce(self, attention: LayerAttention) -> Tokens:
        removed = self.removals_of(attention.tokens)[attention.layer]
        if removed == 0:
            return attention.add()
        tokens, norm = attention.tokens, attention.mlp_norm
        merged = self.merge(attention, removed, norm)
        return tokens.replace(
            x=merged.x,
            cell=tokens.cell.gather(1, merged.keep),
            size=merged.size,
            owner=tokens.owners_after(merged.keep, merged.drop, merged.target),
            normed=None if norm.weight is None else merged.normed,
        )

    def merge(self, attention: LayerAttention, removed: int, norm: NormParams) -> GTPPlusMergeResult:
        """Add the attention branch, and merge `removed` tokens into others."""
        name = "class_row" if self.vit.class_token else "column_sums"
        stats, tokens, method = attention.statistics(name, heads="mean"), attention.tokens, self.method
        importance = stats.class_row if self.vit.class_token else stats.column_sums
        assert importance is not None  # `statistics` computes what it is asked for
        inputs = (tokens.x, attention.branch(), importance, tokens.size)
        return gtp_plus_merge(
            tokens.ops, GTPPlusMergeInputs(*inputs, removed, method.importance_floor, method.preserve_norm, *norm)
        )

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        """MACs of the similarities and of the class token's row; merging only adds, which is not counted."""
        total = 0
        for step in forward_pass.reducing:
            if step.keys > step.out:
                total += self.class_row_macs(step.keys) if self.vit.class_token else 0
                total += num_similarities(step.keys) * self.vit.dim
        return total


class CalibratedReducer(GTPPlusReducer):
    """GTP+ with a calibration. It needs no statistics of attention, so attention stays fused."""

    probe: Tensor  # [L, C] float32, whatever the model's dtype
    registers: Tensor  # [M0 + 1] float32: 1 for a cell used as a register, else 0; the last is for tokens in no cell

    def __init__(self, method: GTPPlus, vit: ViTInfo, calibration: Calibration) -> None:
        super().__init__(method, vit)
        if calibration.probe.shape != (vit.depth, vit.dim):
            layers, channels = calibration.probe.shape
            raise SettingError(
                f"the calibration is for {layers} layers of {channels} channels, this model has {vit.depth} of "
                f"{vit.dim}; {RECALIBRATE_HINT}"
            )
        self.calibration, self.min_tokens = calibration, len(calibration.register_cells(vit.grid)) + 1
        self._check_registers(vit.grid)
        self.register_buffer("probe", calibration.probe.clone(), persistent=False)
        self.register_buffer("registers", self._register_cells(vit.grid), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move the buffers with the model, but keep them in float32: rounding would change which tokens are removed."""
        probe, registers = self.probe, self.registers
        super()._apply(fn, recurse)
        self.probe, self.registers = (tensor.to(self.probe.device) for tensor in (probe, registers))
        return self

    def _register_cells(self, grid: tuple[int, int]) -> Tensor:
        cells = torch.zeros(grid[0] * grid[1] + 1)
        cells[list(self.calibration.register_cells(grid))] = 1
        return cells

    def _check_registers(self, grid: tuple[int, int]) -> None:
        left, registers = grid[0] * grid[1] - sum(self.removals(grid)), len(self.calibration.register_cells(grid))
        if left <= registers:
            raise ScheduleError(
                f"the schedule leaves {left} of {grid[0] * grid[1]} image tokens, and the model uses {registers} cells "
                f"as registers, which stay: leave at least {registers + 1}"
            )

    def _protected(self, tokens: Tokens) -> Tensor | None:
        """1 for tokens in a cell used as a register, else 0, [B, M]; None if the model uses no registers."""
        if not self.calibration.registers:
            return None
        cells = self.registers
        if tokens.grid != self.vit.grid:
            self._check_registers(tokens.grid)
            cells = self._register_cells(tokens.grid).to(cells.device)
        return cells[tokens.cell]

    def merge(self, attention: LayerAttention, removed: int, norm: NormParams) -> GTPPlusMergeResult:
        tokens, method = attention.tokens, self.method
        inputs = (tokens.x, attention.branch(), self.probe[attention.layer], tokens.sizes, self._protected(tokens))
        return gtp_plus_merge_by_probe(
            tokens.ops,
            GTPPlusMergeByProbeInputs(*inputs, removed, method.importance_floor, method.preserve_norm, *norm),
        )

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        """MACs of the similarities and of the probe's product with every image token."""
        reducing = [step.keys for step in forward_pass.reducing if step.keys > step.out]
        return sum((num_similarities(keys) + keys) * self.vit.dim for keys in reducing)
