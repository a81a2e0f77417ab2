"""Queries, keys and values for kernels: ordinary ones, ties, extremes, and every memory layout."""

import torch

KINDS = ("normal", "equal", "zeros", "huge", "tiny", "ties")


def values(kind: str, *shape: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(*shape, generator=generator)
    match kind:
        case "equal":
            return torch.full(shape, 0.5)
        case "zeros":
            return torch.zeros(shape)
        case "huge":
            return 40 * x
        case "tiny":
            return 1e-20 * x
        case "ties":
            return x.round()
    return x


def operands(kind, batch, heads, tokens, depth, seed, layout="fused"):
    generator = torch.Generator().manual_seed(seed)
    qkv = values(kind, batch, tokens, 3, heads, depth, generator=generator).permute(2, 0, 3, 1, 4)
    if layout == "contiguous":
        qkv = qkv.contiguous()
    elif layout == "strided":  # not even the channels are contiguous
        qkv = qkv.transpose(-1, -2).contiguous().transpose(-1, -2)
    size = torch.rand(batch, tokens, generator=generator) + 0.5
    return *qkv.unbind(0), size
