"""The subject of a check: one method on one small model. What several promises look at is computed once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.core.costs import Costs
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.loop import run
from gtp_vit.core.reducer import Method
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.patching import Patched, host_of, is_patched, patch, tower_of
from gtp_vit.profiling.trace import Trace, trace


def primary(result: Any) -> Tensor:
    """The output of a model, or the part of it that people read."""
    if isinstance(result, Tensor):
        return result
    names = ("logits", "image_embeds", "pooler_output", "last_hidden_state")
    return next(result[name] for name in names if result.get(name) is not None)


def output(model: Callable[[Tensor], object], images: Tensor) -> Tensor:
    """The output of a model without gradients."""
    with torch.no_grad():
        return primary(model(images))


def randomised(factory: Callable[[], nn.Module]) -> nn.Module:
    """A new model in eval mode with all parameters random, so that none can hide; the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = factory()
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.15 * torch.randn(parameter.shape)
    return model.eval()


def random_images(model: nn.Module, batch: int) -> Tensor:
    """Images of the size that a model takes, the same in every run."""
    host = host_of(model)
    height, width = (cells * pixels for cells, pixels in zip(host.vit.grid, host.inputs.patch, strict=True))
    return torch.randn(batch, host.inputs.channels, height, width, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Case:
    """One method on one family of small models."""

    family: str
    method: Method
    factory: Callable[[], nn.Module]

    def __str__(self) -> str:
        return f"{self.family}-{self.method}"

    @property
    def original(self) -> Original:
        """The model that is not reduced."""
        return _original(self.factory)

    def images(self, batch: int) -> Tensor:
        """Random images of the size that the family takes."""
        return random_images(self.original.model, batch)


@functools.cache
def _original(factory: Callable[[], nn.Module]) -> Original:
    return Original(randomised(factory))


class Original:
    """A small model that is not reduced, and what it computes. Cases share it, so no promise may change it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.vit: ViTInfo = host_of(model).vit

    @functools.cached_property
    def costs(self) -> Costs:
        """The measured costs of its parts."""
        return host_of(self.model).costs()

    @functools.cached_property
    def images(self) -> Tensor:
        """A batch of three."""
        return random_images(self.model, 3)

    @functools.cached_property
    def output(self) -> Tensor:
        """The unreduced model's output for the batch."""
        return output(self.model, self.images)

    @functools.cached_property
    def features(self) -> Tensor | None:
        """The output of timm's `forward_features`; other libraries have entry points of their own."""
        forward_features = getattr(self.model, "forward_features", None)
        with torch.no_grad():
            return None if forward_features is None else forward_features(self.images)


class Subject:
    """A case with its models and results, each computed when the first promise asks for it."""

    def __init__(self, case: Case) -> None:
        self.case, self.method = case, case.method
        self.original = case.original
        self.model, self.images, self.vit = self.original.model, self.original.images, self.original.vit

    def make(self) -> nn.Module:
        """A model of its own, for a promise that changes it."""
        return copy.deepcopy(self.model)

    @functools.cached_property
    def fast(self) -> Patched:
        """The reduced model."""
        fast = patch(self.model, self.method, quiet=True)
        assert is_patched(fast)
        return fast

    @functools.cached_property
    def output(self) -> Tensor:
        """The output of the reduced model."""
        return output(self.fast, self.images)

    @functools.cached_property
    def trace(self) -> Trace:
        """Where the patches of all images went."""
        return trace(self.fast, self.images)

    @functools.cached_property
    def layers(self) -> list[Tokens]:
        """The tokens before the first layer and after each layer."""
        return self._watched[0]

    @functools.cached_property
    def reductions(self) -> list[tuple[Tokens, Tokens]]:
        """The tokens before and after each step of the method."""
        return self._watched[1]

    @functools.cached_property
    def _watched(self) -> tuple[list[Tokens], list[tuple[Tokens, Tokens]]]:
        """One pass through a reduced model of its own, whose reducer is watched."""
        watched = tower_of(patch(self.model, self.method, quiet=True))
        reducer: Any = watched.reducer  # whose hooks are replaced
        layers: list[Tokens] = []
        steps: list[tuple[Tokens, Tokens]] = []
        attend = reducer.add_and_reduce

        def watch_attend(attention: LayerAttention) -> Tokens:
            before = attention.tokens
            left: Tokens = attend(attention)
            if attention.tokens is before:
                steps.append((before.add(attention.branch()), left))
            else:  # reduced before the output was computed
                steps.append((before, attention.tokens))
            return left

        def watch(step: Callable[[int, Tokens], Tokens]) -> Callable[[int, Tokens], Tokens]:
            def watch_step(layer: int, tokens: Tokens) -> Tokens:
                left = step(layer, tokens)
                steps.append((tokens, left))
                return left

            return watch_step

        reducer.add_and_reduce = watch_attend
        reducer.before, reducer.after = watch(reducer.before), watch(reducer.after)
        with torch.no_grad():
            run(watched, self.images, observe=layers.append, track_owners=True)
        return layers, steps
