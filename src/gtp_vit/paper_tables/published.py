"""What the paper prints about cost: the GMACs of GTP on each backbone, and which setting of each rival gives which."""

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


# Printed GMACs for P = 0, 1, 2, ... (main results; ViTs without class token). These P are its settings for LV-ViT.
GMACS = {
    "deit_small_patch16_224": (4.6, 4.5, 4.3, 4.2, 4.0, 3.9, 3.7, 3.6, 3.4, 3.3, 3.2, 3.0, 2.9, 2.7, 2.6),
    "deit_base_patch16_224": (17.6, 17.0, 16.5, 15.9, 15.4, 14.8, 14.2, 13.7, 13.1, 12.6, 12.1, 11.6, 11.0, 10.4, 9.8),
    "vit_medium_patch16_gap_256": (10.6, 10.4, 10.1, 9.9, 9.6, 9.3, 9.0, 8.8, 8.5, 8.3, 8.0, 7.8, 7.5, 7.2, 7.0),
    "lvvit_s": (6.6, 6.4, 6.1, 5.9, 5.7, 5.4, 5.2, 5.0, 4.8, 4.6, 4.4, 4.1, 3.9),
    "lvvit_m": (12.7, 12.1, 11.5, 10.9, 10.3, 9.7, 9.1, 8.5, 8.0, 7.4),
}


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
