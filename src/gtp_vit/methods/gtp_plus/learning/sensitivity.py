"""The sensitivity of a model's output to each token, learned from a few hundred images without labels.

One backward pass per image through the unreduced model gives the gradient of its output at every token of every layer.
A ridge regression then predicts the logarithm of its square from the token itself: a probe for each layer. Cells whose
tokens are far longer than all others in most images are registers: the model keeps global information there.

Shapes: I images, B batch, N tokens, M image tokens, M0 patches, L layers, C channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.eval_mode import in_eval_mode
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import GTPError, SettingError, first_line
from gtp_vit.methods.gtp_plus.calibration import Calibration, weight_fingerprint
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.input_checks import check_has_weights, check_image_tensor
from gtp_vit.metrics.registry import select_measure
from gtp_vit.patching import host_of, patch, tower_of, unpatch

RIDGE = 1e-3  # of the mean square of an input
REGISTER_NORM_RATIO = 10.0  # times the median of an image: a token that is longer is none of the image's
REGISTER_FREQUENCY = 0.5  # share of the images in which a register's cell has such a token
MIN_FIT = 0.02  # share of the variance on other images below which a probe is noise
MIN_IMAGES = 20
MEMORY_BYTES = 2**30  # bytes for what a backward pass needs
BYTES_PER_VALUE = 80  # of it, for each channel of each token of each layer; about
Progress = Callable[[int, int], None]  # images done, of how many


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """A calibration, and how well it predicts."""

    calibration: Calibration
    fit: tuple[float | None, ...]  # share of the variance that each layer's probe explains on images it was not
    # fitted on; None = the layer has no probe, because nothing depends on its image tokens


@in_eval_mode
def learn_sensitivity(
    model: nn.Module,
    images: Tensor,
    *,
    measure: str | Measure = "auto",
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sensitivity:
    """Learn probes and registers of a model.

    Args:
        model: a supported ViT with the weights it will be used with; a patched one is taken as it was before.
        images: prepared as the model expects them, [I, channels, height, width].
        measure: what counts as damage to the output; auto chooses by what the model returns.
        batch_size: images at a time; fewer where a backward pass would take more than MEMORY_BYTES.
        seed: of the random directions in the output.
        progress: called after every batch.
    """
    check_image_tensor(images, MIN_IMAGES, "learn from", 400)
    check_has_weights(model)
    plain = unpatch(model)
    host = host_of(plain)
    chosen = select_measure(plain, measure)
    needed = BYTES_PER_VALUE * host.vit.depth * (host.vit.prefix + host.vit.image_tokens) * host.vit.dim  # for an image
    batch_size = max(min(batch_size, MEMORY_BYTES // needed), 1)
    watched = patch(plain, RecordTokens(), restore=chosen.restores or host.needs_all_patches is not None, quiet=True)
    vit, watcher = host.vit, tower_of(watched).reducer
    assert isinstance(watcher, TokenRecorder)
    generator = torch.Generator().manual_seed(seed)
    sums = Sums(vit)
    for first in range(0, len(images), batch_size):
        part = images[first : first + batch_size]
        with _grad_checkpointing(host.backbone, tower_of(watched), needed > MEMORY_BYTES):
            tokens, gradients = _gradients(watched, watcher, part, chosen, generator)
        if tokens[0].shape[1] != vit.prefix + vit.image_tokens:
            raise SettingError(f"images are {tuple(part.shape[2:])}; calibrate on the size that the model was made for")
        sums.add(first, tokens, gradients)
        if progress is not None:
            progress(min(first + batch_size, len(images)), len(images))
    probe, fit = sums.probes()
    _check_fit(fit, len(images))
    registers = tuple((sums.long.amax(dim=0) >= REGISTER_FREQUENCY * len(images)).nonzero().flatten().tolist())
    calibration = Calibration(probe.half().float(), vit.grid, registers, weight_fingerprint(host.block_weights))
    return Sensitivity(calibration, tuple(fit))


@contextlib.contextmanager
def _grad_checkpointing(backbone: Backbone, tower: nn.Module, enable: bool) -> Iterator[None]:
    """Gradient checkpointing, if it is asked for; afterwards the model is as it was."""
    before = backbone.uses_grad_checkpointing(tower)
    if enable:
        backbone.set_grad_checkpointing(tower, True)
    try:
        yield
    finally:
        if enable:
            backbone.set_grad_checkpointing(tower, before)


def _check_fit(fit: list[float | None], images: int) -> None:
    measured = [share for share in fit if share is not None]
    if not measured:
        raise GTPError(
            "the output does not depend on any image token of these images: there is nothing to learn; check the "
            "weights, and that the images are prepared as the model expects them"
        )
    if max(measured) < MIN_FIT:
        raise GTPError(
            f"nothing was learned: on images they were not fitted on, the probes explain {100 * max(measured):.1f} % "
            f"of the differences between tokens at most; give more images than {images}, or use GTPPlus() as it is"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class RecordTokens(Method):
    """Reduce nothing, and keep the tokens after each layer's attention."""

    name: ClassVar[str] = "watch"
    source: ClassVar[Source] = Source("none", "none", "none")

    def build(self, vit: ViTInfo) -> TokenRecorder:
        return TokenRecorder(vit)


