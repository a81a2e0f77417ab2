"""What GTP itself costs in MACs: as we do it, and as torchprofile counts it in the released code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtp_vit.core.reducer import Convention, VitInfo
from gtp_vit.paper.selection import SELECTORS

if TYPE_CHECKING:
    from gtp_vit.methods.gtp import GTP


def own_macs(
    method: GTP, vit: VitInfo, grid: tuple[int, int], plan: tuple[int, ...], layers: int, convention: Convention
) -> int:
    """Graph once, then selection and propagation in the first `layers` layers of the schedule `plan`."""
    if sum(plan) == 0:
        return 0
    official = convention == "torchprofile"
    count = grid[0] * grid[1]
    total = 0
    if method.graph != "none":
        semantic = method.graph in ("mixed", "semantic") and (official or method.neighbours > 0)
        total += count**2 * vit.dim if semantic else 0
        total += 2 * count**3 if official else 0  # the degree matrices are multiplied as dense ones
    for layer, removed in enumerate(plan[:layers]):
        if official:
            total += _official_selection_macs(method, count, vit.prefix)
        elif removed and method.theta == 1 and method.select == "class":
            # Fused attention does not show its map: the class token's row is computed once more.
            total += (count + vit.prefix) * vit.heads * vit.head_dim
        count -= removed
        if method.graph != "none":
            # Nobody reads the sizes that the last layer makes; torchprofile does not see them.
            sizes = method.proportional_attention and not (official and layer == len(plan) - 1)
            # The released code multiplies by alpha in a step of its own; ours gives the prefix tokens weights of zero.
            products = count * (removed + 1) if official else (count + vit.prefix) * removed
            total += products * (vit.dim + int(sizes))
    return total


def _official_selection_macs(method: GTP, count: int, prefix: int) -> int:
    """What torchprofile counts of the released code's selection: products, means and the similarity matrix."""
    if method.select == "cosine_attention":
        return count * (count + prefix) * (count + int(method.heads == "mean"))
    products = count if method.select == "mixed" else 0
    scores = len(SELECTORS[method.select].needs)
    return products + (scores * count if method.heads == "mean" else 0)
