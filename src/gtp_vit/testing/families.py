"""Small instances of every supported model family, with all parameters random so that none can hide.

A family brings its own (`Backbone.small_models`); the conformance battery runs over all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from gtp_vit.backbones import BACKBONES, known_backbones
from gtp_vit.core.backbone import Backbone
from gtp_vit.methods.gtp_plus.calibration import Calibration
from gtp_vit.patching import host_of
from gtp_vit.testing.subject import primary, random_images, randomised

DEPTH = 4


@functools.cache  # as a case is known by its factory
def _small_models(kind: type[Backbone], depth: int) -> dict[str, Callable[[], nn.Module]]:
    return kind().small_models(depth)


def factories(depth: int = DEPTH) -> dict[str, Callable[[], nn.Module]]:
    """Name -> a function that makes a small model, of all families that are registered now."""
    registered = [_small_models(type(backbone), depth) for backbone in known_backbones().values()]
    return {name: factory for models in registered for name, factory in models.items()}


# Of the families in this package:
ALL = [(name, family) for name, backbone in BACKBONES.items() for family in _small_models(type(backbone), DEPTH)]
NAMES = [family for _, family in ALL]
# Families whose blocks differ from another one's in details only pass the short battery: the whole one on every family
# would take an hour.
LIGHT: set[str] = {
    *("res_post_norm", "hybrid", "hybrid_batch_norm", "torchvision_stem", "lvvit_non_square"),
    *("clip_quickgelu", "deit3", "dinov2_swiglu", "siglip_gap", "qk_norm", "no_qkv_bias"),
    *(family for backbone, family in ALL if backbone not in ("timm_vit", "lvvit", "torchvision_vit")),
} - {"dinov3", "rope_mixed", "beit_shared", "hf_vit", "hf_dinov3", "open_clip"}
THOROUGH = [family for family in NAMES if family not in LIGHT]
# One of each kind of head and prefix, for the tests that take seconds each.
REPRESENTATIVE = ["vit", "deit_distilled", "dinov2_registers", "gap"]
# A method sees nothing of a model but its tokens. So its options run on one of each kind of these: with and without
# class token and registers, grids of other shapes, positions in the blocks.
DIVERSE = [*REPRESENTATIVE, "lvvit", "eva_l", "non_square", "dinov3"]


@functools.cache
def has_class_token(family: str) -> bool:
    return host_of(make(family)).vit.class_token


@functools.cache
def head_reads_image_tokens(family: str) -> bool:
    return host_of(make(family)).vit.head_reads_image_tokens


def make(family: str, layers: int | None = None) -> nn.Module:
    """A new small model in eval mode, the same in every run; `layers` other than four where all do the same."""
    return randomised(factory_of(family, layers or DEPTH))


def factory_of(family: str, depth: int = DEPTH) -> Callable[[], nn.Module]:
    """The function that makes the small model of a family."""
    return factories(depth)[family]


def calibration(registers: tuple[int, ...] = (0,)) -> str:
    """A calibration that fits every small model, with random probes."""
    probe = 4 * torch.randn(4, 24, generator=torch.Generator().manual_seed(2))
    return Calibration(probe, (8, 8), registers, torch.zeros(0)).to_text()


def output(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The output of a model, or the part of it that people read; with gradients."""
    return primary(model(images))


@functools.cache
def images(family: str, batch: int = 3) -> torch.Tensor:
    """Random images of the size that a family takes."""
    return random_images(make(family), batch)
