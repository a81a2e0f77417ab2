"""What the paper prints about settings: which setting of each method gives which GMACs, as data."""

from __future__ import annotations

from dataclasses import dataclass

from gtp_vit.core.reducer import Method
from gtp_vit.methods.ats import ATS
from gtp_vit.methods.dynamicvit import DynamicViT
from gtp_vit.methods.evit import EViT
from gtp_vit.methods.evovit import EvoViT
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.tome import ToMe
from gtp_vit.methods.trilevel import TriLevel


@dataclass(frozen=True)
class Settings:
    """One backbone's columns of the appendix's hyper-parameter tables."""

    model: str  # timm's name
    title: str
    gmacs: tuple[float, ...]  # as printed, approximate
    methods: dict[str, tuple[Method, ...]]  # name -> a setting for each column


def _ats(first: tuple[int, ...]) -> tuple[Method, ...]:
    return tuple(ATS(layers=tuple(range(layer, 12))) for layer in first)


HYPERPARAMETERS = {
    "deit_s": Settings(
        "deit_small_patch16_224",
        "DeiT-S",
        (3.5, 3.0, 2.6, 2.3),
        {
            "DynamicViT": tuple(DynamicViT(keep_ratio=ratio) for ratio in (0.8, 0.7, 0.6, 0.5)),
            "EViT": tuple(EViT(keep_rate=rate) for rate in (0.8, 0.7, 0.6, 0.5)),
            "Evo-ViT": tuple(EvoViT(keep_ratio=ratio) for ratio in (0.7, 0.5, 0.4, 0.3)),
            "Tri-Level": tuple(TriLevel(keep_ratio=ratio) for ratio in (0.8, 0.7, 0.6, 0.5)),
            "ToMe": tuple(ToMe(r=r) for r in (8, 11, 14, 16)),
            "ATS": _ats((7, 6, 5, 3)),
            "GTP": tuple(GTP(propagate=number) for number in (8, 11, 14, 16)),
        },
    ),
    "deit_b": Settings(
        "deit_base_patch16_224",
        "DeiT-B",
        (15.3, 13.1, 11.6, 9.8, 8.8),
        {
            "DynamicViT": tuple(DynamicViT(keep_ratio=ratio) for ratio in (0.9, 0.8, 0.7, 0.6, 0.5)),
            "EViT": tuple(EViT(keep_rate=rate) for rate in (0.9, 0.8, 0.7, 0.6, 0.5)),
            "Evo-ViT": tuple(EvoViT(keep_ratio=ratio) for ratio in (0.8, 0.7, 0.5, 0.4, 0.3)),
            "Tri-Level": tuple(TriLevel(keep_ratio=ratio) for ratio in (0.9, 0.8, 0.7, 0.6, 0.5)),
            "ToMe": tuple(ToMe(r=r) for r in (4, 8, 11, 14, 16)),
            "ATS": _ats((9, 8, 6, 3, 1)),
            "GTP": tuple(GTP(propagate=number) for number in (4, 8, 11, 14, 16)),
        },
    ),
}
