"""kept: the unreduced model's outputs, for those who pass over the same images again and again.

They are kept as the model gave them, so that figures are the same to the last digit. In memory, and not in a file:
every process keeps those of its own images, also where it sees no common disk, and a class costs four bytes an image
(200 MB in all for ImageNet's validation set). What does not fit is computed again.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from gtp_vit.inputs.data import Batch

MOST_BYTES = 512 * 2**20  # in each process


class Kept:
    """Outputs of one model, by batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.bytes = model, 0
        self.outputs: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, batch: Batch, images: Tensor) -> Tensor:
        """The model's output of `images`, which are the batch's on the model's device."""
        # A data set of somebody's own may change its images from pass to pass, so their places are not enough.
        raw = batch.images.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        key = (*batch.place.tolist(), zlib.crc32(raw))  # type: ignore[arg-type]
        if key not in self.outputs:
            found = self.compute(images)
            if self.bytes + found.nbytes > MOST_BYTES:
                return found
            self.outputs[key] = found.cpu()
            self.bytes += found.nbytes
        return self.outputs[key].to(images.device)

    def compute(self, images: Tensor) -> Tensor:
        return self.model(images)
