"""A cache of the unreduced model's outputs, for several passes over the same images.

Outputs are kept unrounded, so figures are the same to the last digit, and in memory, so no common disk is needed: each
process keeps those of its own images, four bytes a class and image (200 MB in all for ImageNet's validation set). What
does not fit is computed again.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from gtp_vit.data.items import Batch
from gtp_vit.metrics.base import UNREDUCED, Measure

MAX_BYTES = 512 * 2**20  # in each process


class OutputCache:
    """The unreduced model's outputs, by batch."""

    def __init__(self, model: nn.Module, measure: Measure) -> None:
        self.model, self.measure, self.bytes = model, measure, 0
        self.outputs: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, batch: Batch, images: Tensor) -> Tensor:
        """The model's outputs for `images`, those of the batch on the model's device."""
        # A user's own data set may change its images between passes, so their places are not enough.
        raw = batch.images.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        key = (*batch.indices.tolist(), zlib.crc32(raw))  # type: ignore[arg-type]
        if key not in self.outputs:
            outputs = self.compute(images)
            if self.bytes + outputs.nbytes > MAX_BYTES:
                return outputs
            self.outputs[key] = outputs.cpu()
            self.bytes += outputs.nbytes
        return self.outputs[key].to(images.device)

    def compute(self, images: Tensor) -> Tensor:
        return self.measure.outputs(UNREDUCED, self.model, images)