class TokenRecorder(Reducer):
    """`RecordTokens` in a forward pass. A last layer whose image tokens are not used is not seen."""

    drops_patches = False

    def __init__(self, vit: ViTInfo) -> None:
        super().__init__(vit)
        self.recorded: list[Tensor] = []

    def start(self, tokens: Tokens) -> Tokens:
        self.recorded = []
        return tokens

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        return PLAIN

    def reduce(self, attention: LayerAttention) -> Tokens:
        tokens = attention.add()
        # The graph begins here: what is before the first layer's attention needs no gradient.
        x = tokens.x.detach().requires_grad_() if attention.layer == 0 else tokens.x
        self.recorded.append(x)
        return tokens.replace(x=x)


def _gradients(
    model: nn.Module, recorder: TokenRecorder, images: Tensor, measure: Measure, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens after the attention of each layer and the gradients of a random number of the output, all [B, N, C]."""
    with torch.inference_mode(False), torch.enable_grad():
        try:
            output = measure.outputs("the model", model, images.clone())
            tokens = list(recorder.recorded)
            noise = torch.stack([torch.randn(output.shape[1:], generator=generator) for _ in images])
            number = (measure.direction(output.detach(), noise.to(output.device)) * output).sum()
            gradients = torch.autograd.grad(number, tokens, allow_unused=True)
        except RuntimeError as error:
            raise GTPError(
                f"the model gives no gradients: {first_line(error)}; calibration needs one backward pass per image, "
                "through an ordinary torch model"
            ) from error
    filled = [torch.zeros_like(z) if g is None else g for z, g in zip(tokens, gradients, strict=True)]
    if not all(bool(gradient.isfinite().all()) for gradient in filled):
        raise GTPError("gradients are not finite on these images; calibrate in float32, and check the weights")
    return tokens, filled


class Sums:
    """Sums over the images, layer by layer."""

    def __init__(self, vit: ViTInfo) -> None:
        self.vit = vit
        self.half_sums = [
            [NormalEquations(vit.dim) for _ in range(vit.depth)] for _ in range(2)
        ]  # each is checked on the other
        self.long = torch.zeros(vit.depth, vit.image_tokens)  # images in which a cell's token is too long

    def add(self, first: int, tokens: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add tokens and gradients of some images, all [B, N, C]; `first` is the place of the first image."""
        for layer, (z, g) in enumerate(zip(tokens, gradients, strict=True)):
            z, g = (part[:, self.vit.prefix :].detach().float().cpu() for part in (z, g))
            length = z.norm(dim=2)
            too_long = length > REGISTER_NORM_RATIO * length.median(dim=1, keepdim=True).values
            self.long[layer] += too_long.sum(dim=0)
            for half in range(2):
                own = slice((first + half) % 2, None, 2)  # every second image
                self.half_sums[half][layer].add(z[own], g[own], ~too_long[own])

    def probes(self) -> tuple[Tensor, list[float | None]]:
        """The probe of each layer, [L, C], and how well each predicts images that it was not fitted on."""
        probe = torch.zeros(self.vit.depth, self.vit.dim)
        fit: list[float | None] = []
        for layer, (one, other) in enumerate(zip(*self.half_sums, strict=True)):
            both = one.merged_with(other)
            if both.rows == 0:
                fit.append(None)
                continue
            explained = (one.explained_variance(other.solve()) + other.explained_variance(one.solve())) / 2
            fit.append(round(explained, 4))
            if explained > 0:  # else it is noise, and all tokens matter alike
                probe[layer] = both.solve()
        return probe, fit


class NormalEquations:
    """The normal equations of one layer's regression, added up over images."""

    def __init__(self, channels: int) -> None:
        self.inputs = torch.zeros(channels, channels)  # X^T X
        self.both = torch.zeros(channels)  # X^T y
        self.targets = 0.0  # y^T y
        self.rows = 0

    def add(self, z: Tensor, g: Tensor, fine: Tensor) -> None:
        """Tokens [B, M, C], gradients there, and which tokens count [B, M].

        The target is the logarithm of |g|^2 |z|^2: how sensitive the output is to the token's direction. Only
        differences within an image matter, so its means are taken away.
        """
        strength = g.square().sum(dim=2) * z.square().sum(dim=2)
        fine = fine & (strength > 0)
        for image, target, counts in zip(z, strength, fine, strict=True):
            x, y = image[counts], target[counts].log()
            x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
            x, y = x - x.mean(dim=0), y - y.mean()
            self.inputs += x.T @ x
            self.both += x.T @ y
            self.targets += float(y.square().sum())
            self.rows += len(y)

    def merged_with(self, other: NormalEquations) -> NormalEquations:
        total = NormalEquations(len(self.both))
        total.inputs, total.both = self.inputs + other.inputs, self.both + other.both
        total.targets, total.rows = self.targets + other.targets, self.rows + other.rows
        return total

    def solve(self) -> Tensor:
        """The probe, [C]."""
        inputs = self.inputs.double()
        channels = len(inputs)
        ridge = RIDGE * self.rows / channels * torch.eye(channels, dtype=torch.float64)
        return torch.linalg.solve(inputs + ridge, self.both.double()).float()

    def explained_variance(self, probe: Tensor) -> float:
        """Share of the targets' variance that a probe explains here."""
        if self.targets == 0:
            return 0.0
        left = self.targets - 2 * float(probe @ self.both) + float(probe @ self.inputs @ probe)
        return 1 - left / self.targets
