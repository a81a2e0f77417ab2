"""Appendix, computational complexity: the closed forms behind the paper's claim, as printed and as summed.

Symbols are the paper's: N tokens, M removed in each layer, C channels, L layers, H heads. All results are MACs.
"""

from __future__ import annotations


def tokens_in_layer(layer: int, N: int, M: int) -> int:
    """Eq. (13): N_l = N - (l - 1) M, layers counted from 1."""
    return N - (layer - 1) * M


def gtp(N: int, M: int, C: int, L: int, H: int) -> int:
    """Eq. (15): graph N^2 C once, then selection H N_l and propagation (N_l - M) M C in every layer."""
    tokens = [tokens_in_layer(layer, N, M) for layer in range(1, L + 1)]
    return N * N * C + sum(H * n + (n - M) * M * C for n in tokens)


def tome(N: int, M: int, C: int, L: int) -> float:
    """Eq. (14), its first line: matching N_l^2 C / 4 and merging M C in every layer.

    ToMe really matches keys averaged over heads, so C should be the head dimension; this is what the paper claims.
    """
    return sum(tokens_in_layer(layer, N, M) ** 2 * C / 4 + M * C for layer in range(1, L + 1))


def tome_as_printed(N: int, M: int, C: int, L: int) -> float:
    """Eq. (14), its last line. It does not follow from the first: the M^2 C coefficient is wrong (see docs)."""
    return L * N**2 * C / 4 + (L - L**2) * N * M * C / 4 + (L**3 / 12 + L**2 / 12 + L / 8) * M**2 * C + L * M * C
