"""GTP+'s calibration of a model: the sensitivity of its output to each token, and the cells it uses as registers.

A `Calibration` belongs to the weights it was learned on. As a text it is a setting of GTP+, so recipes hold it.

Shapes: L layers, C channels, K matrices of the blocks.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_vit.errors import SettingError, short_repr
from gtp_vit.tensors import dequantized

FORMAT = "gtp-vit calibration 1"
NUM_SAMPLED_WEIGHTS = 4096  # numbers of a matrix that its fingerprint reads
MAX_WEIGHT_CHANGE = 0.1  # of the weights: finetuning a little, or rounding to 8 bits, changes less


@dataclass(frozen=True, eq=False)
class Calibration:
    """A linear probe for each layer, and the cells of registers."""

    probe: Tensor  # [L, C]: log of the squared sensitivity is this times the token after a LayerNorm without weights
    grid: tuple[int, int]  # rows and columns of patches
    registers: tuple[int, ...]  # cells that the model keeps global information in
    weights: Tensor  # [K]: fingerprint of the weights

    def to_text(self) -> str:
        """The calibration as a setting of GTP+; the probe is rounded to half precision."""
        from safetensors.torch import save

        tensors = {
            "probe": self.probe.half(),
            "grid": torch.tensor(self.grid, dtype=torch.int32),
            "registers": torch.tensor(self.registers, dtype=torch.int32),
            "weights": self.weights.float(),
        }
        return base64.b64encode(save(tensors, {"format": FORMAT})).decode()

    def register_cells(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """The cells of registers; on a grid of a different size those in the same place of it.

        >>> Calibration(torch.zeros(1, 1), (4, 4), (0, 3, 15), torch.zeros(0)).register_cells((2, 8))
        (0, 7, 15)
        """
        if grid == self.grid:
            return self.registers
        rows, columns = (max(side - 1, 1) for side in self.grid)
        moved = {
            round(cell // self.grid[1] * (grid[0] - 1) / rows) * grid[1]
            + round(cell % self.grid[1] * (grid[1] - 1) / columns)
            for cell in self.registers
        }
        return tuple(sorted(moved))

    def with_fingerprint_of(self, weights: Iterable[Tensor]) -> Calibration:
        """The same for a model with these weights: one that was finetuned with it."""
        return dataclasses.replace(self, weights=weight_fingerprint(weights))

    def check_weights(self, weights: Iterable[Tensor]) -> None:
        """Raise SettingError if this was learned on other weights than these."""
        fingerprint = weight_fingerprint(weights)
        if len(fingerprint) == 0 or len(self.weights) == 0:  # a model without data
            return
        if len(fingerprint) != len(self.weights):
            raise SettingError(
                f"the calibration was learned on a model whose blocks have {len(self.weights)} matrices, those of this "
                f"one have {len(fingerprint)}; {RECALIBRATE_HINT}"
            )
        # 0 to 1.4, where the weights have nothing in common.
        change = float((fingerprint - self.weights).square().mean().sqrt())
        if not change <= MAX_WEIGHT_CHANGE:
            raise SettingError(
                f"the calibration was learned on other weights: about {100 * min(change, 1):.0f} % of these are "
                f"different, and {100 * MAX_WEIGHT_CHANGE:.0f} % may be; {RECALIBRATE_HINT}"
            )


RECALIBRATE_HINT = "run gtp_vit.calibrate or gtp-vit tune on this model, or set calibration to None"


@functools.lru_cache(maxsize=16)  # a search builds the same settings thousands of times
def calibration_from_text(text: str) -> Calibration:
    """The inverse of `Calibration.to_text`, for untrusted texts."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # Kept for later calls, so it must be ordinary tensors, whatever mode the first call is made in.
        with torch.device("cpu"), torch.inference_mode(False):
            stored = load(base64.b64decode(text, validate=True))
    except (binascii.Error, SafetensorError, ValueError) as error:
        raise SettingError(
            f"calibration is {short_repr(text)}, which gtp_vit.calibrate did not write; give its text, or a recipe"
        ) from error
    expected = {"probe": (torch.float16, 2), "grid": (torch.int32, 1), "registers": (torch.int32, 1)}
    expected["weights"] = (torch.float32, 1)
    fits = set(stored) == set(expected) and all(
        stored[name].dtype == dtype and stored[name].ndim == ndim for name, (dtype, ndim) in expected.items()
    )
    if not fits or len(stored["grid"]) != 2 or int(stored["grid"].min()) < 1:
        raise SettingError("calibration has missing or unknown fields; run gtp_vit.calibrate again")
    if not all(bool(stored[name].isfinite().all()) for name in ("probe", "weights")):
        raise SettingError("calibration has numbers that are not finite; run gtp_vit.calibrate again")
    rows, columns = stored["grid"].tolist()
    registers = tuple(sorted(set(stored["registers"].tolist())))
    if registers and not 0 <= registers[0] <= registers[-1] < rows * columns:
        raise SettingError(
            f"calibration names a cell that is not in its {rows} x {columns} patches; run gtp_vit.calibrate again"
        )
    return Calibration(stored["probe"].float(), (rows, columns), registers, stored["weights"])


def weight_fingerprint(weights: Iterable[Tensor]) -> Tensor:
    """For each matrix the sum of some of its numbers with fixed random signs, in units of their length, [K].

    These are like K normal numbers. They change by as much as the weights do, relative to their length: hardly by
    rounding, a little by finetuning, wholly for other weights.
    """
    bits = torch.frombuffer(bytearray(hashlib.shake_128(b"gtp-vit").digest(NUM_SAMPLED_WEIGHTS)), dtype=torch.uint8)
    signs = (bits & 1).float() * 2 - 1
    projections = []
    for matrix in weights:
        numbers = dequantized(matrix.detach()).flatten()
        numbers = numbers[:: max(len(numbers) // NUM_SAMPLED_WEIGHTS, 1)][:NUM_SAMPLED_WEIGHTS].float().cpu()
        projections.append(signs[: len(numbers)] @ numbers / numbers.norm().clamp(min=1e-30))
    return torch.stack(projections) if projections else torch.zeros(0)
