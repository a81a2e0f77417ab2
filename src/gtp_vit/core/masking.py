"""Softmax that masks tokens without removing them, used to train DynamicViT and Tri-Level.

Shapes: B batch, H heads, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-6


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """(e m + eps / N) / (sum e m + eps) with e = exp(logit - row maximum).

    The small terms make a row without any allowed entry a mean over all, not a division by zero.

    Args:
        logits: [B, H, N, N].
        mask: 1 = the row's token may attend to the column's, 0 = it is masked; [B, 1, 1 or N, N].
    """
    if torch.is_grad_enabled() and (logits.requires_grad or mask.requires_grad):
        probs: Tensor = _WithGradient.apply(logits, mask)
        return probs
    return _parts(logits, mask)[0].to(logits.dtype)


def _parts(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, e, and sum e m + eps, in full precision."""
    weights = (logits - logits.amax(dim=-1, keepdim=True)).to(torch.float32).exp()
    allowed = weights * mask
    total = allowed.sum(dim=-1, keepdim=True) + EPSILON
    return (allowed + EPSILON / allowed.shape[-1]) / total, weights, total


class _WithGradient(torch.autograd.Function):
    """A fused backward pass: autograd's own takes most of the time of DynamicViT's training.

    The row maximum is treated as a constant. It would cancel but for EPSILON, so where the maximum is masked the
    gradient is off by about EPSILON over the sum of the allowed e; a row in which nothing is allowed gets none.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor) -> Tensor:
        probs, weights, total = _parts(logits, mask)
        ctx.save_for_backward(mask, probs, weights, total)
        return probs.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        mask, probs, weights, total = ctx.saved_tensors
        gradient = gradients[0].float()
        mean = (gradient * probs).sum(dim=-1, keepdim=True)
        change = (gradient - mean).mul_(1 / total).mul_(weights)  # of e m, times e
        of_mask = change.sum_to_size(mask.shape) if ctx.needs_input_grad[1] else None
        return change.mul_(mask).to(gradients[0].dtype), of_mask
