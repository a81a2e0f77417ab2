"""Reduction that grows during training: the same method, at a share of its strength."""

from __future__ import annotations

import math

from gtp_vit.training.settings import Training


def strength(epoch: float, settings: Training) -> float:
    """How strong the reduction is in this epoch, counted from 0: from 0 to 1 along half a cosine.

    >>> [round(strength(epoch, Training(shrink_start=1, shrink_epochs=4)), 2) for epoch in range(6)]
    [0.0, 0.0, 0.15, 0.5, 0.85, 1.0]
    """
    if epoch < settings.shrink_start:
        return 0.0
    if epoch >= settings.shrink_start + settings.shrink_epochs:
        return 1.0
    return 0.5 - 0.5 * math.cos(math.pi * (epoch - settings.shrink_start) / settings.shrink_epochs)
